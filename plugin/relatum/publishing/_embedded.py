"""The recorders inside this process: one for each broker, database and set of keys, shared by connections.

A recorder outlives a lost connection, and also records messages published just before the loss. Recorders run in daemon
threads and never keep a process alive. Another process, or the next start, continues from the coverage. A warning
reports messages known to be unrecorded when `release` returns, or when a process ends without it.
"""

import atexit
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

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


class EmbeddedRecorders:
    """The recorders of this process, each with a count of the interceptions that use it.

    No method waits for a server. `acquire` imports `relatum.recording`, which stamping alone does not need.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _recorders: ClassVar["dict[_Key, tuple[EmbeddedRecorder, int]]"] = {}

    @classmethod
    def acquire(
        cls, address: BrokerAddress, database: AnyDatabase, definitions: tuple[KeyDefinition, ...], *, records: bool
    ) -> "EmbeddedRecorder":
        """Return the recorder for these arguments, started if needed. `records=False`: it only compares the keys."""
        from relatum.recording.embedded import EmbeddedRecorder

        login = address.login
        # Each connection has its own TLS context and password function. The key contains only one that names the user.
        user = id(login.ssl_context) if login.mechanism == "EXTERNAL" else address.password_function
        key_meanings = tuple((key.name, key.meaning) for key in definitions)
        key: _Key = (address, user, database, records, key_meanings)
        with cls._lock:
            matches = (other for other in cls._recorders if other[1:] == key[1:])
            key = next((other for other in matches if other[0].is_joined_by(address)), key)
            recorder, users = cls._recorders.get(key, (None, 0))
            if recorder is None:
                recorder = EmbeddedRecorder(address, database, definitions, defines=records)
            cls._recorders[key] = (recorder, users + 1)
            return recorder

    @classmethod
    def release(cls, recorder: "EmbeddedRecorder") -> bool:
        """End one use of the recorder. Return True for the last use: the caller then closes the recorder."""
        with cls._lock:
            for key, (known, users) in list(cls._recorders.items()):
                if known is recorder:
                    del cls._recorders[key]
                    if users > 1:
                        cls._recorders[key] = (recorder, users - 1)
                        return False
        return True

    @classmethod
    def warn_at_exit(cls) -> None:
        left: dict[str, int | None] = {}
        for recorder, _ in list(cls._recorders.values()):
            left |= recorder.left()
        warn_of_unrecorded("the process", left, "; to record them, call relatum.release(…) before the process ends")

    @classmethod
    def renew(cls) -> None:
        """Drop the parent's recorders in a forked child, which lacks their threads. The child starts its own."""
        cls._lock = threading.Lock()
        leave_to_parent(cls._recorders)
        cls._recorders = {}


after_fork(EmbeddedRecorders, lambda recorders: recorders.renew())
atexit.register(EmbeddedRecorders.warn_at_exit)


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
