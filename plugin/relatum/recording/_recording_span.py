"""The span of a recorder's transaction, which processes messages of some streams."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from relatum import otel
from relatum.otel import LINKS_MAX, Description, Part, Span
from relatum.reading import Message, RecordBatch
from relatum.recording._batch import Batch
from relatum.recording._commit import Share


def add_links(batch: Batch, parts: Sequence[RecordBatch]) -> None:
    """Keep links to those who sent messages that were added, of the first of a batch: for its span."""
    left = LINKS_MAX - (batch.messages - sum(len(part.offsets) for part in parts))
    if left > 0:
        batch.links += otel.links_of(chain.from_iterable(map(_messages_of, parts)), left)


def _messages_of(part: RecordBatch) -> Iterator[Message]:
    if part.messages is not None:
        yield from part.messages
        return
    for offset, raw in zip(part.offsets, part.records, strict=True):
        if isinstance(raw, bytes):
            yield Message.from_record(part.stream, offset, raw)


def recording(shares: Sequence[tuple[str, Share]]) -> AbstractContextManager[Span | None]:
    """A span around the transaction of some streams' shares, where somebody wants spans."""

    def describe() -> Description:
        batches = [share.batch for _, share in shares]
        links: list[Any] = list(chain.from_iterable(batch.links for batch in batches))
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "record",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": sum(batch.messages for batch in batches),
            "relatum.rows": sum(batch.rows for batch in batches),
            "relatum.stream_count": len(shares),
            "db.system.name": "postgresql",
            "db.operation.name": "COPY",
        }
        if len(shares) == 1:
            attributes["messaging.destination.name"] = shares[0][0]
        name = f"record {shares[0][0]}" if len(shares) == 1 else "record"
        return Description(name, attributes, "consumer", links[:LINKS_MAX])

    return otel.span(Part.RECORDER, describe)
