"""How far one stream is followed, and whether it is still the one that is known. Pure.

Where something is known of a stream, reading begins at that message and not behind it: the first thing that is read
says whether it is the same stream, with no question of its own. What is read can prove that it is (the message lies
there) or that it is not (another one does). All else is doubt, and whoever leads the stream is asked:

- nothing comes, or only what lies before: the node lags behind, or the stream lost its end, or was declared anew;
- it begins behind what is known, or behind what was to be read next: retention took it, or the stream has a gap in
  good health, or is another one.

While an answer is awaited, what comes waits.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from relatum.following._shelf import Held
from relatum.reading import Agreement, Position, StreamBounds, position_of


@dataclass(frozen=True, slots=True)
class Give:
    """Give it to the taker."""

    held: Held


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing of it is wanted."""

    held: Held


@dataclass(frozen=True, slots=True)
class Missed:
    """Retention has taken what lay between two offsets."""

    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Differs:
    """The stream is not the one that is known."""

    found: Agreement
    bounds: StreamBounds | None


@dataclass(frozen=True, slots=True)
class Rewind:
    """The stream is the one that is known, by a message behind what is wanted next: begin again, there."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """To be asked: how the stream stands to what is known, and where it begins.

    Attributes:
        known: What it is compared with; None where it has agreed already.
        is_end: Whether its begin need not be asked for.
    """

    known: Position | None
    is_end: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to a `Doubt`."""

    agreement: Agreement | None
    bounds: StreamBounds | None


Step = Give | Drop | Missed | Differs | Doubt | Rewind


class Course:
    """One stream from an offset on.

    Args:
        next_offset: The first offset that is wanted.
        known: A message that was read of it.

    Attributes:
        next_offset: What was given ends before it.
        known: The last message that is known, to be found again after a break.
        is_agreed: Whether the stream was seen to be the one that is known since reading began.
    """

    def __init__(self, next_offset: int, known: Position | None) -> None:
        self.next_offset = next_offset
        self.known = known
        self.is_agreed = self._is_vouched = False
        self._is_asking = False
        self._is_over = False
        self._waiting: deque[Held] = deque()

    @property
    def is_known(self) -> bool:
        """Whether the stream is the one that is known: as far as it was read, or by the word of its leader."""
        return self.is_agreed or self._is_vouched

    @property
    def start(self) -> int:
        """The offset to begin to read at."""
        return self.next_offset if self.known is None else self.known.offset

    def begin(self) -> list[Held]:
        """Reading begins, for the first time or after a break; what had waited is read again, and not wanted here."""
        waiting, self._waiting = list(self._waiting), deque()
        self._is_vouched = self._is_asking = self._is_over = False
        self.is_agreed = self.known is None
        return waiting

    def follows(self, held: Held) -> bool:
        """Whether it is just what comes next, of a stream that is known and of which nothing waits; it is given then.

        Nearly all that is read is: there is nothing to judge.
        """
        if held.first_offset != self.next_offset or not self.is_agreed or self._waiting:
            return False
        if self._is_asking or self._is_over:
            return False
        held.begin = self.next_offset
        self.next_offset = held.last_offset + 1
        return True

    def arrived(self, held: Held) -> Iterator[Step]:
        """Something was read; offsets ascend."""
        self._waiting.append(held)
        return self._go_on()

    def nothing_came(self) -> Iterator[Step]:
        """The node has nothing more at present."""
        if not self.is_agreed and not self._is_vouched and not self._is_asking and not self._is_over:
            yield from self._ask(is_end=True)

    def answered(self, finding: Finding) -> Iterator[Step]:
        """A doubt was asked about."""
        self._is_asking = False
        if self._is_over:
            return
        if finding.agreement in (Agreement.OTHER, Agreement.ENDS_BEFORE):
            yield from self._end(finding.agreement, finding.bounds)
            return
        if self._waiting and not self._is_before():
            # What came lies behind a gap, or has none where it is known: the broker has said now what that is.
            self.is_agreed = True
            first, begin = self._waiting[0].first_offset, finding.bounds and finding.bounds.first
            if begin is not None and begin > self.next_offset and first > self.next_offset:
                yield Missed(self.next_offset, first)
            self.next_offset = max(self.next_offset, first)
        elif finding.agreement is Agreement.EXPIRED:
            self.is_agreed = True
        else:
            self._is_vouched = True
        yield from self._go_on()

    def _is_before(self) -> bool:
        """Whether what waits first lies before what is known."""
        known = self.known
        return not self.is_agreed and known is not None and self._waiting[0].last_offset < known.offset

    def _go_on(self) -> Iterator[Step]:
        while self._waiting and not self._is_asking and not self._is_over:
            held = self._waiting[0]
            if not self.is_agreed:
                yield from self._compare(held)
            elif held.last_offset < self.next_offset:
                yield Drop(self._waiting.popleft())
            elif held.first_offset > self.next_offset:
                yield from self._ask(is_end=False)
            else:
                self._waiting.popleft()
                held.begin = self.next_offset
                self.next_offset = held.last_offset + 1
                yield Give(held)

    def _compare(self, held: Held) -> Iterator[Step]:
        known = self.known
        assert known is not None, "else there is nothing to agree with"
        if held.last_offset < known.offset:
            yield Drop(self._waiting.popleft())
            if not self._is_vouched:
                yield from self._ask(is_end=True)
            return
        lying = held.at(known.offset) if held.first_offset <= known.offset else None
        if lying is None:
            yield from self._ask(is_end=False)
            return
        found = position_of(lying)
        if not known.agrees(found.fingerprint, found.chunk_ms):
            yield from self._end(Agreement.OTHER, None)
        elif known.offset < self.next_offset:
            self.is_agreed = True
        else:
            self.known = None
            self._is_over = True
            yield Rewind()

    def _end(self, found: Agreement, bounds: StreamBounds | None) -> Iterator[Step]:
        self._is_over = True
        yield Differs(found, bounds)

    def _ask(self, *, is_end: bool) -> Iterator[Step]:
        self._is_asking = True
        yield Doubt(None if self.is_agreed else self.known, is_end)
