"""What is common to both transports: courses are followed, doubts are asked about, failures are told and repeated."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol, TypeGuard

from relatum.errors import AccessRefused, ConfigurationError, RelatumError, StreamUnavailable
from relatum.following._course import Differs, Doubt, Drop, Finding, Give, Missed, Rewind, Step
from relatum.following._events import Attached, CaughtUp, Event, Failed, Hole, Replaced
from relatum.following._followed import Followed
from relatum.following._gathering import Gathering
from relatum.following._held import Held
from relatum.following._helpers import Helpers, Questions
from relatum.following._loop import Loop
from relatum.following._shelf import Shelf, Shelves
from relatum.waiting import Outages, Pauses, Server

RESUMES_AT: Final = 0.75
"""Part of the bytes that may be held at which reading goes on after a pause."""

RETURN_S: Final = 30.0
"""Seconds after which the stream protocol is tried again where AMQP 0.9.1 is used in its place."""


class Names(NamedTuple):
    """What following is called where it is told of.

    Attributes:
        all: Following as a whole.
        one: Following of a stream, by its name.
    """

    all: str
    one: Callable[[str], str]


class Transport(Protocol):
    """How streams are read."""

    @property
    def connections(self) -> int:
        """How many there are."""

    def seat(self, followed: Followed) -> None:
        """Begin to read a stream, once there is a connection; `Desk.begins` says where."""

    def unseat(self, followed: Followed) -> None:
        """Read a stream no more."""

    def grant(self, followed: Followed, credit: int, held: Held | None) -> None:
        """Let so much more come of a stream, of which something is held no more."""

    def pause(self, is_paused: bool) -> None:
        """Read nothing for now, or again."""

    def close(self) -> None:
        """End all connections."""


def no_room(waiting: int, connections_max: int) -> ConfigurationError:
    """The error of streams for which there is no room on the connections that may be opened."""
    return ConfigurationError(
        f"{waiting} more streams need more than connections_max={connections_max} connections to the broker: divide "
        "the streams among more processes"
    )


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
        transports: The transports, by the names that readers have for them.
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
        transports: "Mapping[str, Callable[[Desk], Transport]]",
    ) -> None:
        self.loop = loop
        self.questions = questions
        self.helpers = Helpers(loop.add_callback)
        self.outages = outages
        self.shelves = shelves
        self.gathering = gathering
        self._names = names
        self._transports = transports
        self.transport: Transport | None = None
        self.name: Literal["stream", "amqp"] | None = None
        self.all: dict[int, Followed] = {}
        self._broker = Shelf("", 0)
        self._is_choosing = self._is_paused = False
        self.is_let_in = True
        """Whether the broker takes its login, as far as it has said."""
        self._pauses = Pauses()

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
        if self.transport is None:
            self.choose()
        elif not followed.is_over:
            self.transport.seat(followed)

    def _unseat(self, followed: Followed) -> None:
        followed.stop_timer()
        followed.round += 1
        for held in followed.course.begin():
            self.shelves.release(held)
        if self.transport is not None:
            self.transport.unseat(followed)

    def choose(self) -> None:
        """Find out by which transport streams are read, and begin with all that are followed."""
        if not self._is_choosing:
            self._is_choosing = True
            self.helpers.ask(lambda: self.questions.reader().transport, self._chosen)

    def _chosen(self, name: Literal["stream", "amqp"] | Exception) -> None:
        self._is_choosing = False
        if isinstance(name, Exception):
            self.away(name)
            self.loop.call_later(self._pauses.after(name), self.choose)
            return
        self._pauses = Pauses()
        self.name = name
        self.transport = transport = self._transports[name](self)
        if name != "stream" and self.questions.address.stream_port is not None:
            self.loop.call_later(RETURN_S, self._try_streams)
        for followed in list(self.all.values()):
            if followed.timer is None:
                transport.seat(followed)

    def change_transport(self) -> None:
        """Find out anew which transport answers: what is read now ends, and is begun again by it."""
        before, self.transport = self.transport, None
        for followed in self.all.values():
            followed.seat = followed.subscription = None
        if before is not None:
            before.close()
        self.choose()

    def _try_streams(self) -> None:
        def tried(is_back: bool | Exception) -> None:
            if is_back is True:
                self.change_transport()
            elif self.name != "stream":
                self.loop.call_later(RETURN_S, self._try_streams)

        if self.name != "stream":
            self.helpers.ask(self.questions.by_streams_again, tried)

    # --- what the transport tells -------------------------------------------------------------------------------------

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
        self._grant(followed, None)
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
                self._grant(followed, step.held)
            elif isinstance(step, Missed):
                self.put(followed, Hole(stream, number, step.from_offset, step.to_offset))
            elif isinstance(step, Rewind):
                assert self.transport is not None, "it has read something"
                self.transport.unseat(followed)
                self.transport.seat(followed)
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
                self._grant(followed, None)
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
                self._grant(followed, done[-1])
        if self._is_paused and self.shelves.is_below(RESUMES_AT):
            self._pause(False)

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if self.transport is not None:
            self.transport.pause(is_paused)

    def _grant(self, followed: Followed, held: Held | None) -> None:
        if followed.seat is not None and self.transport is not None:
            self.transport.grant(followed, followed.credit(), held)

    def close(self) -> None:
        """End all connections."""
        self.helpers.close()
        if self.transport is not None:
            self.transport.close()
        self.questions.close()
