"""Streams in the thread that reads: courses are followed, doubts are asked about, failures are told and repeated."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeGuard

from relatum.errors import AccessRefused, ConfigurationError, RelatumError, StreamUnavailable
from relatum.following._course import Differs, Doubt, Drop, Finding, Give, Missed, Rewind, Step
from relatum.following._events import Attached, CaughtUp, Event, Failed, Hole, Replaced
from relatum.following._followed import Followed, Gathering
from relatum.following._helpers import Helpers, Questions
from relatum.following._links import Links
from relatum.following._loop import Loop
from relatum.following._shelf import Held, Shelf, Shelves
from relatum.waiting import Outages, Server

RESUMES_AT: Final = 0.75
"""Part of the bytes that may be held at which reading goes on after a pause."""


class Names(NamedTuple):
    """What following is called where it is told of.

    Attributes:
        all: Following as a whole.
        one: Following of a stream, by its name.
    """

    all: str
    one: Callable[[str], str]


def refuses_login(error: object) -> TypeGuard[RelatumError]:
    """Whether the broker lets nobody in by this login, whatever stream it is about: waiting alone does not cure it."""
    return isinstance(error, AccessRefused | ConfigurationError) and getattr(error, "stream", None) is None


class Desk:
    """The streams that are followed, in the thread that reads.

    Args:
        loop: Its loop.
        questions: The broker, to be asked.
        shelves: What waits for the taker.
        names: What following is called where it is told of: all of it, and that of one stream.
        outages: Who is told of what waits.
        gathering: Told what comes.
        connections_max: Connections that streams are read over at most.
    """

    def __init__(
        self,
        loop: Loop,
        questions: Questions,
        shelves: Shelves,
        *,
        names: Names,
        outages: Outages,
        gathering: Gathering,
        connections_max: int,
    ) -> None:
        self.loop = loop
        self.questions = questions
        self.helpers = Helpers(loop.add_callback)
        self.outages = outages
        self.shelves = shelves
        self.gathering = gathering
        self._names = names
        self.all: dict[int, Followed] = {}
        self._broker = Shelf("", 0)
        self._is_paused = False
        self.is_let_in = True
        """Whether the broker takes its login, as far as it has said."""
        self.links = Links(self, connections_max)

    # --- what is followed ---------------------------------------------------------------------------------------------

    def follow(self, followed: Followed) -> None:
        """Begin with a stream."""
        if not followed.is_over:
            self.all[followed.number] = followed
            self._seat(followed)

    def leave(self, followed: Followed) -> None:
        """End with a stream, whose shelf has ended before."""
        if self.all.pop(followed.number, None) is not None:
            self._unseat(followed)
            self.outages.forget(self._names.one(followed.stream))
            if not self.all:
                # Nothing is waited for any more, and nobody would notice that it is back.
                self.outages.forget(self._names.all)

    def _seat(self, followed: Followed) -> None:
        followed.timer = None
        if not followed.is_over:
            self.links.seat(followed)

    def _unseat(self, followed: Followed) -> None:
        followed.stop_timer()
        followed.round += 1
        for held in followed.course.begin():
            self.shelves.release(held)
        self.links.unseat(followed)

    # --- what the links tell ------------------------------------------------------------------------------------------

    def begins(self, followed: Followed) -> int:
        """Reading of a stream begins: the offset where."""
        course = followed.course
        for held in course.begin():
            self.shelves.release(held)
        course.known = self.shelves.last_of(followed.shelf) or course.known
        course.begin()
        followed.begin()
        return course.start

    def came(self, followed: Followed, held: Held) -> None:
        """Something was read."""
        followed.came(held)
        self.gathering.came(followed, held.bytes)
        if followed.course.follows(held):
            followed.gave()
            if not followed.is_attached:
                self._attached(followed)
            self.shelves.put(followed.shelf, held, is_new=True)
        else:
            self.shelves.hold(held)
            self._go(followed, followed.course.arrived(held))
        self._grant(followed)
        if not self._is_paused and self.shelves.is_full:
            self._pause(True)

    def quiet(self, followed: Followed) -> None:
        """The node has no more of a stream at present."""
        self._go(followed, followed.course.nothing_came())
        if followed.course.is_agreed and not followed.is_quiet:
            followed.is_quiet = True
            self._attached(followed)
            self.put(followed, CaughtUp(followed.stream, followed.number, followed.course.next_offset))

    def failed(self, followed: Followed, error: Exception) -> None:
        """A stream cannot be read now: say so, and try again later."""
        if followed.is_over:
            return
        self._unseat(followed)
        pause_s = followed.pause_after(error)
        self.outages.failed(self._names.one(followed.stream), error)
        self.put(followed, Failed(followed.stream, followed.number, error))
        followed.timer = self.loop.call_later(pause_s, lambda: self._seat(followed))

    def again(self, followed: Followed) -> None:
        """Try again soon to read a stream, which passes: nobody is told."""
        self._unseat(followed)
        pause_s = followed.pause_after(StreamUnavailable("", stream=followed.stream))
        followed.timer = self.loop.call_later(pause_s, lambda: self._seat(followed))

    def away(self, error: Exception) -> None:
        """No stream can be read: the broker is away, or lets nobody in."""
        self.is_let_in = not refuses_login(error)
        if self.all:
            self.outages.failed(self._names.all, error)
        self.shelves.put(self._broker, Failed(None, 0, error))

    def back(self) -> None:
        """The broker is there."""
        self.is_let_in = True
        self.outages.answered(Server.BROKER)
        self.outages.over(self._names.all)

    # --- courses ------------------------------------------------------------------------------------------------------

    def put(self, followed: Followed, item: Event | Held) -> None:
        """Put something on a stream's shelf."""
        self.shelves.put(followed.shelf, item)

    def _attached(self, followed: Followed) -> None:
        if not followed.is_attached:
            followed.is_attached = True
            self.outages.over(self._names.one(followed.stream))
            self.put(followed, Attached(followed.stream, followed.number, followed.course.next_offset))

    def _go(self, followed: Followed, steps: Iterator[Step]) -> None:
        stream, number = followed.stream, followed.number
        for step in steps:
            if followed.course.is_known:
                self._attached(followed)
            if isinstance(step, Give):
                followed.gave()
                self.put(followed, step.held)
            elif isinstance(step, Drop):
                self.shelves.release(step.held)
                followed.free(step.held)
                self._grant(followed)
            elif isinstance(step, Missed):
                self.put(followed, Hole(stream, number, step.from_offset, step.to_offset))
            elif isinstance(step, Rewind):
                self.links.unseat(followed)
                self.links.seat(followed)
            elif isinstance(step, Doubt):
                self._ask(followed, step)
            elif isinstance(step, Differs):
                self._replaced(followed, step)
        if followed.course.is_known:
            self._attached(followed)

    def _ask(self, followed: Followed, doubt: Doubt) -> None:
        begun = followed.round

        def answered(finding: Finding | Exception) -> None:
            if followed.is_over or followed.round != begun:
                return
            if isinstance(finding, Finding):
                self._go(followed, followed.course.answered(finding))
                self._grant(followed)
            else:
                self.failed(followed, finding)

        self.helpers.ask(lambda: self.questions.look(followed.stream, doubt), answered)

    def _replaced(self, followed: Followed, step: Differs) -> None:
        known = followed.course.known
        assert known is not None, "else nothing can differ"
        self._unseat(followed)
        self.all.pop(followed.number, None)
        self.put(followed, Replaced(followed.stream, followed.number, known, step.found, step.bounds))

    # --- what the taker is done with ----------------------------------------------------------------------------------

    def collect(self) -> None:
        """See what the taker was done with: its streams get their next credit."""
        for shelf, done, broken in self.shelves.collect():
            followed = self.all.get(shelf.number)
            if followed is None:
                continue
            for held in done:
                followed.free(held)
            if broken is not None:
                followed.course.next_offset = broken[0]
                self.failed(followed, broken[1])
            elif done and done[-1].round == followed.round:
                self._grant(followed)
        if self._is_paused and self.shelves.is_below(RESUMES_AT):
            self._pause(False)

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self.links.pause(is_paused)

    def _grant(self, followed: Followed) -> None:
        if followed.seat is not None:
            self.links.grant(followed, followed.credit())

    def close(self) -> None:
        """End all connections."""
        self.helpers.close()
        self.links.close()
        self.questions.close()
