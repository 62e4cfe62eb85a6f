"""OpenTelemetry spans of Relatum's operations. No other module uses OpenTelemetry.

Spans are made once the application has set a tracer provider (`opentelemetry.trace.set_tracer_provider`); no call to
Relatum is needed. An application that set a provider has imported OpenTelemetry, so this module does not import it to
find out: without a provider, a span costs a lookup in `sys.modules`.

    otel.configure(without=["recorder"])        no spans of a recorder's transactions

Spans name keys and never show their values. The other names are for modules that make spans. Samplers, processors,
exporters and propagators belong to the application. Their errors are logged and change no result and no row. See
docs/adr/0037-opentelemetry.md.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from relatum.common.checks import checked_names, shown
from relatum.errors import BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, InvalidInput, ReadTimeout

if TYPE_CHECKING:
    from opentelemetry.trace import Link as Link
    from opentelemetry.trace import Tracer
else:
    # Annotations alone do not import OpenTelemetry.
    Link = Tracer = Any

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
"""The semantic conventions that attributes follow."""

LINKS_MAX: Final = 128
"""Messages of one span that are checked for a link. OpenTelemetry keeps 128 links of a span by default."""

_HEADER_MAX: Final = 4_096
"""Characters of the longest header that is read: W3C's `tracestate`, the longest one, should have 512."""

_SERVERS: Final = (BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout)
"""Errors whose texts are about servers. The texts of other errors may quote a message's contents."""

logger: Final = logging.getLogger("relatum.otel")


# --- options ----------------------------------------------------------------------------------------------------------


class Part(StrEnum):
    """Parts of Relatum whose spans can be disabled."""

    LOOKUPS = "lookups"
    """Calls of `Relations` and `AsyncRelations`."""
    RECORDER = "recorder"
    """Transactions of recorders."""
    COLLECTOR = "collector"
    """Bulks of collectors."""
    SERIAL = "serial"
    """Batches of serial consumers."""


# OpenTelemetry's variable of disabled instrumentations: names separated by commas, or `*`.
_disabled = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")
_parts = frozenset[Part]() if {"relatum", "*"} & {name.strip() for name in _disabled} else frozenset(Part)


def configure(*, without: Iterable[str] = ()) -> None:
    """Choose which spans this process makes. Each call replaces the previous one.

    Args:
        without: Parts without spans, of "lookups", "recorder", "collector" and "serial". Default: none.

    Raises:
        InvalidInput: a part is unknown.
    """
    global _parts
    names = checked_names("without", without)
    wrong = [name for name in names if name not in [*Part]]
    if wrong:
        raise InvalidInput(f"without= takes some of {', '.join(Part)}, not {shown(wrong[0])}")
    _parts = frozenset(Part).difference(map(Part, names))


_logged: Final[set[tuple[str, type[Exception]]]] = set()


@contextmanager
def _harmless(without: str) -> Iterator[None]:
    """Log an error of the application's code, each kind once, instead of raising it. A function then returns None."""
    try:
        yield
    except Exception as error:
        if (kind := (without, type(error))) not in _logged:
            _logged.add(kind)
            name = type(error).__qualname__
            logger.warning("%s; nothing else is affected: %s (logged once)", without, name, exc_info=error)


# --- spans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a span at its start. Names are few; a "consumer" processes messages and links to them."""

    name: str
    attributes: Attributes = field(default_factory=dict)
    kind: Literal["internal", "consumer"] = "internal"
    links: Sequence[Link] = ()


def _tracer_of(part: Part) -> Tracer | None:
    """Return the tracer of a part; None if it makes no spans."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    # While another thread imports the module, it lacks the function.
    return _tracer(trace) if part in _parts and hasattr(trace, "get_tracer_provider") else None


@_harmless("spans are missing")
def _tracer(trace: Any) -> Tracer | None:
    tracer = _made_by(trace.get_tracer_provider())
    # Set by `opentelemetry.instrumentation.utils.suppress_instrumentation`.
    is_suppressed = tracer and sys.modules["opentelemetry.context"].get_value("suppress_instrumentation")
    return None if is_suppressed else tracer


@lru_cache(maxsize=1)
def _made_by(provider: Any) -> Tracer | None:
    """Return Relatum's tracer from a provider; None if it makes no spans."""
    from opentelemetry import trace

    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer: Tracer = provider.get_tracer("relatum", schema_url=SCHEMA)
    return None if isinstance(tracer, trace.NoOpTracer) else tracer


