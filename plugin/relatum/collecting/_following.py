"""The thread that follows all streams of a collector: what comes of them goes to where each stands."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from relatum.collecting._bulk import id_of, id_of_place
from relatum.collecting._collector_core import Followed
from relatum.collecting._intake import TypeOf
from relatum.collecting._shared import Shared, log_defect, logger
from relatum.collecting._streams import Begin, CollectedStream, FindAgain, Question
from relatum.errors import OffsetExpired, OffsetNotFound
from relatum.following import Event, Follower, Helpers, Reach
from relatum.ids import MessageId
from relatum.reading import BrokerAddress, Message, StreamBounds, StreamReader, ends_of_known

STANDBY_S: Final = 1.0
"""How often a member asks which of the streams that others followed became free: once for all of them."""

WAIT_S: Final = 1.0
"""How often the thread looks up with nothing to do; nothing depends on it."""


class Following:
    """Follows a collector's streams, over one follower, in one thread; what has to be asked is asked beside it.

    A stream that waits, for room, for an answer, for another member, is waited for by nobody else.
    """

    def __init__(
        self, shared: Shared, address: BrokerAddress, type_of: TypeOf, initial: Callable[[StreamBounds], int]
    ) -> None:
        self._shared = shared
        self._type_of = type_of
        self._initial = initial
        self._wake = threading.Event()
        self._follower = Follower(address, ready=self._wake.set)
        self._helpers = Helpers(self._tell, f"relatum-{shared.store.name}-asks")
        self.reach = Reach(self._follower, shared.outages, lambda: next(iter(self._streams)))
        self._told: deque[Callable[[], None]] = deque()
        self._streams: dict[str, CollectedStream] = {}
        self._stirred: set[CollectedStream] = set()
        """Those that have something to do, or did not get on."""
        self._resting: set[CollectedStream] = set()
        """Those that have something to do at a time."""
        self._seen = (0, False, False)
        self._ask_at = 0.0
        """When to ask which streams became free; infinite while that is being asked."""
        with shared.changed:
            shared.changed.listeners.append(self._wake.set)
        self.thread = threading.Thread(target=self._run, name=f"relatum-{shared.store.name}-following", daemon=True)
        self.thread.start()

    def add(self, names: Iterable[str]) -> None:
        """Follow these streams, too."""
        self._tell(partial(self._add, list(names)))

    def _tell(self, what: Callable[[], None]) -> None:
        self._told.append(what)
        self._wake.set()

    def _add(self, names: list[str]) -> None:
        for name in names:
            if name not in self._streams:
                stream = CollectedStream(self._shared, name, self._follower, self._type_of)
                self._streams[name] = stream
                self._stirred.add(stream)

    # --- its rounds -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._follower:
            while not self._is_done():
                try:
                    self._round()
                except Exception as error:  # noqa: BLE001 - no defect may end it for all streams
                    log_defect(error, self._shared.who("following its streams"))
                    self._shared.stopping.wait(WAIT_S)
        self._helpers.close()
        self.reach.close()
        with self._shared.changed:
            self._shared.changed.listeners.remove(self._wake.set)

    def _is_done(self) -> bool:
        """Whether the collector stops, all streams are others' to follow, and nothing is being asked."""
        if self._shared.abandoned.is_set():
            return True
        is_resting = self._ask_at < math.inf and all(each.is_resting for each in self._streams.values())
        return is_resting and self._shared.stopping.is_set()

    def _round(self) -> None:
        self._wake.clear()
        while self._told:
            self._told.popleft()()
        events = self._follower.take(0.0)
        for event in events:
            self._sort(event)
        now = time.monotonic()
        self._look(now)
        stirred, self._stirred = self._stirred | {each for each in self._resting if each.due_at <= now}, set()
        for stream in stirred:
            self._step(stream, now)
        if not events:
            due_at = min((each.due_at for each in self._resting), default=now + WAIT_S)
            self._wake.wait(max(0.0, min(WAIT_S, due_at - now)))

    def _sort(self, event: Event) -> None:
        """Give an event to whom it is about: all streams, where it names none."""
        streams = self._streams.values() if event.stream is None else [self._streams[event.stream]]
        for stream in streams:
            stream.came(event)
            self._stirred.add(stream)

    def _look(self, now: float) -> None:
        """See what has changed for streams that nothing came of."""
        shared = self._shared
        seen = shared.member, shared.stopping.is_set(), shared.is_cut_off
        if now >= self._ask_at and not shared.stopping.is_set() and any(each.is_standing_by for each in self._resting):
            self._ask_at = math.inf
            self._helpers.ask(partial(shared.store.held, shared.member), self._held)
        if seen != self._seen:
            self._seen = seen
            self._stirred.update(self._streams.values())
        if shared.intake.lost_streams:
            with shared.changed:
                lost = dict(shared.intake.lost_streams)
                shared.intake.lost_streams.clear()
            for name, error in lost.items():
                self._streams[name].lost(error)
                self._stirred.add(self._streams[name])

    def _held(self, held: frozenset[str] | Exception) -> None:
        """Ask for those that nobody else follows; where that cannot be said, for all: it is said why, then."""
        self._ask_at = time.monotonic() + STANDBY_S
        for stream in self._resting:
            if stream.is_standing_by and (isinstance(held, Exception) or stream.name not in held):
                stream.freed()

    def _step(self, stream: CollectedStream, now: float) -> None:
        try:
            question = stream.step(now)
        except Exception as error:  # noqa: BLE001 - whatever it was, the stream is followed again
            stream.failed(error, now)
        else:
            if question is not None:
                self._helpers.ask(partial(self._answer, stream, question), partial(self._answered, stream, question))
        (self._resting.add if stream.is_resting else self._resting.discard)(stream)
        if stream.is_waiting:
            self._stirred.add(stream)

    def _answered(self, stream: CollectedStream, question: Question, answer: object) -> None:
        stream.answered(question, answer, time.monotonic())
        self._stirred.add(stream)

    # --- what is asked, in threads of the helpers -----------------------------------------------------------------

    def _answer(self, stream: CollectedStream, question: Question) -> object:
        if isinstance(question, Begin):
            return self._begin(stream.name, question)
        if isinstance(question, FindAgain):
            self._find_again(stream.name, question.member)
        else:
            self._shared.store.unfollow(question.member, stream.name)
        return None

    def _begin(self, stream: str, question: Begin) -> tuple[int, Followed | None]:
        initial = question.initial
        if initial is None:
            initial = self._initial(self._follower.reader().bounds(stream))
        return initial, self._shared.store.follow(question.member, stream, initial)

    def _find_again(self, stream: str, member: int) -> None:
        """Go on behind the last message that is as it was collected; from the stream's beginning where none is."""
        store, reader = self._shared.store, self._follower.reader()
        bounds = ends_of_known(reader, stream)
        agreed = self._last_agreed(reader, stream, bounds)
        if agreed is None:
            store.begin_anew(member, stream, bounds.first or 0)
            return
        text, extra = "collector %r: stream %r has lost its end: gone on with behind offset %d", {"stream": stream}
        logger.warning(text, store.name, stream, agreed, extra={**extra, "agreed": agreed})
        store.cut_back(member, stream, agreed)

    def _last_agreed(self, reader: StreamReader, stream: str, bounds: StreamBounds) -> int | None:
        """The offset of the last collected message that lies in the stream as it was collected; None where none does.

        Found by halving: what agrees is a prefix. A message agrees by its own `message_id`; one without speaks for
        nothing.
        """
        if bounds.first is None or bounds.last is None:
            return None
        agreed: int | None = None
        low, high = bounds.first, bounds.last
        middle = high
        while low <= high:
            row = self._shared.store.last_collected(stream, middle)
            if row is None or row[0] < low:
                low = middle + 1
            elif _is_there(reader, MessageId(stream, row[0]), row[1]):
                agreed, low = row[0], middle + 1
            else:
                high = row[0] - 1
            middle = (low + high) // 2
        return agreed


def _is_there(reader: StreamReader, place: MessageId, message_id: str) -> bool:
    """Whether the message of that id lies there."""
    (found,) = reader.read_all([place])
    if isinstance(found, Message):
        return id_of(found) == message_id != id_of_place(place)
    if isinstance(found, OffsetExpired) or (isinstance(found, OffsetNotFound) and found.is_proven):
        return False
    raise found
