"""Spans, where the application has set a provider of them: opened, told more, carried to other threads.

What makes spans is the application's: samplers, processors, exporters. What they raise is logged, and changes nothing
of what the span is of: no answer and no row depends on it.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from relatum.errors import BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout, RelatumError
from relatum.otel._options import Part, has_spans

if TYPE_CHECKING:
    from opentelemetry.trace import Link as Link
    from opentelemetry.trace import Tracer
else:
    # Names for annotations: it is not imported for those.
    Link = Tracer = Any

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
"""The semantic conventions that attributes follow."""

_SUPPRESSED: Final = "suppress_instrumentation"
"""What `opentelemetry.instrumentation.utils.suppress_instrumentation` sets in the context."""

_SERVERS: Final = (BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout)
"""Errors whose words are of servers and addresses: those of others may hold what a message says."""

logger: Final = logging.getLogger("relatum.otel")

_LOGGED_MAX: Final = 100
"""Kinds of errors that are logged in a process."""

_logged: Final[set[tuple[str, type[Exception]]]] = set()


def harmless(without: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result | None]]:
    """Make a function that calls the application's code return None where that raises, and log each kind once."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result | None]:
        @wraps(function)
        def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result | None:
            try:
                return function(*arguments, **named)
            except Exception as error:
                kind = without, type(error)
                if kind not in _logged and len(_logged) < _LOGGED_MAX:
                    _logged.add(kind)
                    name = type(error).__qualname__
                    logger.warning("%s, all else goes on: %s (said once)", without, name, exc_info=error)
                return None

        return call

    return decorate


@dataclass(frozen=True, slots=True)
class Description:
    """A span as it begins.

    Attributes:
        name: Its name, of which there are few.
        attributes: What is known then.
        kind: "internal" (default), or "consumer" for what processes messages.
        links: To spans of those who sent what is processed.
    """

    name: str
    attributes: Attributes = field(default_factory=dict)
    kind: Literal["internal", "consumer"] = "internal"
    links: Sequence[Link] = ()


@harmless("spans are not made")
def _tracer_of(part: Part) -> Tracer | None:
    """What makes the spans of a part; None where nobody wants any."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    # The module has no such function as long as another thread imports it.
    if not has_spans(part) or not hasattr(trace, "get_tracer_provider"):
        return None
    tracer = _made_by(trace.get_tracer_provider())
    if tracer is None or sys.modules["opentelemetry.context"].get_value(_SUPPRESSED):
        return None
    return tracer


@lru_cache(maxsize=1)
def _made_by(provider: Any) -> Tracer | None:
    """Our tracer of a provider; None where it makes no spans."""
    # Slow to import, and wanted by few.
    from importlib.metadata import PackageNotFoundError, version

    from opentelemetry import trace

    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    try:
        ours = version("relatum")
    except PackageNotFoundError:
        ours = None  # Imported from a folder.
    tracer: Tracer = provider.get_tracer("relatum", ours, schema_url=SCHEMA)
    return None if isinstance(tracer, trace.NoOpTracer) else tracer


def is_on(part: Part) -> bool:
    """Whether there are spans of a part now."""
    return _tracer_of(part) is not None


class Span:
    """A span that is open, or none.

    Args:
        part: What it is part of; None of nothing.
        span: OpenTelemetry's; None where there is none.
    """

    __slots__ = ("_span", "part")

    def __init__(self, part: Part | None, span: Any) -> None:
        self.part = part
        self._span = span

    @harmless("a span is not told all")
    def tell(self, attributes: Callable[[], Attributes]) -> None:
        """Tell more of it. They are asked for only where somebody records them."""
        if self._span is not None and self._span.is_recording():
            self._span.set_attributes(attributes())

    @harmless("a span is not told all")
    def link(self, links: Callable[[], Iterable[Link]]) -> None:
        """Link to more spans."""
        if self._span is not None and self._span.is_recording():
            for link in links():
                self._span.add_link(link.context, link.attributes)

    @harmless("a span is not told all")
    def failed(self, error: BaseException | str) -> None:
        """Say that what it is of has failed: by an error, or for what else, in a word."""
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error if isinstance(error, str) else _name_of(type(error)))
        self._span.set_status(StatusCode.ERROR, str(error) if isinstance(error, _SERVERS) else None)

    @harmless("a span is not ended")
    def end(self) -> None:
        """End it."""
        if self._span is not None:
            self._span.end()


NO_SPAN: Final = Span(None, None)

_NOTHING: Final[AbstractContextManager[Span]] = nullcontext(NO_SPAN)

_current: ContextVar[Span] = ContextVar("relatum_span", default=NO_SPAN)
"""Ours, and not the application's that may be around it, where ours could not be made."""


def span(part: Part, describe: Callable[[], Description]) -> AbstractContextManager[Span]:
    """A span around a block, the current one in it, where somebody wants spans. The block is given it.

    An `Exception` that leaves the block is the span's error: its class and, where a server was away, its words.

    Args:
        part: What it is part of.
        describe: Says what it is; called only where there is to be one.
    """
    tracer = _tracer_of(part)
    return _NOTHING if tracer is None else _opened(part, tracer, describe)


@contextmanager
def _opened(part: Part, tracer: Tracer, describe: Callable[[], Description]) -> Iterator[Span]:
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
        opened.end()
        with suppress(ValueError):  # Closed in another context, as a generator that nobody reads on.
            _current.reset(ours)


@harmless("a span is not made")
def _begun(tracer: Tracer, describe: Callable[[], Description]) -> Any:
    from opentelemetry.trace import SpanKind

    described = describe()
    return tracer.start_span(
        described.name,
        kind=SpanKind.CONSUMER if described.kind == "consumer" else SpanKind.INTERNAL,
        attributes=described.attributes,
        links=described.links,
        record_exception=False,
        set_status_on_exception=False,
    )


def _name_of(kind: type[BaseException]) -> str:
    if issubclass(kind, RelatumError) and kind.__module__.startswith("relatum.errors."):
        return f"relatum.errors.{kind.__qualname__}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def note(part: Part, attributes: Callable[[], Attributes]) -> None:
    """Tell more of the span of a part in whose block this is called, where there is one."""
    current = _current.get()
    if current.part is part:
        current.tell(attributes)


def carried(part: Part, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, whose spans belong to the span that is current here, in whichever thread it is called."""
    if not is_on(part):
        return function
    from opentelemetry import context

    here = context.get_current()

    @wraps(function)
    def called(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        token = context.attach(here)
        try:
            return function(*arguments, **named)
        finally:
            context.detach(token)

    return called
