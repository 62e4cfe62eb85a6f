"""Recorders inside a test, and what the table holds afterwards."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import sqlalchemy as sa

from relatum import Broker
from relatum.keys import KeyDefinition
from relatum.reading import AnyBroker, StreamReader
from relatum.recording import Recorder

# The parts of a recorder, without its threads: tests import them from here alone.
from relatum.recording.batch import Batch as Batch
from relatum.recording.batch import TimeBlock as TimeBlock
from relatum.recording.batch import time_blocks as time_blocks
from relatum.recording.batch import width_class as width_class
from relatum.recording.commit import Share as Share
from relatum.recording.commit import add_checkpoints as add_checkpoints
from relatum.recording.commit import commit_shares as commit_shares
from relatum.recording.tails import open_streams as open_streams
from tests.support._waiting import LIMIT_S, wait_until
from tests.support.threads import beside

Keys = Iterable[str | KeyDefinition]

READERS: dict[str, StreamReader] = {}
"""Readers that stay open, by their broker's URL: a new one takes a second to find a stream of RabbitMQ 3.10 empty."""


def reader_of(broker: str | Broker) -> AbstractContextManager[StreamReader]:
    """The reader of a broker that stays open; where there is none, one for the block."""
    kept = READERS.get(broker) if isinstance(broker, str) else None
    return nullcontext(kept) if kept else StreamReader.open(broker)


@contextmanager
def running(recorder: Recorder) -> Iterator[Recorder]:
    """Run a recorder in a thread; leaving finishes its batch and waits for its end."""
    stop = threading.Event()
    with beside(recorder.run, stop, stop=stop.set, name="recorder of the test"):
        yield recorder


def recording(broker: AnyBroker, engine: sa.Engine, *streams: str, keys: Keys = ()) -> AbstractContextManager[Recorder]:
    return running(Recorder(broker, engine.url, streams, keys=keys))


def recorded_to(engine: sa.Engine, stream: str) -> int:
    """The end of a stream's coverage; 0 where it was never recorded."""
    return _recorded_to(engine, stream) or 0


def _recorded_to(engine: sa.Engine, stream: str) -> int | None:
    query = sa.text(
        "SELECT max(to_offset) FROM relatum.coverage JOIN relatum.streams USING (stream_id) "
        "WHERE name = :name AND replaced_at IS NULL AND kind = 'recorded'"
    )
    with engine.connect() as connection:
        end: int | None = connection.execute(query, {"name": stream}).scalar_one()
        return end


def wait_recorded(broker: AnyBroker, engine: sa.Engine, stream: str, *, limit_s: float = LIMIT_S) -> int:
    """Wait until all that is in the stream now is recorded, and the stream known; gives the end of its coverage."""
    with reader_of(broker) as reader:
        last = reader.bounds(stream).last
    end = 0 if last is None else last + 1

    def is_recorded() -> bool:
        recorded = _recorded_to(engine, stream)
        return recorded is not None and recorded >= end

    wait_until(is_recorded, limit_s=limit_s, what=f"coverage of {stream} up to {end}")
    return recorded_to(engine, stream)


def record(broker: AnyBroker, engine: sa.Engine, *streams: str, keys: Keys = ()) -> None:
    with recording(broker, engine, *streams, keys=keys):
        for stream in streams:
            wait_recorded(broker, engine, stream)


def rows_of(engine: sa.Engine, stream: str) -> list[tuple[str, str, int]]:
    """The stream's rows as people's own SQL sees them: (key, value, offset), in order of offsets and keys."""
    query = sa.text(
        "SELECT key, value, stream_offset FROM relatum.relations WHERE stream = :name ORDER BY stream_offset, key"
    )
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query, {"name": stream})]
