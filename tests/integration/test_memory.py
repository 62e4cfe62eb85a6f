"""Bytes of strangers do not become gigabytes of objects: processes of their own, measured by the kernel."""

import gzip
import struct

import pytest

from tests.support import run_python
from tests.support._raw_publisher import Batch, RawPublisher
from tests.support.place import Place

KEYED = b"\0\x53\x74\xc1\x0f\x02\xa1\x08order_id\xa1\x02o1" + b"\0\x53\x75\xa0\x01b"
"""A message with the header `order_id`."""

MEASURE = """
import resource, sys
{imports}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
{work}
print(peak() - before)
"""

RECORD = MEASURE.format(
    imports="from relatum.store.database import make_engine\nfrom tests.support import recording, wait_recorded",
    work="""
broker, database, stream = sys.argv[1:]
engine = make_engine(database)
with recording(broker, engine, stream, keys=["order_id"]):
    wait_recorded(broker, engine, stream, limit_s=500)
engine.dispose()
""",
)

READ = MEASURE.format(
    imports="import itertools\nfrom relatum.reading import StreamReader",
    work="""
broker, stream = sys.argv[1:]
with StreamReader.open(broker) as reader:
    last = reader.bounds(stream).last
    assert reader.read(stream, last).body == b"b"
    asked = [last, 0, 70_000]
    assert [each.offset for each in reader.read_many((stream, offset) for offset in asked)] == asked
    assert sum(1 for _ in itertools.islice(reader.iterate(stream), 200_000)) == 200_000
""",
)


def measured(script: str, *arguments: str) -> int:
    """The MiB by which a process grew that ran a script, at most."""
    return int(run_python("-c", script, *arguments, timeout_s=600).stdout.split()[-1])


def bomb(record: bytes, count: int = 65_535) -> Batch:
    """A gzip batch of as many equal records as one may hold."""
    content = (struct.pack(">I", len(record)) + record) * count
    return 1, count, len(content), gzip.compress(content)


@pytest.mark.differs  # They are not equal; comparing this many takes half a minute, and the test counts them itself.
def test_a_recorder_takes_batches_of_small_records_apart_piece_by_piece(place: Place) -> None:
    """A recorder records a quarter of a million messages from four gzip batches of 28 kB within 70 MiB."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(*[bomb(KEYED)] * 4)
    assert measured(RECORD, place.amqp, place.database, place.stream) < 70
    assert place.recorded_to() == 4 * 65_535
    assert place.sql("SELECT count(*) FROM relatum.relations WHERE value = 'o1'") == [(4 * 65_535,)]


def test_a_reader_takes_batches_of_small_records_apart_piece_by_piece(stream_url: str, stream_name: str) -> None:
    """Reading one, some and many of the four million messages in 84 kB takes less than 25 MiB."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(*[bomb(b"\0\x53\x75\xa0\x01b")] * 64)
    assert measured(READ, stream_url, stream_name) < 25
