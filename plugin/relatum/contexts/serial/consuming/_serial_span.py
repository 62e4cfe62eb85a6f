"""The span of a batch: while a serial consumer's function has it."""

from contextlib import AbstractContextManager
from typing import Any

from relatum import otel
from relatum.contexts.serial.consuming._serial_batch import BatchBase
from relatum.otel import Description, Part


def consuming(super_stream: str, consumer: str, batch: BatchBase) -> AbstractContextManager[Any]:
    """A span around the consumption of a batch, where somebody wants spans."""

    def describe() -> Description:
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": super_stream,
            "messaging.destination.partition.id": batch.partition,
            "messaging.consumer.group.name": consumer,
            "messaging.batch.message_count": len(batch.messages),
        }
        return Description(f"process {super_stream}", attributes, "consumer", otel.links_of(batch.messages))

    return otel.span(Part.SERIAL, describe)
