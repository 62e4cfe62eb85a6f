import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import java.nio.charset.StandardCharsets;
import java.util.Date;
import java.util.HashMap;
import java.util.Map;

/** Publishes orders with confirms, as somebody does who knows nothing of Relatum: URL, exchange, routing key, count. */
public class Publisher {
  public static void main(String[] args) throws Exception {
    ConnectionFactory factory = new ConnectionFactory();
    factory.setUri(args[0]);
    try (Connection connection = factory.newConnection(); Channel channel = connection.createChannel()) {
      channel.confirmSelect();
      for (int number = 0; number < Integer.parseInt(args[3]); number++) {
        Map<String, Object> headers = new HashMap<>();
        headers.put("order_id", number);
        headers.put("customer", "Müller & Söhne");
        headers.put("cents", 1234567890123L + number);
        headers.put("rate", 0.1);
        headers.put("paid", number % 2 == 0);
        headers.put("placed", new Date(1_790_000_000_000L));
        AMQP.BasicProperties properties =
            new AMQP.BasicProperties.Builder()
                .headers(headers)
                .correlationId("order-" + number)
                .contentType("text/plain")
                .deliveryMode(2)
                .build();
        byte[] body = ("order " + number).getBytes(StandardCharsets.UTF_8);
        channel.basicPublish(args[1], args[2], properties, body);
      }
      channel.waitForConfirmsOrDie(120_000);
    }
  }
}
