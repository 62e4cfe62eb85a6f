"""Links from what is processed to the spans of those who sent it: messages carry those in headers."""

from collections.abc import Iterable, Sequence, Set
from itertools import islice
from typing import Any, Final

from relatum.otel._options import shows_ids
from relatum.otel._spans import Link, harmless

LINKS_MAX: Final = 128
"""Messages of one span that are looked at for a link: as many links as OpenTelemetry keeps of a span by default."""

_HEADER_MAX: Final = 4_096
"""Characters of a header that is read: W3C's `tracestate`, the longest that there is, should have 512 of them."""


def links_of(messages: Iterable[Any], most: int = LINKS_MAX) -> list[Link]:
    """Links to the spans that sent messages, as far as they carry one: by the application's own propagators.

    To be called where spans are wanted alone (`is_on`).

    Args:
        messages: Messages as `relatum.reading.Message`; the first `most` are looked at.
        most: How many. Default 128.
    """
    return _links_of(islice(messages, most)) or []


@harmless("links are left out")
def _links_of(messages: Iterable[Any]) -> list[Link]:
    from opentelemetry import propagate

    fields = set(propagate.get_global_textmap().fields) - {"baggage"}
    names = [name.encode() for name in fields]
    # One by one: what one message says costs none of the others its link.
    found = [_link_of(message, fields, names) for message in messages]
    return [link for link in found if link is not None]


@harmless("a link is left out")
def _link_of(message: Any, fields: Set[str], names: Sequence[bytes]) -> Link | None:
    raw = message.raw
    if raw is not None and not any(name in raw for name in names):
        return None  # Found out without decoding it, which takes ten times as long.
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context

    headers = message.headers
    # Headers are written by anybody: a propagator is given short texts alone.
    said = {name: headers.get(name) for name in fields}
    carrier = {name: value for name, value in said.items() if type(value) is str and len(value) <= _HEADER_MAX}
    if not carrier:
        return None
    found = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
    return trace.Link(found, _attributes(message)) if found.is_valid else None


def _attributes(message: Any) -> dict[str, str | int]:
    told: dict[str, str | int] = {"messaging.destination.name": message.stream, "relatum.offset": message.offset}
    if shows_ids():
        properties = message.properties
        if properties.message_id is not None:
            told["messaging.message.id"] = str(properties.message_id)
        if properties.correlation_id is not None:
            told["messaging.message.conversation_id"] = str(properties.correlation_id)
    return told
