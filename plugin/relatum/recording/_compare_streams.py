"""What the rows of a stream's generations must be, and their mending."""

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from relatum.recording._compare import Difference
from relatum.store import FORGOTTEN, StreamRow, streams

_COLUMNS = [streams.c[name] for name in StreamRow.__dataclass_fields__]


@dataclass(frozen=True, slots=True)
class Generations:
    """The generation in force, or the newest where none is, and the others of the same name."""

    stream: StreamRow | None
    others: tuple[StreamRow, ...]


def generations_of(connection: sa.Connection, vhost: str, name: str) -> Generations:
    """Every generation that the database knows of a stream."""
    query = sa.select(*_COLUMNS).where(streams.c.vhost == vhost, streams.c.name == name, streams.c.state != FORGOTTEN)
    rows = [StreamRow(**row._mapping) for row in connection.execute(query.order_by(streams.c.stream_id))]
    if not rows:
        return Generations(None, ())
    stream = next((row for row in rows if row.replaced_at is None), None) or max(
        rows, key=lambda row: (row.generation, row.stream_id)
    )
    return Generations(stream, tuple(row for row in rows if row is not stream))


def compare_generations(generations: Generations, super_stream: str | None, last: int | None) -> Iterator[Difference]:
    """Where a stream's row says what cannot be.

    Args:
        generations: The stream's rows.
        super_stream: The super stream by whose name it was asked for.
        last: The stream's last offset; None where that is not known.
    """
    stream = generations.stream
    assert stream is not None, "there are rows to compare"
    if stream.replaced_at is not None:
        # A generation that ends and the next one are written in one transaction.
        yield _wrong("no generation of it is in force")
    elif stream.state not in ("recording", "missing"):
        yield _wrong(f"its state is {stream.state!r}")
    if any(other.generation >= stream.generation for other in generations.others):
        yield _wrong("an older generation has its number")
    if stream.first_offset is not None and (
        stream.first_offset < 0 or (last is not None and stream.first_offset > last)
    ):
        yield _wrong("its first offset is not in the stream")
    # A stream of another name may be bound to an exchange that is no super stream: a tap's.
    if super_stream is not None and stream.super_stream != super_stream and stream.name.startswith(f"{super_stream}-"):
        yield _wrong(f"it is not known as a partition of {super_stream!r}")


def _wrong(detail: str) -> Difference:
    return Difference("stream_wrong", 0, table="streams", detail=detail)


def mend_generations(
    connection: sa.Connection, generations: Generations, super_stream: str | None, first: int | None
) -> None:
    """Make the stream's row what it must be. The caller holds its lock."""
    stream = generations.stream
    assert stream is not None, "there are rows to mend"
    newest = max((other.generation for other in generations.others), default=0)
    values = {
        "replaced_at": None,
        "state": stream.state if stream.state in ("recording", "missing") else "recording",
        "generation": max(stream.generation, newest + 1),
        "first_offset": first,
        "super_stream": super_stream or stream.super_stream,
    }
    connection.execute(sa.update(streams).where(streams.c.stream_id == stream.stream_id).values(values))
