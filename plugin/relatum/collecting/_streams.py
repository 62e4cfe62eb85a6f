"""Where each followed stream of a collector stands: whose it is, what was read of it, what has to be asked. No I/O."""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

from relatum.collecting._bulk import Collected
from relatum.collecting._collector_core import Followed
from relatum.collecting._intake import TypeOf, describe_followed
from relatum.collecting._shared import Shared, logger
from relatum.errors import Conflict
from relatum.following import Attached, Event, Failed, Hole, Records, Replaced
from relatum.reading import Position
from relatum.waiting import Pauses, ended

AGAIN_S: Final = 0.05
"""Seconds until a stream is followed again where another member came between."""

TAKE_MESSAGES: Final = 500
"""Messages that are taken in together, where so many have come: small chunks are taken in by the dozen."""

CUT_OFF_LOOK_S: Final = 1.0
"""Seconds between two looks whether the broker is reached again, before which no stream is followed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Follow the stream, if no other member does: answer with where to begin if it is new, and the store's `follow`."""

    member: int
    initial: int | None


@dataclass(frozen=True, slots=True)
class FindAgain:
    """The stream is not what was collected of it: find what still agrees, and have the position behind that."""

    member: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Let another member follow it."""

    member: int


Question = Begin | FindAgain | Leave


class Source(Protocol):
    """What reads streams, and never blocks: a `Follower`."""

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Read a stream from an offset on; gives the number of that following."""

    def leave(self, stream: str) -> None:
        """Read it no more."""

    def done(self, *events: Event) -> None:
        """Let streams have more."""


class _Phase(Enum):
    RESTING = auto()
    """Nobody here follows it; that is tried at `due_at`."""
    ASKED = auto()
    """An answer is waited for."""
    READING = auto()
    """It is this member's: what comes is taken."""
    EMPTYING = auto()
    """It was replaced: places mean something else from now on, and what lay there before is consumed first."""
    LEAVING = auto()
    """It is another's as soon as all that was taken of it is stored."""


