"""The life of a collector, the same behind both faces: it joins the members, its loop begins, and ends in order."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final, TypeVar

from relatum import metrics
from relatum.collecting._collector_base import Collector, ExecutorT
from relatum.collecting._consuming import BulkConsumer
from relatum.collecting._following import Following
from relatum.collecting._handlers import call_of, logger
from relatum.errors import AccessRefused, NotAStream, StreamNotFound, Transient
from relatum.reading import StreamReader
from relatum.waiting import log_failure

PARTITIONS_S: Final = 30.0
"""How often super streams are asked for new partitions."""

CLOSE_S: Final = 30.0
"""Seconds `close` waits by default."""

JOIN_S: Final = 1.0
"""Seconds to wait for threads that have ended but for one that a server still holds."""

T = TypeVar("T")


class CollectorLife(Collector[ExecutorT]):
    """What the faces of a collector begin and end.

    Args: as for `MessageCollector`.
    """

    _unwinding_s: float = 0.0
    """Seconds to wait for executors that were not done in time: they may be told to end."""

    # --- its beginning ------------------------------------------------------------------------------------------------

    def _join_members(self) -> list[str]:
        """Become a member; gives the streams to follow. Where it raises, nothing is left of it."""
        shared = self._shared
        try:
            self._check_dead_letters()
            names = self._find_streams()
            self._check_streams(names)
            shared.member = shared.store.open(shared.core.types, shared.lease_s)
        except BaseException:
            shared.store.dispose()
            raise
        return names

    def _begin(self, names: list[str]) -> None:
        """Start its loop; it waits for nothing."""
        shared = self._shared
        self._is_started = True
        open_reader = None if self._address is None else self._open_reader
        for type_, executor in self._executors.items():
            options, letters = shared.core.options_of(type_), self._dead_letters
            shared.workers[type_] = BulkConsumer(
                shared, type_, options, executor, open_reader=open_reader, dead_letters=letters
            )
        if names:
            assert self._address is not None, "streams are followed on a broker"
            shared.following = Following(shared, self._address, self._type_of, self._initial)
        shared.loop.start()
        shared.loop.call(self._begin_in_loop, names)

    def _begin_in_loop(self, names: list[str]) -> None:
        shared = self._shared
        shared.begin()
        if shared.following is not None:
            shared.following.open()
            shared.following.add(names)
            shared.loop.call_later(PARTITIONS_S, self._begin_to_look)

    def _begin_to_look(self) -> None:
        shared = self._shared
        if not shared.is_stopping:
            shared.loop.repeat(self._look_on, shared.who("looking for partitions"), shared.outages)

    async def _look_on(self) -> float:
        await self._shared.loop.ask(self._look)
        return PARTITIONS_S

    def _look(self) -> None:
        """Follow new partitions, too."""
        names, following = self._find_streams(), self._shared.following
        assert following is not None, "what follows streams looks for them"
        self._shared.loop.call(following.add, names)

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

    # --- called from outside its loop ---------------------------------------------------------------------------------

    @property
    def _is_own(self) -> bool:
        """Whether what runs now is an executor or a handler of its own, for which closing would wait."""
        return call_of(self._shared) is not None

    @property
    def _is_storer(self) -> bool:
        """Whether what runs now is a handler of `collected`: it must not wait for what is stored after it."""
        call = call_of(self._shared)
        return call is not None and call.is_storing

    def _refused(self, count: int) -> list[bool]:
        """The answers of a collector whose loop has ended."""
        self._shared.intake.refused += count
        return [False] * count

    def _result_of(self, function: Callable[..., Any], *args: Any, otherwise: Callable[[], T]) -> T:
        """Call a coroutine function in the loop and wait for its result; `otherwise` where the loop has ended."""
        result = self._shared.loop.run(function, *args)
        if result is None:
            return otherwise()
        try:
            answer: T = result.result()
        except CancelledError:
            return otherwise()
        except BaseException:
            # As Ctrl-C: nobody waits any more.
            result.cancel()
            raise
        return answer

    # --- its end ------------------------------------------------------------------------------------------------------

    def _close_behind(self, timeout_s: float) -> None:
        """Close it without waiting."""
        self._shared.loop.run(self._shared.close, timeout_s, self._unwinding_s, self._leave)

    def _close(self, timeout_s: float) -> bool:
        """Stop in order; whether all was done in time."""
        shared = self._shared
        self._result_of(shared.close, timeout_s, self._unwinding_s, self._leave, otherwise=lambda: None)
        shared.joined(JOIN_S)
        return shared.in_time

    def _leave(self) -> None:
        """Let others take over, and let go of all servers."""
        shared = self._shared
        try:
            shared.store.close(shared.member)
        except Transient as error:
            # The lease lapses by itself.
            log_failure(logger, error, shared.who("leaving") + " its lease not given back", level=logging.INFO)
        if self._dead_letters is not None:
            self._dead_letters.close()
        for worker in shared.workers.values():
            worker.close()
        shared.store.dispose()
        metrics.retire(shared)
