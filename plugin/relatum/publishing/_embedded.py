"""The recorders inside this process: one for each broker, database and set of keys, shared by connections.

Recorders outlive connections, so messages published just before a connection ended are recorded too. They run in daemon
threads and never keep a process alive; another process, or the next start, continues from the coverage. A warning
reports known messages left unrecorded by `release`, or by a process that ends without it.
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

TOLD_MAX: Final = 5
"""Streams named in a warning about unrecorded messages."""

_Key: TypeAlias = tuple[BrokerAddress, object, AnyDatabase, bool, tuple[tuple[str, str], ...]]


class EmbeddedRecorders:
    """The recorders of this process, each with a count of the interceptors that use it.

    No method waits for a server. The first use imports `relatum.recording`, which stamping alone does not need.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _used: ClassVar["dict[_Key, tuple[EmbeddedRecorder, int]]"] = {}

    @classmethod
    def acquire(
        cls, address: BrokerAddress, database: AnyDatabase, definitions: tuple[KeyDefinition, ...], *, records: bool
    ) -> "EmbeddedRecorder":
        """Return the recorder for these arguments, started if there is none. `records=False` only compares the keys."""
        from relatum.recording.embedded import EmbeddedRecorder

        login = address.login
        # Each connection has its own TLS context and password function. Compare them only if they identify the user.
        user = id(login.ssl_context) if login.mechanism == "EXTERNAL" else address.password_function
        meaning = tuple((key.name, key.meaning) for key in definitions)
        key: _Key = (address, user, database, records, meaning)
        with cls._lock:
            alike = (used for used in cls._used if used[1:] == key[1:])
            key = next((used for used in alike if used[0].is_joined_by(address)), key)
            recorder, users = cls._used.get(key, (None, 0))
            if recorder is None:
                recorder = EmbeddedRecorder(address, database, definitions, defines=records)
            cls._used[key] = (recorder, users + 1)
            return recorder

    @classmethod
    def give_back(cls, recorder: "EmbeddedRecorder") -> bool:
        """End one use. Returns True for the last one, whose caller closes the recorder."""
        with cls._lock:
            for key, (known, users) in list(cls._used.items()):
                if known is recorder:
                    del cls._used[key]
                    if users > 1:
                        cls._used[key] = (recorder, users - 1)
                        return False
        return True

    @classmethod
    def warn_at_exit(cls) -> None:
        left: dict[str, int | None] = {}
        for recorder, _ in list(cls._used.values()):
            left |= recorder.left()
        warn_of_left("the process", left, "; to record them here, call relatum.release(…) before the process ends")

    @classmethod
    def renew(cls) -> None:
        """Forget the parent's recorders in a child: threads are not forked. The child starts its own."""
        cls._lock = threading.Lock()
        leave_to_parent(cls._used)
        cls._used = {}


after_fork(EmbeddedRecorders, lambda recorders: recorders.renew())
atexit.register(EmbeddedRecorders.warn_at_exit)


def warn_of_left(who: str, left: Mapping[str, int | None], hint: str = "") -> None:
    told = [
        f"an unknown number of {stream!r}, if it is a stream" if count is None else f"{count} of {stream!r}"
        for stream, count in left.items()
    ]
    more = f", and of {len(told) - TOLD_MAX} more" if len(told) > TOLD_MAX else ""
    if told:
        logger.warning(
            "%s ends with messages that are not recorded: %s%s; the next recorder of these streams records them%s",
            who,
            ", ".join(told[:TOLD_MAX]),
            more,
            hint,
        )
