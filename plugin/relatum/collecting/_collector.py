"""The message collector, with threads."""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from relatum.checks import checked_event, checked_name, checked_seconds
from relatum.collecting._async_executing import is_coroutine_function
from relatum.collecting._bulk import Executor
from relatum.collecting._collector_base import Collector
from relatum.collecting._collector_core import Verdict
from relatum.collecting._collector_options import (
    CollectorLimits,
)
from relatum.collecting._collector_state import logger
from relatum.collecting._feed import Feed
from relatum.collecting._following import CollectedStream
from relatum.collecting._handlers import Handler
from relatum.collecting._keeping import keep_until_end, look_until_end, store_until_end, tick_until_end
from relatum.collecting._ports import Store
from relatum.collecting._shared import Shared
from relatum.collecting._workers import Worker
from relatum.errors import AccessRefused, ConfigurationError, InvalidInput, NotAStream, StreamNotFound, Transient
from relatum.outcomes import Outcome
from relatum.reading import Message, StreamReader
from relatum.waiting import backoff

END_S: Final = 5.0
"""Seconds to leave, after that: a database that does not answer is let go."""

CLOSE_S: Final = 30.0
"""Seconds `close` waits by default."""


class MessageCollector(Collector[Shared, Executor]):
    """Hands messages to executors in bulks, by type, and keeps what became of each.

    A context manager: entering starts it, leaving closes it. Threads may share it. Collectors of one name, in any
    number of processes, are members of one collector: they share its messages, and take over from one another.

    Args:
        name: The collector's name.
        database: PostgreSQL's URL, or an engine; None keeps states in this process alone.
        broker: The broker's URL or address; None where no stream is followed, nothing is spilled or taken over, and
            there is no dead-letter stream.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        ssl_context: The TLS context for the broker; None: what its URL says, or the system's authorities.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            broker's URL says, or PLAIN.
        streams: Streams and super streams to follow; each message of them is collected exactly once.
        start: Where to begin with a stream that this collector never followed: "first", "next", or an offset.
        bytes_max: Bytes of all messages held; see `CollectorLimits`.
        bulks_max: Bulks being filled at one time.
        dead_letter_stream: Where messages are published that are given up. It must exist.
        type_of: Tells a message's type; by default its property `type`.
        lease_s: Seconds after which others take over from a member that died.
        keep_s: Seconds a finished message is remembered, then it is unknown again; None for ever. The member that
            joined last decides.

    Raises:
        InvalidInput: An option cannot be one.
        ConfigurationError: An option needs a broker or a database that was not given.
    """

    def _prepare(self, store: Store, limits: CollectorLimits, broker: str) -> Shared:
        self._followers: dict[str, CollectedStream] = {}
        self._feed: Feed | None = None
        self._workers: list[Worker] = []
        self._keepers: list[threading.Thread] = []
        self._input_ended = threading.Event()
        self._ended = threading.Event()
        # Of a thread that closes while a signal's handler does so in the same thread, too.
        self._closing = threading.RLock()
        self._in_time = True
        return Shared(store, limits, broker)

    def _check_executor(self, executor: Executor) -> None:
        if is_coroutine_function(executor):
            raise InvalidInput(f"nobody would await {executor!r}: a coroutine function is for AsyncMessageCollector")

    def register_result_handler(
        self,
        handler: Handler,
        *,
        type: str | None = None,  # noqa: A002 - RabbitMQ's word for it
        message_id: str | None = None,
    ) -> None:
        """Tell a handler of outcomes that this member stores; see `Collector.register_result_handler`.

        Raises:
            InvalidInput: As there, or it is a coroutine function, which nobody would await.
        """
        if is_coroutine_function(handler):
            raise InvalidInput(f"nobody would await {handler!r}: a coroutine function is for AsyncMessageCollector")
        super().register_result_handler(handler, type=type, message_id=message_id)

    # --- messages in ----------------------------------------------------------------------------------------------

    def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Take a message; it is stored soon after, and its handlers are told.

        Args:
            message: A message that lies in a stream. Its place is its identity: given twice, it is consumed once.
            timeout_s: Seconds to wait for room with `when_full="block"`; None waits for as long as it takes. A handler
                of `collected` never waits: storing goes on only after it. An executor may wait in vain for room of its
                own type: that is made when it returns.

        Returns:
            False where it was refused, and nothing is stored: its type has no executor, there is no room (with
            `when_full="refuse"`, or in time), or the collector stops.

        Raises:
            ConfigurationError: The collector does not run.
            InvalidInput: It is no message of a stream.
        """
        return self.collect_many([message], timeout_s=timeout_s)[0]

    def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Take messages, in order; see `collect`.

        Args:
            messages: The messages.
            timeout_s: Seconds to wait for room, in all.

        Returns:
            For each message, whether it was taken.
        """
        if not self._is_started:
            raise ConfigurationError("the collector does not run: start it")
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        described = self._described(messages)
        if self._is_storer():
            timeout_s = 0.0
        until = None if timeout_s is None else time.monotonic() + timeout_s
        shared, taken = self._shared, []
        with shared.changed:
            for message in described:
                while (verdict := shared.intake.collect(message, time.monotonic())) is Verdict.WAIT:
                    shared.changed.notify_all()
                    remaining = None if until is None else until - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        break
                    shared.changed.wait(remaining)
                taken.append(verdict in (Verdict.TAKEN, Verdict.KNOWN))
            shared.changed.notify_all()
        return taken

    def flush(self, type: str | None = None) -> None:  # noqa: A002
        """Close the bulk being filled of a type, or of all, with everything in it that was taken before.

        Waits until that is stored; except in a handler of `collected`, after which alone storing goes on.

        Raises:
            InvalidInput: The type has no executor here.
        """
        self._check_flushed(type)
        shared, waits = self._shared, not self._is_storer()
        with shared.changed:
            mark = shared.intake.mark()
            while waits and not shared.intake.is_stored_to(mark) and not shared.abandoned.is_set():
                shared.changed.wait(1.0)
            shared.core.flush(type)
            shared.changed.notify_all()

    def _is_storer(self) -> bool:
        """Whether the calling thread is the one that stores, in a handler: it must not wait for what it does itself."""
        return bool(self._keepers) and threading.current_thread() is self._keepers[0]

    # --- what it knows --------------------------------------------------------------------------------------------

    def outcome(self, message_id: str) -> Outcome:
        """What became of a message of this collector, by any member."""
        checked_name("message_id", message_id)
        return self._shared.store.outcomes_of([message_id])[message_id]

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the collector's members, and begin.

        Raises:
            BrokerUnavailable, DatabaseUnavailable: a server is away; safe to repeat.
            StreamNotFound: there is no dead-letter stream of that name. A stream to follow that is missing is waited
                for, and logged.
            NotAStream: what is to be followed is a queue of another kind.
            SchemaMissing: the database has no schema: run `relatum migrate`.
            ConfigurationError: it was started before; streams are to be followed, but there is no executor; or dead
                letters would go to a stream that is followed.
        """
        self._check_startable()
        self._check_dead_letters()
        names = self._find_streams()
        self._check_streams(names)
        shared = self._shared
        shared.member = shared.store.open(shared.core.types, self._lease_s)
        self._is_started = True
        for type_, executor in self._executors.items():
            self._start_workers(type_, executor)
        self._start_keeper("storer", store_until_end, shared, self._input_ended)
        self._start_keeper("ticker", tick_until_end, shared, self._ended)
        self._start_keeper("keeper", keep_until_end, shared, self._ended, self._lease_s)
        self._follow(names)
        if names:
            self._start_keeper("looker", look_until_end, shared, self._look)

    def _start_workers(self, type_: str, executor: Executor) -> None:
        options = self._shared.core.options_of(type_)
        for _ in range(options.bulks_at_once):
            open_reader = None if self._address is None else self._open_reader
            worker = Worker(
                self._shared, type_, options, executor, open_reader=open_reader, dead_letters=self._dead_letters
            )
            self._workers.append(worker)
            worker.thread.start()

    def _start_keeper(self, name: str, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"relatum-{self.name}-{name}", daemon=True)
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

    def _follow(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._followers:
                if self._feed is None:
                    assert self._address is not None, "streams are followed on a broker"
                    self._feed = Feed(self._address, self.name)
                follower = CollectedStream(
                    self._shared,
                    name,
                    feed=self._feed,
                    open_reader=self._open_reader,
                    type_of=self._type_of,
                    initial=lambda reader, stream: self._initial(reader.bounds(stream)),
                )
                follower.thread.start()
                self._followers[name] = follower

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop in order: take nothing more, close all bulks, and wait for the executors.

        What is not done in time, and what waits for a retry, is left to the other members, or to the next start; a
        collector in memory forgets it.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether everything closed was consumed in time. False in an executor or a handler, which cannot wait for
            itself: it is closed in the background then. Closed again, it answers the same.
        """
        checked_seconds("timeout_s", timeout_s)
        if not self._is_started:
            return True
        if threading.current_thread() in self._threads():
            name = f"relatum-{self.name}-closer"
            threading.Thread(target=self.close, args=(timeout_s,), name=name, daemon=True).start()
            return False
        with self._closing:
            if not self._ended.is_set():
                self._in_time = self._close(time.monotonic() + timeout_s)
            return self._in_time

    def _threads(self) -> list[threading.Thread]:
        of_followers = [follower.thread for follower in list(self._followers.values())]
        return [*of_followers, *(worker.thread for worker in self._workers), *self._keepers]

    def _close(self, until: float) -> bool:
        shared = self._shared
        shared.stopping.set()
        with shared.changed:
            shared.core.stop()
            shared.changed.notify_all()
        _join([follower.thread for follower in list(self._followers.values())], until)
        if self._feed is not None:
            self._feed.close()
        self._input_ended.set()
        shared.notify()
        in_time = _join([worker.thread for worker in self._workers], until)
        shared.abandoned.set()
        shared.store.end_in(END_S)
        self._ended.set()
        shared.notify()
        _join(self._keepers, time.monotonic() + END_S)
        self._leave()
        return in_time

    def run(self, stop: threading.Event) -> None:
        """Start, waiting for servers that are away; go on until `stop` is set; close.

        Raises:
            RelatumError: what waiting would not cure; see `start`.
        """
        checked_event("stop", stop)
        who = self._shared.who("starting")
        for pause in backoff():
            try:
                self.start()
                self._shared.outages.over(who)
                break
            except Transient as error:
                self._shared.outages.failed(who, error)
            if stop.wait(pause):
                return
        try:
            stop.wait()
        finally:
            # Also where a signal's handler raised, as Ctrl-C does.
            self.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _join(threads: Iterable[threading.Thread], until: float) -> bool:
    """Wait for threads up to a moment; whether all ended."""
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
