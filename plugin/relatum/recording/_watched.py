"""What an embedded recorder has been told that messages go to, and when it asks which streams that are. No I/O.

A message published by the default exchange goes to the queue of its routing key, so that name is asked about. Any other
exchange is asked about as a whole: which streams are bound to it. Which of them a routing key leads to is never asked:
that question takes down the stream plugin of RabbitMQ 3.10 where the exchange looks into messages.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from relatum.headers import BROKERS_OWN, NAME_BYTES_MAX

ASK_S: Final = (0.5, 60.0)
"""Least and most seconds before the same is asked again: doubled each time."""

UNUSED_S: Final = 300.0
"""Seconds after which what nobody publishes to is asked about no more."""

SUBJECTS_MAX: Final = 10_000
"""Names and exchanges remembered; the one that was used longest ago is forgotten first."""


class Subject(NamedTuple):
    """What is asked about: a name that may be a stream's, or an exchange."""

    name: str
    is_exchange: bool


@dataclass(slots=True)
class _State:
    due: float
    used: float
    pause_s: float = ASK_S[0]


class Watched:
    """The subjects of one recorder. Used under its lock."""

    def __init__(self) -> None:
        self.new: dict[Subject, None] = {}
        self._states: dict[Subject, _State] = {}
        self._streams: set[str] = set()

    def add(self, exchange: Any, routing_key: Any, now: float) -> bool:
        """A message goes there. True where that has to be asked about now.

        What cannot be the name of an exchange or a queue is passed over: it is for the client to refuse.
        """
        subject = _subject(exchange, routing_key)
        if subject is None or (not subject.is_exchange and subject.name in self._streams):
            return False
        state = self._states.pop(subject, None)
        is_new = state is None
        if state is None:
            state = _State(now, now)
            self.new[subject] = None
            if len(self._states) >= SUBJECTS_MAX:
                self._forget(next(iter(self._states)))
        state.used = now
        self._states[subject] = state
        return is_new

    def due(self, now: float) -> list[Subject]:
        """What to ask about now, what is new first."""
        for subject, state in list(self._states.items()):
            if now - state.used > UNUSED_S and subject not in self.new:
                self._forget(subject)
        known = (subject for subject, state in self._states.items() if state.due <= now and subject not in self.new)
        return [*self.new, *known]

    def next_s(self, now: float) -> float:
        """Seconds until something is due."""
        return max(0.0, min((state.due for state in self._states.values()), default=now + ASK_S[1]) - now)

    def waits(self, subject: Subject) -> bool:
        """Whether something new has its turn before this one."""
        return bool(self.new) and subject not in self.new

    def answered(self, subject: Subject, streams: list[str], now: float) -> None:
        """The broker has answered. A name that is a stream's is settled; all else is asked again, ever less often."""
        if streams and not subject.is_exchange:
            self._forget(subject)
            self._streams.update(streams)
            return
        self.new.pop(subject, None)
        state = self._states.get(subject)
        if state is not None:
            state.due = now + state.pause_s
            state.pause_s = min(2 * state.pause_s, ASK_S[1])

    def _forget(self, subject: Subject) -> None:
        self.new.pop(subject, None)
        self._states.pop(subject, None)


def _subject(exchange: Any, routing_key: Any) -> Subject | None:
    name, is_exchange = _text(exchange), True
    if name == "":
        name, is_exchange = _text(routing_key), False
    return None if not name or name.startswith(BROKERS_OWN) else Subject(name, is_exchange)


def _text(value: Any) -> str | None:
    """The name as text; None where it cannot be one. Clients take names as bytes as well."""
    try:
        text = value.decode() if isinstance(value, bytes) else value
        return str(text) if isinstance(text, str) and len(text.encode()) <= NAME_BYTES_MAX else None
    except UnicodeError:
        return None
