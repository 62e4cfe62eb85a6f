"""The recorders inside this process: one for each broker, database and set of keys, shared by connections.

A recorder outlives a lost connection, and also records messages published just before the loss. Recorders run in daemon
threads and never keep a process alive. Another process, or the next start, continues from the coverage. A warning
reports messages known to be unrecorded when `release` returns, or when a process ends without it.
"""

import atexit
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

from relatum.common.processes import after_fork, leave_to_parent
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress
from relatum.store.database import AnyDatabase

if TYPE_CHECKING:
    from relatum.recording.embedded import EmbeddedRecorder

logger = logging.getLogger("relatum.recorder")

_STREAMS_SHOWN_MAX: Final = 5
"""Streams that a warning about unrecorded messages names."""

_Key: TypeAlias = tuple[BrokerAddress, object, AnyDatabase, bool, tuple[tuple[str, str], ...]]


_lock = threading.Lock()
_recorders: "dict[_Key, tuple[EmbeddedRecorder, WeakSet[Any]]]" = {}
"""The recorders of this process, each with the interceptions that use it."""


def acquire(
    user: Any, address: BrokerAddress, database: AnyDatabase, definitions: tuple[KeyDefinition, ...]
) -> "EmbeddedRecorder":
    """Return the recorder for these arguments, started if needed. If the user does not record, it only compares keys.

    Imports `relatum.recording`, which stamping alone does not need. Does not wait for a server.
    """
    from relatum.recording.embedded import EmbeddedRecorder

    login = address.login
    # Each connection has its own TLS context and password function. The key contains only one that names the user.
    login_user = id(login.ssl_context) if login.mechanism == "EXTERNAL" else address.password_function
    key_meanings = tuple((key.name, key.meaning) for key in definitions)
    key: _Key = (address, login_user, database, user.records, key_meanings)
    with _lock:
        matches = (other for other in _recorders if other[1:] == key[1:])
        key = next((other for other in matches if other[0].is_joined_by(address)), key)
        if key not in _recorders:
            _recorders[key] = EmbeddedRecorder(address, database, definitions, defines=user.records), WeakSet()
        recorder, users = _recorders[key]
        users.add(user)
        return recorder


def release(user: Any, recorder: "EmbeddedRecorder") -> bool:
    """End one use of the recorder. Return True for the last use: the caller then closes the recorder.

    An application that lost a connection may open another, and release only that one.
    """
    with _lock:
        for key, (known, users) in list(_recorders.items()):
            if known is recorder:
                users.discard(user)
                if all(other.is_lost for other in users):
                    del _recorders[key]
                    return True
    return False


def _warn_at_exit() -> None:
    left: dict[str, int | None] = {}
    for recorder, _ in list(_recorders.values()):
        left |= recorder.left()
    warn_of_unrecorded("the process", left, "; to record them, call relatum.release(…) before the process ends")


def _renew(_: object) -> None:
    """Drop the parent's recorders in a forked child, which lacks their threads. The child starts its own."""
    global _lock, _recorders
    _lock = threading.Lock()
    leave_to_parent(_recorders)
    _recorders = {}


after_fork(acquire, _renew)
atexit.register(_warn_at_exit)


def warn_of_unrecorded(subject: str, left: Mapping[str, int | None], hint: str = "") -> None:
    descriptions = [
        f"an unknown number of {stream!r}, if it is a stream" if count is None else f"{count} of {stream!r}"
        for stream, count in left.items()
    ]
    more = f", and of {len(descriptions) - _STREAMS_SHOWN_MAX} more" if len(descriptions) > _STREAMS_SHOWN_MAX else ""
    if descriptions:
        logger.warning(
            "%s ends with messages that are not recorded: %s%s; the next recorder of these streams records them%s",
            subject,
            ", ".join(descriptions[:_STREAMS_SHOWN_MAX]),
            more,
            hint,
        )
