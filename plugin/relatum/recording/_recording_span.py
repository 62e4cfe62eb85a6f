"""The span of a transaction that writes rows: it processes messages of some streams."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from relatum import otel
from relatum.otel import LINKS_MAX, Description, Part, Span
from relatum.reading import Message, RecordBatch
from relatum.recording._batch import Batch


def add_links(batch: Batch, parts: Sequence[RecordBatch]) -> None:
    """Keep links to those who sent messages that were added, of the first of a batch: for its span."""
    left = LINKS_MAX - (batch.messages - sum(len(part.offsets) for part in parts))
    if left > 0:
        batch.links += otel.links_of(chain.from_iterable(map(_messages_of, parts)), left)


def _messages_of(part: RecordBatch) -> Iterator[Message]:
    for offset, raw in zip(part.offsets, part.records, strict=True):
        if isinstance(raw, bytes):
            yield Message.from_record(part.stream, offset, raw)


def recording(named: Sequence[tuple[str, Batch]], name: str = "record") -> AbstractContextManager[Span]:
    """A span around the transaction that writes batches, where somebody wants spans."""

    def describe() -> Description:
        batches = [batch for _, batch in named]
        links: list[Any] = list(chain.from_iterable(batch.links for batch in batches))
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": name,
            "messaging.operation.type": "process",
            "messaging.batch.message_count": sum(batch.messages for batch in batches),
            "relatum.rows": sum(batch.rows for batch in batches),
            "relatum.stream_count": len(named),
            "db.system.name": "postgresql",
            "db.operation.name": "COPY",
        }
        if len(named) > 1:
            return Description(name, attributes, "consumer", links[:LINKS_MAX])
        stream = named[0][0]
        attributes["messaging.destination.name"] = stream
        return Description(f"{name} {stream}", attributes, "consumer", links)

    return otel.span(Part.RECORDER, describe)
