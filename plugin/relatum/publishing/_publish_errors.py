"""How a publish ended: errors of the client's class and of ours at once, and what a closed channel means.

A caller that knows pika writes `except pika.exceptions.NackError`; one that knows Relatum writes
`except relatum.errors.PublishNacked`. Both must catch the same exception, so its class has both as bases. Each pair has
one class, made when it is first needed: a lost connection may be any exception of the client or of the system. The
error keeps the arguments, the attributes and the text of the client's exception.
"""

import re
from dataclasses import is_dataclass, replace
from typing import Any, Final, TypeVar

from relatum.errors import PublishError

_Outcome = TypeVar("_Outcome", bound=PublishError)

_OF_THE_PROCESS = frozenset({"settle", "link", "connection"})

_classes: dict[tuple[type[PublishError], type[Exception]], type[PublishError]] = {}


def outcome(ours: type[_Outcome], theirs: Exception, **fields: Any) -> _Outcome:
    """The client's exception as one of ours too; raise it `from` the client's."""
    if isinstance(theirs, ours):
        theirs.__dict__.update(fields)
        return theirs
    return _rebuild(ours, type(theirs), theirs.args, {**_attributes(theirs), **fields})


def _rebuild(
    ours: type[_Outcome], theirs: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> _Outcome:
    kind = _class_of(ours, theirs)
    # Neither initialiser runs: pika's build `args` out of other arguments, which are gone.
    error: _Outcome = kind.__new__(kind, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _class_of(ours: type[_Outcome], theirs: type[Exception]) -> type[_Outcome]:
    kind = _classes.get((ours, theirs))
    if kind is None:
        body = {
            "__doc__": ours.__doc__,
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__reduce__": lambda self: (_rebuild, (ours, theirs, self.args, _picklable(self))),
            "__init__": Exception.__init__,
            "__str__": theirs.__str__,
            "__repr__": theirs.__repr__,
        }
        kind = _classes[ours, theirs] = type(ours.__name__, (ours, theirs), body)
    return kind  # type: ignore[return-value]


def _attributes(error: Exception) -> dict[str, Any]:
    """What the exception carries beside its arguments: aiormq keeps it in slots, pika in the instance's dictionary."""
    state = object.__getstate__(error)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: value for part in parts for name, value in (part or {}).items() if name != "__notes__"}
    if isinstance(error, OSError) and error.errno is not None:
        attributes.update(errno=error.errno, strerror=error.strerror)
    return attributes


def _picklable(error: Exception) -> dict[str, Any]:
    """The attributes that another process can use: not what settles the outcome, nor links, connections, channels."""
    return {name: _apart(value) for name, value in _attributes(error).items() if name not in _OF_THE_PROCESS}


def _apart(value: Any) -> Any:
    """A message that came back, as aiormq has it, without its channel; anything else as it is."""
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "channel"):
        return replace(value, channel=None)
    return value


# --- a channel that the broker closed ---------------------------------------------------------------------------------

# A broker takes what comes over a channel in order, and drops whatever follows the frame it refused. So the last
# message that was published on the channel is in no stream, if it is a publish that was refused: that message, or an
# earlier one.

_OF_MESSAGE: Final = re.compile(
    r"PRECONDITION_FAILED - (message size|invalid expiration|user_id property|invalid message)"
)
"""What RabbitMQ says of a message alone, 3.10 to 4.3 alike. Its other 406 are about acknowledgements and declarations.

Source: RabbitMQ, `rabbit_channel.erl`: `check_msg_size`, `check_expiration_header`, `check_user_id_header`.
"""

_OF_PUBLISHING: Final = re.compile(
    r"ACCESS_REFUSED - (write access to exchange|access to topic|access to exchange|.*publish)", re.IGNORECASE
)

BLOCKING: Final = frozenset({403, 404})
"""Reply codes by which a broker refuses a publish: no permission, no such exchange.

Nothing else that a blocking channel has under way is answered by them.
"""

MALFORMED: Final = frozenset({501, 502, 505})
"""Reply codes for frames that the broker cannot take, by which it closes the connection: in what order or size they
come, or what is in them. What follows them on the connection is dropped."""


def refuses_message(text: str) -> bool:
    """Whether a close's text is about a message: its size, its expiration, whose it says to be."""
    return _OF_MESSAGE.search(text) is not None


def refuses_publish(text: str, exchange: str) -> bool:
    """Whether a close's text is about a publish to an exchange, on a channel that may have other things under way."""
    named = f"'{exchange or 'amq.default'}'" in text
    missing = named and "NOT_FOUND - no exchange" in text
    return refuses_message(text) or missing or (named and _OF_PUBLISHING.search(text) is not None)
