"""Arguments of public calls, checked before anything is asked, sent or written: `InvalidInput` for what cannot be.

Whatever a caller gives goes to PostgreSQL, whose integers have 64 bits and whose texts hold no NUL character, to the
broker, whose names are UTF-8, or into a wait, where a number of seconds past all calendars overflows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final

from relatum.errors import ConfigurationError, InvalidInput
from relatum.headers import NAME_BYTES_MAX

COUNT_MAX: Final = 1_000_000_000
"""The largest number of things that can be asked for: more fit into no memory; PostgreSQL counts to 2^63 - 1."""

SECONDS_MAX: Final = 2**31 - 1
"""The longest time that can be waited for, 68 years: locks and sockets overflow somewhere past it."""


def checked_count(argument: str, value: Any, *, least: int = 1, most: int = COUNT_MAX, otherwise: str = "") -> int:
    """A number of things; `otherwise` tells the error what else can be given."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{argument}= takes a number from {least:,} to {most:,}{otherwise}, not {shown(value)}")
    return value


def checked_seconds(
    argument: str, value: Any, *, least: float = 0.0, most: float = SECONDS_MAX, zero: bool = True
) -> float:
    """A number of seconds, never infinite; `zero` is False where 0 cannot be meant."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A comparison with what is not a number is false.
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
    """A span of time as errors show it: whole seconds from 10 on, tenths below that, hundredths below 1."""
    decimals = 0 if seconds >= 10 else 1 if seconds >= 1 else 2
    whole, _, rest = f"{seconds:,.{decimals}f}".partition(".")
    return f"{whole}.{rest.rstrip('0')}".rstrip(".") + " s"


def size_text(count: float | None) -> str:
    """A number of bytes for people."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def checked_name(argument: str, value: Any) -> str:
    """A name of a stream, a super stream or a key: the broker's answer to a longer one may be none."""
    if len(_encoded(argument, value, least=1, what="a name")) > NAME_BYTES_MAX:
        raise InvalidInput(f"{argument}= takes a name of {NAME_BYTES_MAX} bytes at most; {value[:40]!a}… is longer")
    name: str = value
    return name


def checked_text(argument: str, value: Any, *, least: int = 0, what: str = "text") -> str:
    """A text of at least so many characters, such as a routing key; `what` it is, for the error."""
    _encoded(argument, value, least=least, what=what)
    text: str = value
    return text


def _encoded(argument: str, value: Any, *, least: int, what: str) -> bytes:
    """A text as the broker and PostgreSQL get it."""
    if not isinstance(value, str) or len(value) < least:
        raise InvalidInput(f"{argument}= takes {what}, not {shown(value)}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise InvalidInput(f"{argument}= takes {what}; {shown(value)} has a NUL character or half a surrogate pair")
    return encoded


def checked_names(argument: str, value: Any, *, least: int = 0) -> tuple[str, ...]:
    """Several names. One text is none: its characters would be taken for names."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidInput(f"{argument}= takes a list of names, not {shown(value)}")
    names = tuple(value)
    if len(names) < least:
        raise InvalidInput(f"{argument}= takes a list of {least} names or more, not of {len(names)}")
    for name in names:
        checked_name(argument, name)
    return names


def checked_weights(argument: str, value: Any) -> dict[str, float]:
    """Weights by name."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{argument}= takes a mapping of streams' names to numbers, not {shown(value)}")
    for name, weight in value.items():
        checked_name(f"{argument}= by stream; a stream", name)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < float("inf"):
            raise InvalidInput(f"{argument}= takes a number from 0 for {shown(name)}, not {shown(weight)}")
    return dict(value)


def checked_callable(argument: str, value: Any) -> Callable[..., Any]:
    """A function that is to be called later."""
    if not callable(value):
        raise InvalidInput(f"{argument}= takes a function; {shown(value)} cannot be called")
    function: Callable[..., Any] = value
    return function


def checked_event(argument: str, value: Any) -> None:
    """What tells to stop: an Event of threading, of asyncio or of multiprocessing."""
    if not callable(getattr(value, "is_set", None)) or not callable(getattr(value, "wait", None)):
        raise InvalidInput(f"{argument}= takes an Event, not {shown(value)}")


@contextmanager
def as_options() -> Iterator[None]:
    """Where a wrong argument is an option of what is made: `ConfigurationError`."""
    try:
        yield
    except InvalidInput as error:
        raise ConfigurationError(str(error)) from None


def checked_choice(argument: str, value: Any, choices: Collection[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(f"{argument}= takes one of {', '.join(map(repr, choices))}, not {shown(value)}")
    return value


def checked_host(host: str, where: str) -> None:
    """See that a host's name can be asked for: Python's name lookup raises a `UnicodeError` of its own otherwise.

    Raises:
        ConfigurationError: a part between dots is empty, or longer than 63 characters. The name is not shown, since it
            may be a part of a password that was not quoted.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            f"{where} names a host that no name can be: a part between dots is empty or has over 63 characters"
        ) from None


def checked_body(value: Any) -> bytes | str:
    """A message's body, as pika takes one."""
    if not isinstance(value, bytes | str):
        raise InvalidInput(f"body= takes bytes or text, not {type(value).__name__}")
    return value


def meant(name: str, known: Iterable[str | None]) -> str:
    """A question for the name that is known and most like another, to be put behind it; "" where none is like it."""
    alike = get_close_matches(name, {each for each in known if each}, n=1)
    return f" (did you mean {shown(alike[0])}?)" if alike else ""


def shown(value: Any) -> str:
    """A value for a message: its beginning, in characters that any terminal can write."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"an integer of {value.bit_length()} bits"
    return ascii(value)[:80]
