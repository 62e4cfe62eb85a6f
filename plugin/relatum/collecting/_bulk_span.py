"""The span of a bulk: from the moment a worker takes it until what came of it is stored."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from relatum import otel
from relatum.collecting._bulk import Answer, Bulk, Collected, Executor
from relatum.collecting._bulk_steps import Consumed
from relatum.otel import NO_SPAN, Description, Link, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message, Result


class BulkSpan:
    """Takes note of what becomes of a bulk, where somebody wants spans."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self._span = span

    def read(self, found: Iterable[Result]) -> None:
        """Link to those who sent messages that were left in their streams, and are read now."""
        self._span.link(lambda: otel.links_of(each for each in found if isinstance(each, Message)))

    def noting(self, executor: Executor) -> Executor:
        """The executor; what it raises is the span's error, too."""
        if self._span is NO_SPAN:
            return executor

        def execute(bulk: Bulk) -> Answer:
            try:
                return executor(bulk)
            except BaseException as error:
                self._span.failed(error)
                raise

        return execute

    def settled(self, consumed: Consumed) -> None:
        """Tell what became of the messages."""

        def counts() -> dict[str, int]:
            found = Counter(result.status for result in consumed.results)
            told = (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD)
            return {f"relatum.bulk.{status.value}": found[status] for status in told}

        self._span.tell(counts)


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
