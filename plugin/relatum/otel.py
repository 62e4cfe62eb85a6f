"""OpenTelemetry spans of Relatum's operations. No other module uses OpenTelemetry.

Relatum makes spans as soon as the application has set a tracer provider (`opentelemetry.trace.set_tracer_provider`);
the application need not call Relatum. Setting a provider imports OpenTelemetry, so this module looks for it in
`sys.modules` and does not import it by itself. Without a provider, that lookup is all that a span costs.

    otel.configure(without=["recorder"])        disables the spans of a recorder's transactions

Spans name keys and never show their values. The other names here are for Relatum's modules that make spans. Samplers,
processors, exporters and propagators belong to the application. Their errors are logged and change no result and no
row. See docs/adr/0037-opentelemetry.md.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
"""Maximum messages of a span that are checked for a link. OpenTelemetry keeps 128 links of a span by default."""

_HEADER_MAX: Final = 4_096
"""Maximum characters of a header that is read. W3C asks for 512 of `tracestate`, the longest header."""

_SERVER_ERRORS: Final = (BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout)
"""Errors with texts about servers, which spans show. The texts of other errors may quote a message's contents."""

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


# OpenTelemetry's variable for disabled instrumentations: names separated by commas, or `*` for all.
_disabled = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")
_parts = frozenset[Part]() if {"relatum", "*"} & {name.strip() for name in _disabled} else frozenset(Part)


def configure(*, without: Iterable[str] = ()) -> None:
    """Choose which spans this process makes. Each call replaces the previous choice.

    Args:
        without: Names of parts that make no spans: "lookups", "recorder", "collector" and "serial". Default: none.

    Raises:
        InvalidInput: a part is unknown.
    """
    global _parts
    names = checked_names("without", without)
    unknown = [name for name in names if name not in [*Part]]
    if unknown:
        raise InvalidInput(f"without= takes names of parts ({', '.join(Part)}), not {shown(unknown[0])}")
    _parts = frozenset(Part).difference(map(Part, names))


_logged: Final[set[tuple[str, type[Exception]]]] = set()


@contextmanager
def _harmless(consequence: str) -> Iterator[None]:
    """Log an error of the application's tracing, each class once, and do not raise it. A function then returns None."""
    try:
        yield
    except Exception as error:
        if (kind := (consequence, type(error))) not in _logged:
            _logged.add(kind)
            name = type(error).__qualname__
            logger.warning("%s; nothing else is affected: %s (logged once)", consequence, name, exc_info=error)


# --- spans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Description:
    """What a span shows at its start. Span names have few values; spans that process messages have kind "consumer"."""

    name: str
    attributes: Attributes = field(default_factory=dict)
    kind: Literal["internal", "consumer"] = "internal"
    links: Sequence[Link] = ()


def _tracer_of(part: Part) -> Tracer | None:
    """Return the tracer of a part; None if the part makes no spans."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    # The function is missing while another thread imports the module.
    return _tracer(trace) if part in _parts and hasattr(trace, "get_tracer_provider") else None


@_harmless("spans are missing")
def _tracer(trace: Any) -> Tracer | None:
    tracer = _provider_tracer(trace.get_tracer_provider())
    # Set by `opentelemetry.instrumentation.utils.suppress_instrumentation`.
    is_suppressed = tracer and sys.modules["opentelemetry.context"].get_value("suppress_instrumentation")
    return None if is_suppressed else tracer


@lru_cache(maxsize=1)
def _provider_tracer(provider: Any) -> Tracer | None:
    """Return Relatum's tracer from a provider; None if the provider makes no spans."""
    from opentelemetry import trace

    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer: Tracer = provider.get_tracer("relatum", schema_url=SCHEMA)
    return None if isinstance(tracer, trace.NoOpTracer) else tracer


def is_on(part: Part) -> bool:
    """Return whether a part makes spans now."""
    return _tracer_of(part) is not None


