"""A shop that publishes by AMQP 1.0, as a user of RabbitMQ's client writes it: a URL, and the names of two exchanges.

After the client's own getting-started example: exchanges, queues and bindings by its management, a publisher to each
exchange, and a look at what became of each message.
"""

import json
import sys

from rabbitmq_amqp_python_client import (
    AddressHelper,
    Connection,
    Converter,
    Environment,
    ExchangeSpecification,
    ExchangeToQueueBindingSpecification,
    ExchangeType,
    Message,
    OutcomeState,
    Publisher,
    QuorumQueueSpecification,
)

ORDERS = 10
UNPAID = "o7"


def declare(connection: Connection, name: str) -> None:
    """An exchange with a queue."""
    management = connection.management()
    management.declare_exchange(ExchangeSpecification(name=name, exchange_type=ExchangeType.topic))
    management.declare_queue(QuorumQueueSpecification(name=name))
    management.bind(
        ExchangeToQueueBindingSpecification(source_exchange=name, destination_queue=name, binding_key="new.#")
    )


def publish(publisher: Publisher, message: Message) -> None:
    """Publish, and see that the broker took it."""
    status = publisher.publish(message)
    assert status.remote_state == OutcomeState.ACCEPTED, status.remote_state


def run(connection: Connection, orders: str, payments: str) -> None:
    """Take orders, and pay all but one."""
    for exchange in (orders, payments):
        declare(connection, exchange)
    ordering = connection.publisher(AddressHelper.exchange_address(orders, "new.order"))
    paying = connection.publisher(AddressHelper.exchange_address(payments, "new.payment"))
    for number in range(ORDERS):
        order = f"o{number}"
        body = Converter.string_to_bytes(json.dumps({"order": {"id": order, "customer": f"c{number % 3}"}}))
        publish(
            ordering,
            Message(id=f"order-{number}", body=body, application_properties={"order_id": order, "n": number}),
        )
        if order != UNPAID:
            publish(
                paying,
                Message(
                    body=Converter.string_to_bytes("paid"),
                    correlation_id=f"order-{number}",
                    application_properties={"order_id": order},
                ),
            )
    ordering.close()
    paying.close()


def main() -> None:
    """Do it."""
    url, orders, payments = sys.argv[1:4]
    environment = Environment(uri=url)
    connection = environment.connection()
    connection.dial()
    run(connection, orders, payments)
    environment.close()


if __name__ == "__main__":
    main()
