"""A stream as one process records it: where it stands, and what comes next. All are changed under one lock."""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from relatum.following import Follower, Hole, Replaced
from relatum.recording._statistics import Progress
from relatum.recording._writer import Writer
from relatum.store.catalog import StreamRow
from relatum.waiting import QUESTION_S, backoff


class Worker(ABC):
    """Does its part of recording in a thread of its own, from `start` until what it was made with says that it ends."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, so many seconds at most; None: for as long as it takes."""
        self._thread.join(timeout_s)

    @abstractmethod
    def _run(self) -> None:
        """Work."""


LOOK_S: Final = 30.0
"""How often a stream is asked where it begins and ends: for the metrics, and to prune what retention dropped."""


class State(Enum):
    """Where a stream stands."""

    NEW = auto()
    """The database is asked next whether it knows the stream."""

    DOUBTED = auto()
    """The database knows it; whether it is this broker's is seen next, or after a pause."""

    ASKED = auto()
    """The follower waits for the broker to say that there is such a stream, and that this user may read it."""

    WANTED = auto()
    """The database knows it; this member does not have it."""

    HELD = auto()
    """This member has it, and opens it next, or after a pause."""

    OPEN = auto()
    """It is followed and recorded."""

    CLOSING = auto()
    """It is followed no more; what was read of it is committed, then comes `Track.after`."""


@dataclass(frozen=True, slots=True)
class PassOver:
    """Go on behind messages that cannot be unpacked here."""

    to_offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """The broker has no such stream, says the error, or it is not to be read: ask until it is."""

    error: Exception


class Then(Enum):
    """What comes after a stream was closed."""

    OPEN = auto()
    """Open it again: other keys are in force, or something failed."""

    RELEASE = auto()
    """Let another member have it."""

    LOST = auto()
    """Another member has it."""


After = Then | Hole | Replaced | PassOver | Missing


class Track:
    """One stream. Changed under the lock of its `Tracks`."""

    def __init__(self, name: str, super_stream: str | None, progress: Progress) -> None:
        self.name = name
        self.super_stream = super_stream
        self.progress = progress
        self.who = f"recording of stream {name!r}"
        """By which name its recording is told to wait."""
        self.state = State.NEW
        self.row: StreamRow | None = None
        self.is_there = False
        """Whether the broker has said that it is a stream, and lets this user read it: only then it gets a row."""
        self.is_ours = False
        """Whether it was seen to be this broker's, or not to be known for another's."""
        self.is_refused = False
        """Whether another member has it, or it could not be recorded, the last time that was tried."""
        self.writer: Writer | None = None
        self.following = 0
        self.after: After = Then.OPEN
        self.was_missing = False
        self.pauses: Iterator[float] = backoff(QUESTION_S)
        self.look_at = next_look()
        self.pruned_to = 0

    def lacks(self, offset: int) -> bool:
        """Whether the offset is not recorded yet, and this process is about to do it."""
        writer = self.writer
        return not self.is_refused if writer is None else writer.recorded_to < offset

    @property
    def left(self) -> int | None:
        """Messages that are not recorded, of those that this process knows of; None where it does not know how many.

        0 also where another process records the stream, or there is no such stream.
        """
        if self.progress.is_standby or self.progress.end == -1:
            return 0
        return self.progress.lag_offsets

    @property
    def is_mine(self) -> bool:
        """Whether this member has it."""
        return self.state in (State.HELD, State.OPEN, State.CLOSING)


def next_look() -> float:
    """When a stream is asked for its ends the next time; those of many streams are spread."""
    return time.monotonic() + LOOK_S * (0.5 + random.random())  # noqa: S311 - nothing secret


class Tracks:
    """All streams of a process, with the lock under which they change."""

    def __init__(self, follower: Follower) -> None:
        self.changed = threading.Condition()
        self._follower = follower
        self._by_name: dict[str, Track] = {}
        self.closed: Callable[[Track], None] = lambda track: None
        """Told of each that was closed; called under the lock."""
        self.woken: Callable[[], None] = lambda: None
        """Told that the database is to be asked about one; called under the lock."""

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def add(self, track: Track) -> None:
        """One more."""
        with self.changed:
            self._by_name[track.name] = track
            self.changed.notify_all()

    def all(self) -> list[Track]:
        """All of them, as they were added."""
        with self.changed:
            return list(self._by_name.values())

    def recorded(self) -> list[tuple[Track, StreamRow, Writer]]:
        """Those that are recorded now."""
        with self.changed:
            return [
                (track, track.row, track.writer)
                for track in self._by_name.values()
                if track.state is State.OPEN and track.row is not None and track.writer is not None
            ]

    def of(self, stream: str, following: int) -> Track | None:
        """The stream that a follower's event is about; None where the event is of an earlier following."""
        track = self._by_name.get(stream)
        return track if track is not None and track.following == following else None

    def ask(self, track: Track) -> None:
        """Have the follower wait for the broker's word of a stream; the lock is held."""
        track.state = State.ASKED
        track.following = self._follower.follow(track.name, 0)

    def found(self, track: Track) -> None:
        """The broker has said that there is such a stream, and that it can be read; the lock is held."""
        track.is_there = True
        if track.state is State.ASKED or track.writer is None:
            self._follower.leave(track.name)
            track.following, track.state = 0, State.NEW
            self.woken()

    def drop(self, name: str) -> None:
        """Forget a name that the broker has said nothing of; a stream's stays."""
        with self.changed:
            track = self._by_name.get(name)
            if track is None or track.row is not None or track.state not in (State.NEW, State.ASKED):
                return
            del self._by_name[name]
            self._follower.leave(name)
            track.state = State.CLOSING  # the keeper may hold it as new

    def close(self, track: Track, after: After) -> None:
        """Read no more of a stream, and commit what was read; the lock is held."""
        if track.state is State.CLOSING:
            if isinstance(after, Then) and after is not Then.OPEN:
                track.after = after
            return
        if isinstance(after, Missing):
            # The follower goes on asking for it.
            track.is_there = False
        else:
            self._follower.leave(track.name)
            track.following = 0
        track.state, track.after = State.CLOSING, after
        writer = track.writer
        if writer is None:
            self.closed(track)
        else:
            writer.finish()