def is_on(part: Part) -> bool:
    """Return whether a part makes spans now."""
    return _tracer_of(part) is not None


class Span:
    """An open span of a part, or a placeholder without one."""

    __slots__ = ("_span", "part")

    def __init__(self, part: Part | None, span: Any) -> None:
        self.part = part
        self._span = span

    def tell(self, attributes: Callable[[], Attributes]) -> None:
        """Add attributes. They are computed only if the span is recorded."""
        if self._span is not None:
            with _harmless("a span is incomplete"):
                if self._span.is_recording():
                    self._span.set_attributes(attributes())

    def link(self, links: Callable[[], Iterable[Link]]) -> None:
        """Add links to other spans."""
        if self._span is not None:
            with _harmless("a span is incomplete"):
                for link in links() if self._span.is_recording() else ():
                    self._span.add_link(link.context, link.attributes)

    def failed(self, error: BaseException | str) -> None:
        """Mark the span as failed by an error, or for a reason given as a word."""
        if self._span is not None:
            with _harmless("a span is incomplete"):
                from opentelemetry.trace import StatusCode

                self._span.set_attribute("error.type", error if isinstance(error, str) else _name_of(type(error)))
                self._span.set_status(StatusCode.ERROR, str(error) if isinstance(error, _SERVERS) else None)


def _name_of(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


NO_SPAN: Final = Span(None, None)

_current: ContextVar[Span] = ContextVar("relatum_span", default=NO_SPAN)
"""Relatum's current span: never the application's, even if Relatum's could not be made."""


@contextmanager
def span(part: Part, describe: Callable[[], Description]) -> Iterator[Span]:
    """Open a span around a block, if there is tracing.

    An `Exception` that leaves the block becomes the span's error: its class and, if a server failed, its text.
    `describe` is called only if there is a span.
    """
    tracer = _tracer_of(part)
    if tracer is None:
        yield NO_SPAN
        return
    from opentelemetry import context
    from opentelemetry.trace import set_span_in_context

    begun = _begun(tracer, describe)
    opened = Span(part, begun)
    ours = _current.set(opened)
    theirs = None if begun is None else context.attach(set_span_in_context(begun))
    try:
        yield opened
    except Exception as error:
        opened.failed(error)
        raise
    finally:
        if theirs is not None:
            context.detach(theirs)
            with _harmless("a span does not end"):
                begun.end()
        with suppress(ValueError):  # Closed in another context, as an abandoned generator.
            _current.reset(ours)


@_harmless("a span is missing")
def _begun(tracer: Tracer, describe: Callable[[], Description]) -> Any:
    from opentelemetry.trace import SpanKind

    described = describe()
    kind = SpanKind.CONSUMER if described.kind == "consumer" else SpanKind.INTERNAL
    given: dict[str, Any] = {"attributes": described.attributes, "links": described.links}
    return tracer.start_span(described.name, kind=kind, record_exception=False, set_status_on_exception=False, **given)


def note(part: Part, attributes: Callable[[], Attributes]) -> None:
    """Add attributes to the current span, if it belongs to this part."""
    current = _current.get()
    if current.part is part:
        current.tell(attributes)


# --- links to the spans that sent messages, from the messages' headers ------------------------------------------------


def links_of(messages: Iterable[Any], most: int = LINKS_MAX) -> list[Link]:
    """Return links to the spans that sent messages, read by the application's propagators.

    Call this only if there is tracing (`is_on`). The first `most` messages are checked (`relatum.reading.Message`).
    """
    fields = _header_names() or frozenset()
    # One by one: a message that raises does not affect the others' links.
    found = (_link_of(message, fields) for message in islice(messages, most))
    return [link for link in found if link is not None]


@_harmless("links are left out")
def _header_names() -> frozenset[str]:
    from opentelemetry import propagate

    return frozenset(propagate.get_global_textmap().fields) - {"baggage"}


@_harmless("a link is left out")
def _link_of(message: Any, fields: frozenset[str]) -> Link | None:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context

    raw = message.raw
    if raw is not None and not any(name.encode() in raw for name in fields):
        return None  # Decoding the message takes ten times as long.
    # Any publisher can write headers: pass only short texts to propagators.
    said = {name: message.headers.get(name) for name in fields}
    carrier = {name: value for name, value in said.items() if type(value) is str and len(value) <= _HEADER_MAX}
    if not carrier:
        return None
    sender = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
    if not sender.is_valid:
        return None
    return trace.Link(sender, {"messaging.destination.name": message.stream, "relatum.offset": message.offset})
