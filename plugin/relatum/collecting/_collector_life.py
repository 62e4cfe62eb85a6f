"""The life of a collector, the same behind both faces: threads that begin together and end in order."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from relatum import metrics
from relatum.collecting._bulk import Collected
from relatum.collecting._collector_base import Collector, ExecutorT
from relatum.collecting._collector_core import Verdict
from relatum.collecting._following import Following
from relatum.collecting._shared import Shared, logger
from relatum.collecting._workers import Worker
from relatum.errors import AccessRefused, NotAStream, StreamNotFound, Transient
from relatum.reading import StreamReader
from relatum.store.members import renewal_s
from relatum.waiting import log_failure

TAKE_OVER_S: Final = 1.0
"""How often messages of members that died are looked for."""

TAKE_OVER_MESSAGES: Final = 1000
"""Messages taken over in one transaction."""

PARTITIONS_S: Final = 30.0
"""How often super streams are asked for new partitions."""

GATHER_MESSAGES: Final = 500
"""Messages that are stored in one transaction, where workers have bulks in the meantime."""

GATHER_S: Final = 0.02
"""How long they are waited for, at most."""

WAIT_S: Final = 1.0
"""How often a thread that waits for a change looks up; nothing depends on it."""


def store_until_end(shared: Shared) -> None:
    """Store what is gathered, again and again: while one lot is committed, the next one is gathered."""
    while True:
        with shared.changed:
            while not shared.intake.is_anything_gathered:
                if shared.input_ended or shared.abandoned.is_set():
                    return
                shared.changed.wait(WAIT_S)
            _let_gather(shared)
            lots = shared.intake.next()
        for gathered in lots:
            shared.store_gathered(gathered)


def _let_gather(shared: Shared) -> None:
    """Let more come into one transaction while no worker waits for it; the lock is held."""
    until = time.monotonic() + GATHER_S
    while shared.core.has_waiting_bulks and shared.intake.gathered < GATHER_MESSAGES and not shared.stopping.is_set():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        shared.changed.wait(left_s)


def tick_until_end(shared: Shared) -> None:
    """Close bulks when their time has come, and begin retries."""
    with shared.changed:
        while not shared.abandoned.is_set():
            now = time.monotonic()
            if shared.core.tick(now):
                shared.changed.notify_all()
            deadline = shared.core.deadline()
            shared.changed.wait(WAIT_S if deadline is None else max(0.0, min(WAIT_S, deadline - now)))


def keep_until_end(shared: Shared, lease_s: float) -> None:
    """Renew the lease, and take over messages of members whose lease has lapsed."""
    who, renewed_at = shared.who("keeping its lease"), time.monotonic()
    while not shared.abandoned.wait(min(TAKE_OVER_S, renewal_s(lease_s))):
        now = time.monotonic()
        try:
            if now - renewed_at >= renewal_s(lease_s):
                _renew(shared, lease_s)
                renewed_at = now
            if shared.reach is not None:
                shared.reach.look()
            has_asked = not shared.is_cut_off and take_over(shared)
        except Exception as error:  # noqa: BLE001 - it is tried again; the lease lapses where it must
            shared.outages.failed(who, error)
        else:
            if has_asked:
                shared.outages.over(who)


def look_until_end(shared: Shared, look: Callable[[], None]) -> None:
    """Look for new partitions, beside what keeps the lease: a broker that does not answer must not hold that up."""
    who = shared.who("looking for partitions")
    while not shared.stopping.wait(PARTITIONS_S):
        try:
            look()
        except Exception as error:  # noqa: BLE001 - it is tried again
            shared.outages.failed(who, error)
        else:
            shared.outages.over(who)


def _renew(shared: Shared, lease_s: float) -> None:
    if not shared.store.renew(shared.member):
        # Another member took all there was. What is still in memory is found to be another's when it is stored.
        logger.info("collector %r: the lease had run out, joining anew", shared.store.name)
        shared.member = shared.store.open(shared.core.types, lease_s)


def take_over(shared: Shared) -> bool:
    """Take over what members that died have left, as far as there is room; False where nobody was asked."""
    while True:
        with shared.changed:
            room, types = shared.core.room_for_entries(TAKE_OVER_MESSAGES), shared.core.types_with_room()
        if not room or not types:
            return False
        entries = shared.store.take_over(shared.member, types, room)
        if not entries:
            return True
        text = "collector %r: %d messages of members that ended are taken over"
        logger.info(text, shared.store.name, len(entries), extra={"messages": len(entries)})
        with shared.changed:
            shared.core.adopt(entries, time.monotonic())
            shared.changed.notify_all()


END_S: Final = 5.0
"""Seconds to leave, after that: a database that does not answer is let go."""

CLOSE_S: Final = 30.0
"""Seconds `close` waits by default."""

LOOK_S: Final = 0.25
"""How often whoever waits for threads looks whether that was given up; nothing depends on it."""


class CollectorLife(Collector[ExecutorT]):
    """What the faces of a collector begin and end, and what they wait for.

    Args: as for `MessageCollector`.
    """

    _unwinding_s: float = 0.0
    """Seconds to wait for executors that were not done in time: they may be told to end."""

    def _current(self) -> threading.Thread:
        """The thread that runs now, or for which what runs now is done."""
        return threading.current_thread()

    # --- messages in ----------------------------------------------------------------------------------------------

    def _offer(self, described: Sequence[Collected], taken: list[bool]) -> bool:
        """Take messages as far as there is room, under the lock; whether that is all of them."""
        shared, before = self._shared, len(taken)
        for message in described[before:]:
            verdict = shared.intake.collect(message, time.monotonic())
            if verdict is Verdict.WAIT:
                break
            taken.append(verdict in (Verdict.TAKEN, Verdict.KNOWN))
        if len(taken) > before:
            shared.changed.notify_all()
        return len(taken) == len(described)

    def _refuse(self, taken: list[bool]) -> None:
        """Refuse the next message: there was no room for it in time."""
        with self._shared.changed:
            self._shared.intake.refused += 1
        taken.append(False)

    def _may_flush(self, mark: int) -> bool:
        """Whether all is stored that had been taken at a mark, or never will be; under the lock."""
        shared = self._shared
        # A handler that the storing waits for must not wait for it.
        return self._is_storer() or shared.intake.is_stored_to(mark) or shared.abandoned.is_set()

    def _flush(self, type_: str | None) -> None:
        self._shared.core.flush(type_)
        self._shared.changed.notify_all()

    def _is_storer(self) -> bool:
        """Whether what runs now is a handler of the thread that stores: it must not wait for what it does itself."""
        return bool(self._keepers) and self._current() is self._keepers[0]

    # --- its beginning --------------------------------------------------------------------------------------------

    def _join_members(self) -> list[str]:
        """Become a member; gives the streams to follow. Where it raises, nothing is left of it."""
        shared = self._shared
        try:
            self._check_dead_letters()
            names = self._find_streams()
            self._check_streams(names)
            shared.member = shared.store.open(shared.core.types, self._lease_s)
        except BaseException:
            shared.store.dispose()
            raise
        return names

    def _begin(self, names: list[str]) -> None:
        """Start all threads; it waits for nothing."""
        shared = self._shared
        self._is_started = True
        for type_, executor in self._executors.items():
            options = shared.core.options_of(type_)
            open_reader = None if self._address is None else self._open_reader
            for _ in range(options.workers):
                worker = Worker(
                    shared, type_, options, executor, open_reader=open_reader, dead_letters=self._dead_letters
                )
                self._workers.append(worker.thread)
                worker.thread.start()
        self._keep("storer", lambda: store_until_end(shared))
        self._keep("ticker", lambda: tick_until_end(shared))
        self._keep("keeper", lambda: keep_until_end(shared, self._lease_s))
        self._follow(names)
        if names:
            self._keep("looker", lambda: look_until_end(shared, self._look))

    def _keep(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"relatum-{self.name}-{name}", daemon=True)
        self._keepers.append(thread)
        thread.start()

    def _check_dead_letters(self) -> None:
        if self._dead_letters is None:
            return
        with self._open_reader() as reader:
            try:
                reader.bounds(self._dead_letters.stream)
            except NotAStream:
                logger.info("dead letters go to %r, which is a queue", self._dead_letters.stream)

    def _open_reader(self) -> StreamReader:
        assert self._address is not None, "only what has a broker is read"
        return StreamReader.open(self._address)

    def _find_streams(self) -> list[str]:
        """The streams to follow: those named, or the partitions where the name is a super stream's."""
        if self._plain.issuperset(self._streams):
            return self._checked_followed(list(self._streams))
        with self._open_reader() as reader:
            found: list[str] = []
            for name in self._streams:
                if name in self._plain:
                    found.append(name)
                    continue
                partitions = reader.partitions(name)
                found += partitions or [name]
                if not partitions and reader.routes("", name) != []:
                    # A stream is no super stream: asked once, since the broker logs an error each time.
                    self._plain.add(name)
        return self._checked_followed(found)

    def _check_streams(self, names: Sequence[str]) -> None:
        """Refuse what never becomes a stream; one that is missing, or away, is waited for when it is followed."""
        if not names:
            return
        with self._open_reader() as reader:
            for name in names:
                with suppress(Transient, StreamNotFound, AccessRefused):
                    # What is a stream needs no second look; what is none is told apart by the other question.
                    if reader.routes("", name) == []:
                        reader.bounds(name)

    def _look(self) -> None:
        self._follow(self._find_streams())

    def _follow(self, names: list[str]) -> None:
        if names and self._following is None:
            assert self._address is not None, "streams are followed on a broker"
            self._following = Following(self._shared, self._address, self._type_of, self._initial)
            self._shared.reach = self._following.reach
        if self._following is not None:
            self._following.add(names)

    # --- its end --------------------------------------------------------------------------------------------------

    def _is_own(self) -> bool:
        """Whether what runs now is an executor or a handler, for which closing would wait."""
        return self._current() in self._threads()

    def _threads(self) -> list[threading.Thread]:
        return [*self._readers(), *self._workers, *self._keepers]

    def _readers(self) -> list[threading.Thread]:
        return [] if self._following is None else [self._following.thread]

    def _close_behind(self, timeout_s: float) -> None:
        """Close it in a thread of its own, for whom it cannot wait."""
        threading.Thread(target=self._close, args=(timeout_s,), name=f"relatum-{self.name}-closer", daemon=True).start()

    def _close(self, timeout_s: float) -> bool:
        """Stop in order; whether all was done in time. It ends early where `abandon` is called meanwhile."""
        until = time.monotonic() + timeout_s
        self._is_closing = True
        with self._closing:
            if not self._is_closed:
                self._in_time = self._end(until)
                self._is_closed = True
            return self._in_time

    def _end(self, until: float) -> bool:
        shared = self._shared
        shared.stop()
        self._joined(self._readers(), until)
        shared.input_ended = True
        shared.notify()
        in_time = self._joined(self._workers, until) and not shared.abandoned.is_set()
        self._abandon()
        unwound = time.monotonic() + self._unwinding_s
        for thread in self._workers:
            thread.join(max(0.0, unwound - time.monotonic()))
        ended = time.monotonic() + END_S
        for thread in [*self._readers(), *self._keepers]:
            thread.join(max(0.0, ended - time.monotonic()))
        self._leave()
        return in_time

    def _abandon(self) -> None:
        """Wait for nobody any more."""
        self._shared.abandon()
        self._shared.store.end_in(END_S)

    def _joined(self, threads: Iterable[threading.Thread], until: float) -> bool:
        """Wait for threads up to a moment, or until the collector is abandoned; whether all ended."""
        all_ended = True
        for thread in threads:
            while thread.is_alive() and not self._shared.abandoned.is_set() and time.monotonic() < until:
                thread.join(max(0.0, min(LOOK_S, until - time.monotonic())))
            all_ended &= not thread.is_alive()
        return all_ended

    def _leave(self) -> None:
        """Let others take over, and let go of all servers."""
        try:
            self._shared.store.close(self._shared.member)
        except Transient as error:
            # The lease lapses by itself.
            log_failure(logger, error, self._shared.who("leaving") + " its lease not given back", level=logging.INFO)
        if self._dead_letters is not None:
            self._dead_letters.close()
        self._shared.store.dispose()
        metrics.retire(self._shared)
