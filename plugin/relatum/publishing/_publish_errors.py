"""Errors of publishes, which belong to the client's class and to Relatum's, and the meaning of a closed channel.

Some callers write `except pika.exceptions.NackError`, others `except relatum.errors.PublishNacked`. Both must catch the
same exception, so its class has both as bases. The class for each pair is made when first needed, since any exception
of the client or of the system may mean a lost connection. The error keeps the arguments, attributes and text of the
client's exception.
"""

import re
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, Final, TypeVar

from pika.spec import ACCESS_REFUSED, NOT_FOUND

from relatum.errors import PublishError

_Outcome = TypeVar("_Outcome", bound=PublishError)

_OF_THE_PROCESS = frozenset({"settle", "link", "connection"})


def outcome(ours: type[_Outcome], theirs: Exception, **fields: Any) -> _Outcome:
    """Return the client's exception as an error of Relatum's class, too. Raise it `from` the client's."""
    if isinstance(theirs, ours):
        theirs.__dict__.update(fields)
        return theirs
    return _rebuild(ours, type(theirs), theirs.args, {**_attributes(theirs), **fields})


def _rebuild(
    ours: type[_Outcome], theirs: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]
) -> _Outcome:
    kind = _class_of(ours, theirs)  # type: ignore[arg-type]  # classes are hashable
    # Neither initialiser runs: pika's build `args` from other arguments, which are lost.
    error: _Outcome = kind.__new__(kind, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


@cache
def _class_of(ours: Any, theirs: Any) -> Any:
    body = {
        "__doc__": ours.__doc__,
        "__module__": ours.__module__,
        "__qualname__": ours.__qualname__,
        "__reduce__": lambda self: (_rebuild, (ours, theirs, self.args, _picklable(self))),
        "__init__": Exception.__init__,
        "__str__": theirs.__str__,
        "__repr__": theirs.__repr__,
    }
    return type(ours.__name__, (ours, theirs), body)


def _attributes(error: Exception) -> dict[str, Any]:
    """Return the exception's attributes besides `args`: aiormq uses slots, pika the instance's dictionary."""
    state = object.__getstate__(error)
    parts = state if isinstance(state, tuple) else (state,)
    attributes = {name: value for part in parts for name, value in (part or {}).items() if name != "__notes__"}
    if isinstance(error, OSError) and error.errno is not None:
        attributes.update(errno=error.errno, strerror=error.strerror)
    return attributes


def _picklable(error: Exception) -> dict[str, Any]:
    """Return the attributes that another process can use: not `settle`, links, connections or channels."""
    attributes = {name: value for name, value in _attributes(error).items() if name not in _OF_THE_PROCESS}
    for name, value in attributes.items():
        if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "channel"):
            # aiormq's returned message.
            attributes[name] = replace(value, channel=None)
    return attributes


# --- a channel that the broker closed ---------------------------------------------------------------------------------

# A broker processes a channel's frames in order, and drops all frames after one it refused. So if it refused a publish,
# of the channel's last message or an earlier one, the last message is in no stream.

_OF_MESSAGE: Final = re.compile(
    r"PRECONDITION_FAILED - (message size|invalid expiration|user_id property|invalid message)"
)
"""RabbitMQ's 406 texts about messages, the same from 3.10 to 4.3. Others are about acknowledgements or declarations.

Source: RabbitMQ, `rabbit_channel.erl`: `check_msg_size`, `check_expiration_header`, `check_user_id_header`.
"""

_OF_PUBLISHING: Final = re.compile(
    r"ACCESS_REFUSED - (write access to exchange|access to topic|access to exchange|.*publish)", re.IGNORECASE
)

BLOCKING: Final = frozenset({ACCESS_REFUSED, NOT_FOUND})
"""Reply codes by which a broker refuses a publish: no permission, no such exchange.

On a blocking channel that publishes, they can answer only the publish.
"""


def refuses_message(text: str) -> bool:
    """Return whether a close's text is about a message: its size, expiration or user id."""
    return _OF_MESSAGE.search(text) is not None


def refuses_publish(text: str, exchange: str) -> bool:
    """Return whether a close's text is about a publish to an exchange. The channel may have other calls pending."""
    named = f"'{exchange or 'amq.default'}'" in text
    missing = named and "NOT_FOUND - no exchange" in text
    return refuses_message(text) or missing or (named and _OF_PUBLISHING.search(text) is not None)
