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
from relatum.collecting._keeping import keep_until_end, look_until_end, store_until_end, tick_until_end
from relatum.collecting._shared import logger
from relatum.collecting._workers import Worker
from relatum.errors import AccessRefused, NotAStream, StreamNotFound, Transient
from relatum.reading import StreamReader
from relatum.waiting import log_failure

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
