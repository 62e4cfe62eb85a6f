"""Checks the arguments of public calls before any I/O. Each check returns the value, or raises `InvalidInput`.

The limits are those of the servers and of Python: PostgreSQL has 64-bit integers and texts without NUL characters,
the broker's names are UTF-8, and very long waits overflow.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import iscoroutinefunction
from typing import Any, Final

from relatum.common.headers import NAME_BYTES_MAX
from relatum.errors import ConfigurationError, InvalidInput

COUNT_MAX: Final = 1_000_000_000
"""The largest count that a caller may request: more objects would not fit into memory."""

SECONDS_MAX: Final = 2**31 - 1
"""Seconds of the longest wait, 68 years: locks and sockets overflow beyond it."""


def checked_count(argument: str, value: Any, *, least: int = 1, most: int = COUNT_MAX, otherwise: str = "") -> int:
    """Return an integer from `least` to `most`. `otherwise`: The error's text for other valid values: ", or None"."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{argument}= takes an integer from {least:,} to {most:,}{otherwise}, not {shown(value)}")
    return value


def checked_seconds(
    argument: str, value: Any, *, least: float = 0.0, most: float = SECONDS_MAX, zero: bool = True
) -> float:
    """Return a finite number of seconds from `least` to `most`. `zero`: Whether 0 is valid."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Comparisons with NaN are false.
    if not is_number or not least <= value <= most or value == float("inf") or (value == 0 and not zero):
        between = (
            f"seconds, {f'{least:g} or more' if zero else 'more than 0'}"
            if most >= SECONDS_MAX
            else f"seconds from {least:g} to {most:g}"
        )
        raise InvalidInput(f"{argument}= takes {between}, not {shown(value)}")
    seconds: float = value
    return seconds


def seconds_text(seconds: float) -> str:
    """Return a duration as text for errors: whole seconds from 10 on, tenths below, hundredths below 1."""
    decimals = 0 if seconds >= 10 else 1 if seconds >= 1 else 2
    whole, _, rest = f"{seconds:,.{decimals}f}".partition(".")
    return f"{whole}.{rest.rstrip('0')}".rstrip(".") + " s"


def size_text(count: float | None) -> str:
    """Return a number of bytes as text, in powers of 1,000; "–" for None."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def checked_name(argument: str, value: Any) -> str:
    """Return a name of 1 to 255 bytes: the broker may not answer a request with a longer one."""
    name = checked_text(argument, value, least=1, what="a name")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidInput(f"{argument}= takes a name of {NAME_BYTES_MAX} bytes at most; {name[:40]!a}… is longer")
    return name


def checked_text(argument: str, value: Any, *, least: int = 0, what: str = "text") -> str:
    """Return a text of at least `least` characters, such as a routing key. `what`: What the error calls it."""
    if not isinstance(value, str) or len(value) < least:
        raise InvalidInput(f"{argument}= takes {what}, not {shown(value)}")
    if not is_clean(value):
        raise InvalidInput(f"{argument}= takes {what}; {shown(value)} contains a NUL character or a lone surrogate")
    return value


def is_clean(text: str) -> bool:
    """Return whether a text has no NUL character and no lone surrogate: PostgreSQL and the broker refuse these."""
    return "\0" not in text and text == text.encode(errors="ignore").decode()


def checked_names(
    argument: str, value: Any, *, least: int = 0, check: Callable[[str, Any], str] = checked_name
) -> tuple[str, ...]:
    """Return at least `least` names. A single text is refused: its characters would be taken as names."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(f"{argument}= takes a list of names, not {shown(value)}")
    names = tuple(value)
    if len(names) < least:
        raise InvalidInput(f"{argument}= takes a list of at least {least} names, not {len(names)}")
    for name in names:
        check(argument, name)
    return names


def checked_weights(argument: str, value: Any) -> dict[str, float]:
    """Return finite weights of at least 0, by the name of a stream."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{argument}= takes a mapping of streams' names to numbers, not {shown(value)}")
    for name, weight in value.items():
        checked_name(f"{argument}= by stream; a stream", name)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < float("inf"):
            raise InvalidInput(f"{argument}= takes a number of at least 0 for {shown(name)}, not {shown(weight)}")
    return dict(value)


def is_coroutine_function(called: Callable[..., Any]) -> bool:
    """Return whether a call returns a coroutine. Objects with an async `__call__` count, too."""
    call_method = getattr(called, "__call__", None)  # noqa: B004 - inspects its kind, not whether it is callable
    return iscoroutinefunction(called) or iscoroutinefunction(call_method)


def checked_callable(argument: str, value: Any, *, is_awaited: bool = True) -> Callable[..., Any]:
    """Return a value that can be called. `is_awaited`: Whether it may be a coroutine function."""
    if not callable(value):
        raise InvalidInput(f"{argument}= takes a function; {shown(value)} cannot be called")
    if not is_awaited and is_coroutine_function(value):
        raise InvalidInput(f"{argument}= takes a function; nobody awaits the coroutine function {shown(value)}")
    function: Callable[..., Any] = value
    return function


def checked_event(argument: str, value: Any) -> None:
    """Check that a value is an Event of threading, asyncio or multiprocessing."""
    if not callable(getattr(value, "is_set", None)) or not callable(getattr(value, "wait", None)):
        raise InvalidInput(f"{argument}= takes an Event, not {shown(value)}")


@contextmanager
def as_options() -> Iterator[None]:
    """Raise the block's `InvalidInput` as `ConfigurationError`, for the options of a new object."""
    try:
        yield
    except InvalidInput as error:
        raise ConfigurationError(str(error)) from None


def checked_choice(argument: str, value: Any, choices: Collection[str]) -> str:
    """Return a value that is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(f"{argument}= takes one of {', '.join(map(repr, choices))}, not {shown(value)}")
    return value


def checked_host(host: str, where: str) -> None:
    """Raise `ConfigurationError` for a host's name that cannot be encoded for DNS.

    The error does not show the name, which may be part of a password that is not percent-encoded.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            f"{where} has an invalid host name: a part between dots is empty, or has over 63 characters or invalid "
            "ones; correct it, and percent-encode special characters of the password"
        ) from None


def checked_body(value: Any) -> bytes | str:
    """Return a message's body, which is bytes or text."""
    if not isinstance(value, bytes | str):
        raise InvalidInput(f"body= takes bytes or text, not {type(value).__name__}")
    return value


def meant(name: str, known: Iterable[str | None]) -> str:
    """Return a suffix for an error that suggests the most similar known name; "" if no known name is similar."""
    similar = get_close_matches(name, {each for each in known if each}, n=1)
    return f" (did you mean {shown(similar[0])}?)" if similar else ""


def shown(value: Any) -> str:
    """Return at most 80 ASCII characters that describe a value in an error."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"an integer of {value.bit_length()} bits"
    return ascii(value)[:80]
