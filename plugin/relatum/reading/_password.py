"""A password that changes while a process lives: each login asks for the current one, and nothing stores it.

`Asked` wraps a user's function, which may ask a server for a token, raise, or never return. So it runs in a thread of
its own, one call at a time, and a login waits a few seconds for it. The message of its error may hold the secret, and
is never shown.

`HeldPassword` is the password that an intercepted connection would log in with, which for example aio-pika's
`update_secret` changes; reading it is free. Connections with equal logins share one recorder, so several may be read:
the last change counts, even after its connection is gone.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final

from relatum.checks import seconds_text
from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.processes import after_fork
from relatum.waiting import Threads, left_s

PASSWORD_S: Final = 5.0
"""Seconds for the function to return the password. After that the login fails, and is retried."""


class Asked:
    """A function that returns the current password. Two with the same function are equal."""

    def __init__(self, function: Callable[[], str | None]) -> None:
        self._function = function
        self._threads = Threads(1, "relatum-password")
        self._call: Future[Any] | None = None
        after_fork(self, Asked._renew)

    def _renew(self) -> None:
        self._call = None

    def __call__(self) -> str:
        """Call the function, or wait for a call that has not returned yet.

        Raises:
            BrokerUnavailable: It raised, or did not return in time.
            ConfigurationError: What it returned is no password.
        """
        call = self._call
        if call is None or call.done():
            call = self._call = self._threads.submit(self._function)
        if not wait([call], left_s(PASSWORD_S)).done:
            raise BrokerUnavailable(f"The broker's password function did not return within {seconds_text(PASSWORD_S)}.")
        if (error := call.exception()) is not None:
            raise BrokerUnavailable(f"The broker's password function raised {type(error).__name__}.")
        answer = call.result()
        if not can_be_sent(answer):
            raise ConfigurationError(
                "The broker's password function returned no password: it must return text, without NUL "
                f"characters and halves of surrogate pairs, and returned {type(answer).__name__}."
            )
        return str(answer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and bool(self._function == other._function)

    def __hash__(self) -> int:
        return hash(Asked)

    def __reduce__(self) -> tuple[Any, ...]:
        return Asked, (self._function,)


class HeldPassword:
    """The password that a connection would log in with now.

    Args:
        connection: The connection, held weakly.
        password: The password it logged in with.
        says: Returns the password it would log in with now; None: unchanged.
        others: Other objects with such functions, such as the parameters of its next connection; held weakly if they
            can be.
    """

    def __init__(
        self, connection: object, password: str, says: Callable[[Any], Any], *others: tuple[Any, Callable[[Any], Any]]
    ) -> None:
        self._connections = [weakref.ref(connection)]
        self._sources = [
            _Source(_weakly(connection), says, password),
            *(_Source(_weakly(each), read, read(each)) for each, read in others),
        ]
        self._last: str | None = None

    def __call__(self) -> str | None:
        """Return the password that changed last; None if none has."""
        for source in self._sources:
            owner = source.owner()
            now = None if owner is None else source.says(owner)
            if now != source.before and can_be_sent(now):
                source.before = self._last = now
        return self._last

    @property
    def is_left(self) -> bool:
        """Whether all of its connections were closed or dropped, so that it cannot change any more."""
        there = (connection() for connection in self._connections)
        return all(each is None or getattr(each, "is_closed", False) is True for each in there)

    def join(self, others: "HeldPassword", password: str | None) -> None:
        """Also read what another connection holds; `password` is used from now on, None: unchanged."""
        self()
        self._connections = [each for each in self._connections if each() is not None] + others._connections
        self._sources = [each for each in self._sources if each.owner() is not None] + others._sources
        self._last = password or self._last


@dataclass(slots=True)
class _Source:
    """An object that has a password, how to read it, and the value read last."""

    owner: Callable[[], Any]
    says: Callable[[Any], Any]
    before: Any


def _weakly(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        # pika's parameters: they are few, and their users keep them for long.
        return lambda: owner


def can_be_sent(password: Any) -> bool:
    """Whether it is a valid password, without an error that would show it."""
    return isinstance(password, str) and "\0" not in password and password == password.encode(errors="ignore").decode()