class CollectedStream:
    """One stream. Used by one thread, which calls `step` whenever something may have changed."""

    def __init__(self, shared: Shared, name: str, follower: Source, type_of: TypeOf) -> None:
        self.name = name
        self.due_at = 0.0
        self._shared = shared
        self._follower = follower
        self._type_of = type_of
        self._who = shared.who(f"following stream {name!r}")
        self._phase = _Phase.RESTING
        self._pauses = Pauses()
        self._pause_s = AGAIN_S
        self._initial: int | None = None
        self._member = self._following = 0
        self._followed = Followed(0)
        self._was_followed = self._is_attached = False
        self._events: deque[Event] = deque()
        self._taking: tuple[list[Event], list[Collected]] | None = None

    @property
    def is_resting(self) -> bool:
        """Whether nothing is to be done before `due_at`."""
        return self._phase is _Phase.RESTING

    @property
    def is_standing_by(self) -> bool:
        """Whether another member follows it, as far as is known: told otherwise by `freed`."""
        return self.is_resting and self._initial is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it goes on when messages are stored or consumed, or there is room for more."""
        return self._phase in (_Phase.EMPTYING, _Phase.LEAVING) or self._taking is not None

    # --- what it is told ------------------------------------------------------------------------------------------

    def came(self, event: Event) -> None:
        """Take an event of the follower's; it is given back by `done` when nothing of it is needed any more."""
        if self._phase is _Phase.READING and (event.stream is None or event.following == self._following):
            self._events.append(event)
        elif event.stream is not None:
            self._follower.done(event)

    def answered(self, question: Question, answer: object, now: float) -> None:
        """Go on with what a question came to: its answer, or the exception that was raised instead."""
        if isinstance(answer, Exception):
            self._pause_s = self._pause_after(answer)
        elif isinstance(question, Begin) and isinstance(answer, tuple):
            self._initial, followed = answer
            if followed is not None:
                self._read_on(question.member, followed)
                return
            self._shared.outages.over(self._who)
            self._rest(math.inf)
            return
        if isinstance(question, FindAgain):
            self._phase = _Phase.LEAVING
        else:
            self._initial = None
            self._rest(now + self._pause_s)

    def freed(self) -> None:
        """Ask for it again: no other member follows it any more."""
        self.due_at = 0.0

    def lost(self, error: Exception | None) -> None:
        """Begin anew: another member moved its position (None), or the store takes its messages at no time."""
        if self._phase is _Phase.READING:
            self._end(error)

    def failed(self, error: Exception, now: float) -> None:
        """Begin anew after a defect."""
        if self._phase in (_Phase.READING, _Phase.EMPTYING):
            self._end(error)
        else:
            self._rest(now + self._pause_after(error))

    # --- what it does ---------------------------------------------------------------------------------------------

    def step(self, now: float) -> Question | None:
        """Do what can be done now; gives what has to be asked before it goes on."""
        shared = self._shared
        if self._phase is _Phase.RESTING:
            if shared.stopping.is_set():
                self.due_at = math.inf
            if shared.is_cut_off:
                self.due_at = max(self.due_at, now + CUT_OFF_LOOK_S)
            if now < self.due_at:
                return None
            return self._ask(Begin(shared.member, self._initial))
        if self._phase is _Phase.READING:
            self._read(now)
        if self._phase is _Phase.EMPTYING:
            with shared.changed:
                is_empty = not shared.core.holds_of(self.name)
            if self._is_over:
                self._phase = _Phase.LEAVING
            elif is_empty:
                return self._ask(FindAgain(self._member))
        if self._phase is _Phase.LEAVING:
            with shared.changed:
                if not shared.intake.is_stored(self.name) and not shared.abandoned.is_set():
                    return None
                shared.intake.unfollow(self.name)
            if not shared.abandoned.is_set():
                # Else the member leaves, and with it what it followed.
                return self._ask(Leave(self._member))
            self._rest(math.inf)
        return None

    @property
    def _is_over(self) -> bool:
        shared = self._shared
        return shared.stopping.is_set() or shared.is_cut_off or shared.member != self._member

    def _ask(self, question: Question) -> Question:
        self._phase = _Phase.ASKED
        return question

    def _rest(self, until: float) -> None:
        self._phase, self.due_at = _Phase.RESTING, until

    def _read_on(self, member: int, followed: Followed) -> None:
        """Read it: it is this member's."""
        if not followed.is_new and not self._was_followed:
            # What was given as `start` does not count: said once.
            text = "collector %r: going on with stream %r at %d, where it was; start is for streams it never followed"
            logger.info(text, self._shared.store.name, self.name, followed.next_offset)
        self._phase, self._member, self._followed = _Phase.READING, member, followed
        self._was_followed, self._is_attached = True, False
        self._following = self._follower.follow(self.name, followed.next_offset, known=followed.known_by)

    def _read(self, now: float) -> None:
        """Go through what came, as far as there is room."""
        while self._phase is _Phase.READING:
            if self._is_over:
                self._end(None)
            elif self._taking is not None:
                if not self._take(now):
                    return
            elif self._events:
                self._handle(self._events.popleft())
            else:
                return

    def _handle(self, event: Event) -> None:
        if isinstance(event, Records):
            self._taking = self._described(event)
        elif isinstance(event, Attached):
            # Once: a connection may be replaced meanwhile.
            if not self._is_attached:
                self._attached()
        elif isinstance(event, Replaced):
            self._warn("stream %r was deleted and declared again: what it has now is collected", self.name)
            self._end(None)
            self._phase = _Phase.EMPTYING
        elif isinstance(event, Hole):
            text = "retention dropped offsets %d to %d of stream %r before they were collected"
            places = {"from": event.from_offset, "to": event.to_offset}
            self._warn(text, event.from_offset, event.to_offset - 1, self.name, **places)
        elif isinstance(event, Failed):
            # Another member may read it, meanwhile.
            self._end(event.error)

    def _described(self, first: Records) -> tuple[list[Event], list[Collected]]:
        """Messages, with those that came right behind them."""
        events, messages, event = list[Event](), list[Collected](), first
        while True:
            events.append(event)
            messages += [describe_followed(each, self._type_of) for each in event.batch.each_message()]
            following = self._events[0] if self._events else None
            if not isinstance(following, Records) or len(messages) >= TAKE_MESSAGES:
                return events, messages
            event = following
            self._events.popleft()

    def _attached(self) -> None:
        """It is the one that was collected: take what comes."""
        shared = self._shared
        self._is_attached = True
        shared.outages.over(self._who)
        with shared.changed:
            shared.intake.follow(self.name, self._followed)
        logger.info(
            "collector %r: following stream %r from %d on", shared.store.name, self.name, self._followed.next_offset
        )

    def _take(self, now: float) -> bool:
        """Hand on messages that were read; False where there is no room for all of them now."""
        assert self._taking is not None, "asked before"
        shared, (events, messages) = self._shared, self._taking
        with shared.changed:
            # What was lost meanwhile is told in a moment: `lost`.
            taken = shared.intake.take(self.name, messages, now) if shared.intake.is_followed(self.name) else 0
            if taken:
                shared.changed.notify_all()
        del messages[:taken]
        if messages:
            return False
        self._taking = None
        self._follower.done(*events)
        return True

    def _end(self, error: Exception | None) -> None:
        """Read it no more, and let go of what came and was not taken."""
        self._follower.leave(self.name)
        if self._taking is not None:
            self._follower.done(*self._taking[0])
        self._follower.done(*self._events)
        self._taking = None
        self._events.clear()
        self._phase = _Phase.LEAVING
        if error is None:
            self._pauses, self._pause_s = Pauses(), AGAIN_S
        else:
            self._pause_s = self._pause_after(error)

    def _pause_after(self, error: Exception) -> float:
        """Say what ended it; gives the seconds until it is tried again."""
        if isinstance(error, Conflict):
            # Another member came between: nothing is wrong.
            logger.info("%s begins anew: %s", self._who, ended(error))
        else:
            self._shared.outages.failed(self._who, error)
        return self._pauses.after(error)

    def _warn(self, text: str, *values: object, **fields: object) -> None:
        extra = {"stream": self.name, **fields}
        logger.warning(f"collector %r: {text}", self._shared.store.name, *values, extra=extra)
