"""Messages on their way into the store: gathered while the last ones are committed, then committed together. No I/O."""

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from relatum.collecting._bulk import Collected, checked_id, id_of_place
from relatum.collecting._collector_core import Advance, Core, Followed, Stored, Verdict
from relatum.errors import DataError, InvalidInput
from relatum.reading import Message, position_of, type_and_id_of
from relatum.waiting import ended

logger = logging.getLogger("relatum.collector")

TypeOf = Callable[[Message], str | None]
"""Tells a message's type; None for a message nobody consumes."""


def type_of_property(message: Message) -> str | None:
    """The property `type`: what a collector goes by unless it is told otherwise."""
    return message.properties.type


def describe_followed(message: Message, type_of: TypeOf) -> Collected:
    """As `describe`, of a message of a followed stream: what cannot be described has no type, and is passed over."""
    try:
        return describe(message, type_of, is_new=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller's own function: it must not stop a stream
        logger.warning("passed over, its type cannot be told: %s: %s", message.id, ended(error))
        raw = message.raw
        return Collected(message.id, id_of_place(message.id), "", 0 if raw is None else len(raw), message)


def describe(message: Message, type_of: TypeOf, *, is_new: bool = False) -> Collected:
    """What a collector needs to know of a message. Takes no lock and decodes, so it is done before there is one.

    The message kept is undecoded again: decoded, it would take twice the memory while it waits.

    `is_new`: Whether nobody has decoded it yet. Default: False.
    """
    place, raw = message.id, message.raw
    kind, given = type_and_id_of(message)
    if type_of is not type_of_property:
        kind = None
        with suppress(DataError):
            kind = type_of(message)
    if kind is not None and not isinstance(kind, str):
        raise InvalidInput(f"type_of gives a text or None, not {type(kind).__name__}, for message {place}")
    # Interned: as many messages as there are would each keep a copy of the few types.
    kind, message_id = sys.intern(kind or ""), checked_id(place, given)
    size = len(message.body if raw is None else raw)
    if raw is not None and not (is_new and type_of is type_of_property):
        message = Message.from_record(message.stream, message.offset, raw, message.chunk_ms)
    return Collected(place, message_id, kind, size, message)


@dataclass(slots=True)
class Gathered:
    """Messages to be stored in one transaction: those of a stream from an offset on; without a stream, those given."""

    stream: str = ""
    from_offset: int = 0
    messages: list[Collected] = field(default_factory=list)
    last: Message | None = None
    passed_over: int = 0

    @property
    def advance(self) -> Advance | None:
        """How the stream's position moves; None for messages that were given. It decodes the last message."""
        if self.last is None:
            return None
        return Advance(self.stream, self.from_offset, self.last.offset + 1, position_of(self.last), self.passed_over)


class Intake:
    """Gathers messages that the core has room for, by stream. For the collector's loop."""

    def __init__(self, core: Core) -> None:
        self.passed_over = 0
        self.refused = 0
        self._core = core
        self._given = Gathered()
        self._followed: dict[str, Gathered] = {}
        self._next: dict[str, int] = {}
        self._storing: set[str] = set()
        self._begun = 0
        self._ended = 0

    # --- messages given by `collect` ------------------------------------------------------------------------------

    def collect(self, message: Collected) -> Verdict:
        """Take a message, if there is room."""
        verdict = self._core.admit(message)
        if verdict is Verdict.TAKEN:
            self._given.messages.append(message)
        self.passed_over += verdict is Verdict.NO_EXECUTOR
        self.refused += verdict is Verdict.REFUSED
        return verdict

    # --- messages of streams that are followed --------------------------------------------------------------------

    def follow(self, stream: str, followed: Followed) -> None:
        """Begin with a stream where its position is."""
        self._next[stream] = followed.next_offset
        self._followed.pop(stream, None)

    def is_followed(self, stream: str) -> bool:
        """Whether the stream is followed; no longer so where another member moved its position."""
        return stream in self._next

    def unfollow(self, stream: str) -> None:
        """Forget a stream's position, and what was gathered of it: whoever follows it next reads that again."""
        self._next.pop(stream, None)
        gathered = self._followed.pop(stream, None)
        if gathered is not None:
            self._core.cancel(gathered.messages)

    def take(self, stream: str, messages: Sequence[Collected]) -> int:
        """Take messages of a stream, in order; gives how many. Fewer than all where the next one has to wait.

        Messages whose type has no executor here are passed over.
        """
        gathered, taken = self._followed.get(stream) or Gathered(stream, self._next[stream]), 0
        for message in messages:
            verdict = self._core.admit(message)
            if verdict in (Verdict.WAIT, Verdict.REFUSED):
                break
            if verdict is Verdict.TAKEN:
                gathered.messages.append(message)
            elif verdict is Verdict.NO_EXECUTOR:
                gathered.passed_over += 1
                self.passed_over += 1
            gathered.last = message.message
            taken += 1
        if gathered.last is not None:
            self._followed[stream] = gathered
            self._next[stream] = gathered.last.offset + 1
        return taken

    # --- into the store -------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be stored, nor is being stored."""
        return not self._storing and not self.is_anything_gathered

    @property
    def gathered(self) -> int:
        """Messages that wait to be stored, to be consumed here."""
        return len(self._given.messages) + sum(len(gathered.messages) for gathered in self._followed.values())

    @property
    def is_anything_gathered(self) -> bool:
        """Whether there is something to store."""
        return bool(self._given.messages or self._followed)

    def is_stored(self, stream: str) -> bool:
        """Whether all that was taken of a followed stream is stored."""
        return stream not in self._followed and stream not in self._storing

    def mark(self) -> int:
        """What to hand to `is_stored_to`: everything taken so far."""
        return self._begun + self.is_anything_gathered

    def is_stored_to(self, mark: int) -> bool:
        """Whether everything is stored that had been taken at a mark."""
        return self._ended >= mark

    def next(self) -> list[Gathered]:
        """Everything gathered, to be stored now: one transaction each.

        Each must come back by `add` or `lost`, all of them before this is called again.
        """
        batches = [*([self._given] if self._given.messages else []), *self._followed.values()]
        self._given, self._followed = Gathered(), {}
        self._storing = {gathered.stream for gathered in batches}
        self._begun += 1
        return batches

    def _came_back(self, gathered: Gathered) -> None:
        self._storing.discard(gathered.stream)
        if not self._storing:
            self._ended = self._begun

    def stored(self, gathered: Gathered, stored: Stored) -> list[Collected]:
        """Note what was stored; gives the messages that are to be consumed here: tell of them, then `add` them."""
        ours = [message for message in gathered.messages if message.place in stored.places]
        if len(ours) < len(gathered.messages):
            self._core.cancel(message for message in gathered.messages if message.place not in stored.places)
        for message in ours:
            message._note(collected_at=stored.at)
        return ours

    def add(self, gathered: Gathered, ours: Sequence[Collected], now: float) -> None:
        """Hand stored messages to the core."""
        self._came_back(gathered)
        self._core.add(ours, now)

    def lost(self, gathered: Gathered, error: Exception | None = None) -> None:
        """Note that nothing was stored: the stream is not followed any more."""
        self._came_back(gathered)
        self._core.cancel(gathered.messages)
        if gathered.stream:
            self.unfollow(gathered.stream)
        elif error is not None:
            self.refused += len(gathered.messages)
