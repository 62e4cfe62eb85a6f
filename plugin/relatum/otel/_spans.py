"""Spans, where somebody has set a provider of them: opened, told more, carried to other threads."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from relatum.errors import BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout, RelatumError
from relatum.otel._options import Part, has_spans

if TYPE_CHECKING:
    from opentelemetry.trace import Link as Link
    from opentelemetry.trace import Span as Span
    from opentelemetry.trace import Tracer
else:
    # Names for annotations: it is not imported for those.
    Link = Span = Tracer = Any

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

SCHEMA: Final = "https://opentelemetry.io/schemas/1.37.0"
"""The semantic conventions that attributes follow."""

_SUPPRESSED: Final = "suppress_instrumentation"
"""What `opentelemetry.instrumentation.utils.suppress_instrumentation` sets in the context."""

_SERVERS: Final = (BrokerUnavailable, ConnectionsInUse, DatabaseUnavailable, ReadTimeout)
"""Errors whose words are of servers and addresses: those of others may hold what a message says."""

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


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


_known: tuple[Any, Tracer | None] = None, None
"""The provider that was met last, and our tracer of it; None where it makes no spans."""


def tracer_of(part: Part) -> Tracer | None:
    """What spans of a part are made by; None where nobody wants any."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not has_spans(part):
        return None
    ask = getattr(trace, "get_tracer_provider", None)
    if ask is None:
        return None  # Another thread is importing it just now.
    provider = ask()
    known, tracer = _known
    if provider is not known:
        tracer = _made(trace, provider)
    if tracer is None or sys.modules["opentelemetry.context"].get_value(_SUPPRESSED):
        return None
    return tracer


def _made(trace: Any, provider: Any) -> Tracer | None:
    global _known
    # Slow to import, and wanted by few.
    from importlib.metadata import PackageNotFoundError, version

    tracer: Tracer | None = None
    if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        try:
            ours = version("relatum")
        except PackageNotFoundError:
            ours = None  # Imported from a folder.
        tracer = provider.get_tracer("relatum", ours, schema_url=SCHEMA)
    _known = provider, None if isinstance(tracer, trace.NoOpTracer) else tracer
    return _known[1]


def is_on(part: Part) -> bool:
    """Whether there are spans of a part now."""
    return tracer_of(part) is not None


def span(part: Part, describe: Callable[[], Description]) -> AbstractContextManager[Span | None]:
    """A span around a block, the current one in it, where somebody wants spans. The block is given it, or None.

    An `Exception` that leaves the block is the span's error: its class and, where a server was away, its words.

    Args:
        part: What it is part of.
        describe: Says what it is; called only where there is to be one.
    """
    tracer = tracer_of(part)
    return _NOTHING if tracer is None else _opened(tracer, describe())


@contextmanager
def _opened(tracer: Tracer, described: Description) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        described.name,
        kind=SpanKind.CONSUMER if described.kind == "consumer" else SpanKind.INTERNAL,
        attributes=described.attributes,
        links=described.links,
        record_exception=False,
        set_status_on_exception=False,
    ) as opened:
        try:
            yield opened
        except Exception as error:
            failed(opened, error)
            raise


def failed(opened: Span | None, error: BaseException | str) -> None:
    """Say that what a span is of has failed: by an error, or for what else, in a word."""
    if opened is None:
        return
    from opentelemetry.trace import StatusCode

    opened.set_attribute("error.type", error if isinstance(error, str) else _name_of(type(error)))
    opened.set_status(StatusCode.ERROR, str(error) if isinstance(error, _SERVERS) else None)


def _name_of(kind: type[BaseException]) -> str:
    if issubclass(kind, RelatumError) and kind.__module__.startswith("relatum.errors."):
        return f"relatum.errors.{kind.__qualname__}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def note(part: Part, attributes: Callable[[], Attributes]) -> None:
    """Tell more of the span in whose block this is called, where there is one."""
    if tracer_of(part) is not None:
        from opentelemetry.trace import get_current_span

        current = get_current_span()
        if current.is_recording():
            current.set_attributes(attributes())


def carried(part: Part, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, whose spans belong to the span that is current here, in whichever thread it is called."""
    if tracer_of(part) is None:
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