class Span:
    """An open span of a part, or a placeholder whose methods do nothing."""

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
        """Mark the span as failed by an error, or by a word, which becomes its attribute `error.type`."""
        if self._span is not None:
            with _harmless("a span is incomplete"):
                from opentelemetry.trace import StatusCode

                self._span.set_attribute("error.type", error if isinstance(error, str) else _name_of(type(error)))
                self._span.set_status(StatusCode.ERROR, str(error) if isinstance(error, _SERVER_ERRORS) else None)


def _name_of(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


NO_SPAN: Final = Span(None, None)

_current: ContextVar[Span] = ContextVar("relatum_span", default=NO_SPAN)
"""Relatum's current span, which is empty if OpenTelemetry could not start it. Never the application's span."""


def span(part: Part, describe: Callable[[], Description]) -> AbstractContextManager[Span]:
    """Open a span around a block if the part makes spans.

    An `Exception` that leaves the block becomes the span's error: its class and, if a server failed, its text.
    `describe` is called only if the part makes spans.
    """
    tracer = _tracer_of(part)
    return nullcontext(NO_SPAN) if tracer is None else _opened(tracer, part, describe)


@contextmanager
def _opened(tracer: Tracer, part: Part, describe: Callable[[], Description]) -> Iterator[Span]:
    from opentelemetry import context
    from opentelemetry.trace import set_span_in_context

    started = _started_span(tracer, describe)
    opened = Span(part, started)
    current_token = _current.set(opened)
    context_token = None if started is None else context.attach(set_span_in_context(started))
    try:
        yield opened
    except Exception as error:
        opened.failed(error)
        raise
    finally:
        if context_token is not None:
            context.detach(context_token)
            with _harmless("a span does not end"):
                started.end()
        with suppress(ValueError):  # Python closes an abandoned generator in another context.
            _current.reset(current_token)


@_harmless("a span is missing")
def _started_span(tracer: Tracer, describe: Callable[[], Description]) -> Any:
    from opentelemetry.trace import SpanKind

    described = describe()
    kind = SpanKind.CONSUMER if described.kind == "consumer" else SpanKind.INTERNAL
    extra: dict[str, Any] = {"attributes": described.attributes, "links": described.links}
    return tracer.start_span(described.name, kind=kind, record_exception=False, set_status_on_exception=False, **extra)


def note(part: Part, attributes: Callable[[], Attributes]) -> None:
    """Add attributes to the current span if it belongs to this part."""
    current = _current.get()
    if current.part is part:
        current.tell(attributes)


# --- links to the spans that sent messages, from the messages' headers ------------------------------------------------


def links_of(messages: Iterable[Any], most: int = LINKS_MAX) -> list[Link]:
    """Return links to the spans that sent the messages, found by the application's propagators in their headers.

    Call this only if the part makes spans (`is_on`). It checks the first `most` messages (`relatum.reading.Message`).
    """
    names = _header_names() or frozenset()
    # Separate calls: a message that raises does not affect the links of others.
    found = (_link_of(message, names) for message in islice(messages, most))
    return [link for link in found if link is not None]


@_harmless("links are left out")
def _header_names() -> frozenset[str]:
    from opentelemetry import propagate

    return frozenset(propagate.get_global_textmap().fields) - {"baggage"}


@_harmless("a link is left out")
def _link_of(message: Any, names: frozenset[str]) -> Link | None:
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context

    raw = message.raw
    if raw is not None and not any(name.encode() in raw for name in names):
        return None  # Decoding the message would take ten times as long.
    # Publishers may write any header: pass only short texts to propagators.
    values = {name: message.headers.get(name) for name in names}
    carrier = {name: value for name, value in values.items() if type(value) is str and len(value) <= _HEADER_MAX}
    if not carrier:
        return None
    sender = trace.get_current_span(propagate.extract(carrier, Context())).get_span_context()
    if not sender.is_valid:
        return None
    return trace.Link(sender, {"messaging.destination.name": message.stream, "relatum.offset": message.offset})
