"""What reading leaves behind in a broker: RabbitMQ 3.10 keeps a counter for each subscription id of each connection."""

import re

from relatum import MessageId
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from tests.support import declare_stream, publish_plain
from tests.support.rabbitmq_tools import evaluate


def counters(server: LocalRabbitMQ) -> int:
    """How many counters of streams a broker keeps."""
    found = evaluate(server, "maps:size(osiris_counters:overview())")
    number = re.search(r"\d+", found)
    assert number is not None, found
    return int(number.group())


def test_reading_leaves_few_counters(own_broker: LocalRabbitMQ, is_long: bool) -> None:
    """Thousands of reads, single and batched, leave a few counters for each connection that took them, not for each."""
    stream, rounds = "read-often", 50_000 if is_long else 1_000
    declare_stream(own_broker.broker_url, stream)
    publish_plain(own_broker.broker_url, stream, [str(number).encode() for number in range(20)])
    before = counters(own_broker)
    with StreamReader.open(own_broker.stream_url) as reader:
        for number in range(rounds):
            assert reader.read(stream, number % 20).body == str(number % 20).encode()
            if number % 10 == 0:
                assert reader.bounds(stream) == (0, 19)
                ids = [MessageId(stream, offset) for offset in (19, 3, 11)]
                assert [message.offset for message in reader.read_many(ids) if not isinstance(message, Exception)] == [
                    19,
                    3,
                    11,
                ]
                assert len(list(reader.iterate(stream))) == 20
    # Of 3.10, a connection is used for 500 attaches; each has used about ten ids at a time at most.
    assert counters(own_broker) - before <= 16 * (1 + 2 * rounds // 500)
