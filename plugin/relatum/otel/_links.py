"""Links from what is processed to the spans of those who sent it: messages carry those in headers."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, Protocol

from relatum.otel._options import shows_ids
from relatum.otel._spans import Link

LINKS_MAX: Final = 128
"""Messages of one span that are looked at for a link: as many links as OpenTelemetry keeps of a span by default."""


class Sent(Protocol):
    """A message that was read, as `relatum.reading.Message` is."""

    @property
    def headers(self) -> Mapping[str, Any]: ...
    @property
    def properties(self) -> Any: ...
    @property
    def raw(self) -> bytes | None: ...
    @property
    def stream(self) -> str: ...
    @property
    def offset(self) -> int: ...


def links_of(messages: Iterable[Sent], most: int = LINKS_MAX) -> list[Link]:
    """Links to the spans that sent messages, as far as they carry one: by the application's own propagators.

    To be called where spans are wanted alone (`is_on`).

    Args:
        messages: Some messages; the first `most` are looked at.
        most: How many. Default 128.
    """
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context

    fields = propagate.get_global_textmap().fields - {"baggage"}
    names = [name.encode() for name in fields]
    links = []
    for message in islice(messages, most):
        raw = message.raw
        if raw is not None and not any(name in raw for name in names):
            continue  # Found out without decoding it, which takes ten times as long.
        headers = message.headers
        # What stands in headers is anybody's: a propagator is given texts alone.
        carrier = {name: value for name in fields if type(value := headers.get(name)) is str}
        if not carrier:
            continue
        found = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
        if found.is_valid:
            links.append(trace.Link(found, _attributes(message)))
    return links


def _attributes(message: Sent) -> dict[str, str | int]:
    told: dict[str, str | int] = {"messaging.destination.name": message.stream, "relatum.offset": message.offset}
    if shows_ids():
        properties = message.properties
        if properties.message_id is not None:
            told["messaging.message.id"] = str(properties.message_id)
        if properties.correlation_id is not None:
            told["messaging.message.conversation_id"] = str(properties.correlation_id)
    return told
