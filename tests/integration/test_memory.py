"""Bytes of strangers do not become gigabytes of objects: processes of their own, measured by the kernel."""

import gzip
import struct
import subprocess
import sys

import pytest
import sqlalchemy as sa

from tests.support._raw_publisher import Batch, RawPublisher
from tests.support._recording import recorded_to

KEYED = b"\0\x53\x74\xc1\x0f\x02\xa1\x08order_id\xa1\x02o1" + b"\0\x53\x75\xa0\x01b"
"""A message with the header `order_id`."""

MEASURE = """
import resource, sys, threading, time
{imports}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
{work}
print(peak() - before)
"""

RECORD = MEASURE.format(
    imports="from relatum.recording import Recorder\nfrom relatum.store import make_engine\nimport sqlalchemy",
    work="""
broker, database, stream, end = sys.argv[1:]
engine = make_engine(database)
stop = threading.Event()
recorder = Recorder(broker, database, [stream], keys=["order_id"])
thread = threading.Thread(target=recorder.run, args=(stop,))
thread.start()
query = sqlalchemy.text("SELECT max(to_offset) FROM relatum.coverage JOIN relatum.streams USING (stream_id)")
deadline = time.monotonic() + 500
while time.monotonic() < deadline:
    with engine.connect() as connection:
        if (connection.execute(query).scalar_one() or 0) >= int(end):
            break
    time.sleep(0.1)
stop.set()
thread.join()
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
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def bomb(record: bytes, count: int = 65_535) -> Batch:
    """A gzip batch of as many equal records as one may hold."""
    content = (struct.pack(">I", len(record)) + record) * count
    return 1, count, len(content), gzip.compress(content)


@pytest.fixture
def bombed(stream_url: str, stream_name: str) -> str:
    """A stream with a quarter of a million small messages in 28 kB: one chunk of four gzip batches."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(*[bomb(KEYED)] * 4)
    return stream_name


@pytest.mark.differs  # They do not; comparing so many takes half a minute, and the test counts them itself.
def test_a_recorder_takes_batches_of_small_records_apart_piece_by_piece(
    amqp_url: str, database_url: str, engine: sa.Engine, bombed: str
) -> None:
    """28 kB that hold a quarter of a million messages are recorded, each of them, within some ten MiB."""
    assert measured(RECORD, amqp_url, database_url, bombed, str(4 * 65_535)) < 70
    assert recorded_to(engine, bombed) == 4 * 65_535
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT count(*) FROM relatum.relations WHERE value = 'o1'")).scalar_one()
    assert rows == 4 * 65_535


def test_a_reader_takes_batches_of_small_records_apart_piece_by_piece(stream_url: str, stream_name: str) -> None:
    """Reading the last of the four million messages in 84 kB, a few of them, and many, takes some MiB."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(*[bomb(b"\0\x53\x75\xa0\x01b")] * 64)
    assert measured(READ, stream_url, stream_name) < 25
