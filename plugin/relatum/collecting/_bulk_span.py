"""The span of a bulk: from the moment a worker takes it until what came of it is stored."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from relatum import otel
from relatum.collecting._bulk import Answer, Bulk, Collected, Executor
from relatum.collecting._bulk_steps import Consumed
from relatum.otel import Description, Link, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message, Result


class BulkSpan:
    """Takes note of what becomes of a bulk, where somebody wants spans.

    Args:
        span: The span; None where nobody does.
    """

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def read(self, found: Iterable[Result]) -> None:
        """Link to those who sent messages that were left in their streams, and are read now."""
        if self._span is not None:
            for link in otel.links_of(each for each in found if isinstance(each, Message)):
                self._span.add_link(link.context, link.attributes)

    def noting(self, executor: Executor) -> Executor:
        """The executor; what it raises is the span's error, too."""
        if self._span is None:
            return executor

        def execute(bulk: Bulk) -> Answer:
            try:
                return executor(bulk)
            except BaseException as error:
                otel.failed(self._span, error)
                raise

        return execute

    def settled(self, consumed: Consumed) -> None:
        """Tell what became of the messages."""
        if self._span is not None:
            for status in (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD):
                count = sum(result.status is status for result in consumed.results)
                self._span.set_attribute(f"relatum.bulk.{status.value}", count)


@contextmanager
def consuming(collector: str, bulk: Bulk) -> Iterator[BulkSpan]:
    """A span around the consumption of a bulk, where somebody wants spans."""

    def describe() -> Description:
        streams = {message.place.stream for message in bulk.messages}
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": len(bulk),
            "messaging.consumer.group.name": collector,
            "relatum.bulk.type": bulk.type,
            "relatum.bulk.reason": bulk.reason.value,
        }
        name = "process"
        if len(streams) == 1:
            name = f"process {(stream := streams.pop())}"
            attributes["messaging.destination.name"] = stream
        return Description(name, attributes, "consumer", _links_of(bulk.messages))

    with otel.span(Part.COLLECTOR, describe) as span:
        yield BulkSpan(span)


def _links_of(messages: Iterable[Collected]) -> list[Link]:
    return otel.links_of(message.body for message in messages if message.body is not None)
