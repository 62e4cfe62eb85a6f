"""The message collector, with threads."""

import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import sqlalchemy as sa

from relatum._dead_letters import DeadLetters
from relatum.collecting._bulk import Executor
from relatum.collecting._core import Verdict
from relatum.collecting._following import Follower
from relatum.collecting._handlers import Handler
from relatum.collecting._intake import TypeOf, describe, type_of_property
from relatum.collecting._keeping import keep_until_end, store_until_end, tick_until_end
from relatum.collecting._memory import MemoryStore
from relatum.collecting._options import (
    BULK_BYTES,
    BULK_MESSAGES,
    BULKS_MAX,
    BYTES_MAX,
    CollectorLimits,
    ExecutorOptions,
    WhenFull,
    check_count,
    check_seconds,
)
from relatum.collecting._outcome import Outcome
from relatum.collecting._ports import Store
from relatum.collecting._prune import KEEP_S
from relatum.collecting._shared import Shared
from relatum.collecting._state import backoff, log_defect, logger
from relatum.collecting._workers import Worker
from relatum.errors import ConfigurationError, InvalidInput, NotAStream, Transient
from relatum.limits import INTEGER_MAX
from relatum.reading import BrokerAddress, Message, StreamReader

LEASE_S: Final = 15.0
"""Seconds a member's lease holds by default: after so long without a sign of life, others take its messages over."""

CLOSE_S: Final = 30.0
"""Seconds `close` waits by default."""

StartAt = Literal["first", "next"] | int
"""Where to begin with a stream that was never followed: its first message, what is published from now on, an offset."""


class MessageCollector:
    """Hands messages to executors in bulks, by type, and keeps what became of each.

    A context manager: entering starts it, leaving closes it. Threads may share it. Collectors of one name, in any
    number of processes, are members of one collector: they share its messages, and take over from one another.

    Args:
        name: The collector's name.
        database: PostgreSQL's URL, or an engine; None keeps states in this process alone.
        broker: The broker's URL or address; None where no stream is followed, nothing is spilled or taken over, and
            there is no dead-letter stream.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
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

    def __init__(
        self,
        name: str,
        *,
        database: str | sa.Engine | None = None,
        broker: str | BrokerAddress | None = None,
        stream_url: str | None = None,
        streams: Sequence[str] = (),
        start: StartAt = "first",
        bytes_max: int = BYTES_MAX,
        bulks_max: int = BULKS_MAX,
        dead_letter_stream: str | None = None,
        type_of: TypeOf = type_of_property,
        lease_s: float = LEASE_S,
        keep_s: int | None = KEEP_S,
    ) -> None:
        check_seconds("lease_s", lease_s)
        if keep_s is not None:
            check_count("keep_s", keep_s)
        self.name = _checked_name(name)
        self._address = BrokerAddress.parse(broker, stream_url) if isinstance(broker, str) else broker
        self._streams = _checked_streams(streams)
        self._start = _checked_start(start)
        self._type_of = type_of
        self._lease_s = lease_s
        if self._address is None and (self._streams or dead_letter_stream):
            raise ConfigurationError("streams are followed, and dead letters published, on a broker: give `broker`")
        self._dead_letters: DeadLetters | None = None
        if self._address is not None and dead_letter_stream:
            self._dead_letters = DeadLetters(self._address, dead_letter_stream)
        self._shared = Shared(self._make_store(database, keep_s), CollectorLimits(bytes_max, bulks_max))
        self._is_durable = database is not None
        self._executors: dict[str, Executor] = {}
        self._followers: dict[str, Follower] = {}
        self._workers: list[Worker] = []
        self._keepers: list[threading.Thread] = []
        self._input_ended = threading.Event()
        self._ended = threading.Event()
        self._is_started = False

    def _make_store(self, database: str | sa.Engine | None, keep_s: int | None) -> Store:
        if database is None:
            return MemoryStore(self.name)
        # Imported here: a collector in memory needs no PostgreSQL.
        from relatum.collecting._store import CollectorStore

        vhost = "/" if self._address is None else self._address.vhost
        return CollectorStore(self.name, database, vhost=vhost, keep_s=keep_s)

    # --- who consumes, and who is told ----------------------------------------------------------------------------

    def register_executor(
        self,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        executor: Executor,
        *,
        bulk_bytes: int = BULK_BYTES,
        bulk_messages: int = BULK_MESSAGES,
        max_age_s: float = 1.0,
        idle_s: float | None = None,
        workers: int = 1,
        queue_bulks: int = 8,
        when_full: WhenFull = "block",
        one_at_a_time: bool = False,
        joins_transaction: bool = False,
        attempts: int = 3,
        backoff_s: float = 1.0,
    ) -> None:
        """Consume the messages of a type by an executor. To be called before `start`.

        Args:
            type: The messages' type.
            executor: Is called with each `Bulk`, in a thread of the type. It returns None where all its messages
                succeeded, a result for each message in order, or a mapping; it may note results as it goes. A result
                is None, a `Failure` or an exception. Raising fails the messages that have no result yet.
            bulk_bytes: A bulk of that many bytes is closed.
            bulk_messages: A bulk of that many messages is closed.
            max_age_s: A bulk whose first message waited that long is closed.
            idle_s: A bulk to which nothing was added for that long is closed; None for never.
            workers: Bulks handed to the executor at the same time, each in a thread.
            queue_bulks: Closed bulks that may wait for a worker before the type counts as full.
            when_full: What happens then: "block" makes `collect` wait and followed streams stop; "refuse" refuses the
                message; "spill" takes it, and drops bodies from memory that are read again from their streams.
            one_at_a_time: Hand on one bulk at a time, whatever `workers` says.
            joins_transaction: The executor writes by `bulk.connection`, in the transaction that stores its results:
                each message is consumed exactly once.
            attempts: Times a message is handed to the executor before it is given up.
            backoff_s: Seconds before the second attempt; twice as many before each further one, at most an hour.

        Raises:
            InvalidInput: The type has an executor already, or an option cannot be one.
            ConfigurationError: "spill" without a broker, `joins_transaction` without a database, or the collector runs.
        """
        if self._is_started:
            raise ConfigurationError("executors are registered before the collector starts")
        if not callable(executor):
            raise InvalidInput(f"an executor is called with each bulk; {executor!r} cannot be called")
        if when_full == "spill" and self._address is None:
            raise ConfigurationError("'spill' reads bodies from their streams again: give the collector a broker")
        if joins_transaction and not self._is_durable:
            raise ConfigurationError("a collector in memory has no transaction to join: give it a database")
        options = ExecutorOptions(
            type=type,
            bulk_bytes=bulk_bytes,
            bulk_messages=bulk_messages,
            max_age_s=max_age_s,
            idle_s=idle_s,
            workers=workers,
            queue_bulks=queue_bulks,
            when_full=when_full,
            one_at_a_time=one_at_a_time,
            joins_transaction=joins_transaction,
            attempts=attempts,
            backoff_s=backoff_s,
        )
        with self._shared.changed:
            self._shared.core.register(options)
        self._executors[type] = executor

    def register_result_handler(
        self,
        handler: Handler,
        *,
        type: str | None = None,  # noqa: A002
        message_id: str | None = None,
    ) -> None:
        """Tell a handler of outcomes that this member stores: when a message is collected, and when it is final.

        Handlers are called on the collector's threads, one after the other: one that takes long holds up a worker. One
        that raises is logged. Other processes ask `Outcomes`.

        Args:
            handler: Is called with each `Outcome`.
            type: Only of messages of this type.
            message_id: Only of this message; the handler goes after its final outcome.

        Raises:
            InvalidInput: Both a type and a message id were given.
        """
        if type is not None and message_id is not None:
            raise InvalidInput("a result handler is of a type, of a message, or of all: not of two of them")
        self._shared.handlers.register(handler, type=type, message_id=message_id)

    # --- messages in ----------------------------------------------------------------------------------------------

    def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Take a message; it is stored soon after, and its handlers are told.

        Args:
            message: A message that lies in a stream. Its place is its identity: given twice, it is consumed once.
            timeout_s: Seconds to wait for room with `when_full="block"`; None waits for as long as it takes.

        Returns:
            False where it was refused, and nothing is stored: its type has no executor, there is no room (with
            `when_full="refuse"`, or in time), or the collector stops.

        Raises:
            ConfigurationError: The collector does not run.
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
        described = [describe(message, self._type_of) for message in messages]
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

        Waits until that is stored.
        """
        shared = self._shared
        with shared.changed:
            mark = shared.intake.mark()
            while not shared.intake.is_stored_to(mark) and not shared.abandoned.is_set():
                shared.changed.wait(1.0)
            shared.core.flush(type)
            shared.changed.notify_all()

    # --- what it knows --------------------------------------------------------------------------------------------

    def outcome(self, message_id: str) -> Outcome:
        """What became of a message of this collector, by any member."""
        return self._shared.store.outcomes_of([message_id])[message_id]

    @property
    def held_messages(self) -> int:
        """Messages this member has taken and is not done with."""
        with self._shared.changed:
            return self._shared.core.held_messages

    @property
    def held_bytes(self) -> int:
        """What counts towards `bytes_max`."""
        with self._shared.changed:
            return self._shared.core.held_bytes

    @property
    def passed_over(self) -> int:
        """Messages this member met whose type has no executor."""
        with self._shared.changed:
            return self._shared.intake.passed_over

    @property
    def refused(self) -> int:
        """Messages this member refused for lack of room."""
        with self._shared.changed:
            return self._shared.intake.refused

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the collector's members, and begin.

        Raises:
            BrokerUnavailable, DatabaseUnavailable: a server is away; safe to repeat.
            StreamNotFound: there is no dead-letter stream of that name.
            SchemaMissing: the database has no schema: run `relatum migrate`.
            ConfigurationError: it was started before.
        """
        if self._is_started:
            raise ConfigurationError("a collector is started once")
        self._check_dead_letters()
        names = self._find_streams()
        shared = self._shared
        shared.member = shared.store.open(shared.core.types, self._lease_s)
        self._is_started = True
        for type_, executor in self._executors.items():
            self._start_workers(shared.core.options_of(type_), executor)
        self._start_keeper("storer", store_until_end, shared, self._input_ended)
        self._start_keeper("ticker", tick_until_end, shared, self._ended)
        self._start_keeper("keeper", keep_until_end, shared, self._ended, self._lease_s, self._look)
        self._follow(names)

    def _start_workers(self, options: ExecutorOptions, executor: Executor) -> None:
        for _ in range(options.bulks_at_once):
            open_reader = None if self._address is None else self._open_reader
            worker = Worker(self._shared, options, executor, open_reader=open_reader, dead_letters=self._dead_letters)
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
                logger.info("dead letters go to a queue", extra={"queue": self._dead_letters.stream})

    def _open_reader(self) -> StreamReader:
        assert self._address is not None, "only what has a broker is read"
        return StreamReader.open(self._address)

    def _find_streams(self) -> list[str]:
        """The streams to follow: those named, or the partitions where the name is a super stream's."""
        if not self._streams:
            return []
        with self._open_reader() as reader:
            return [stream for name in self._streams for stream in (reader.partitions(name) or [name])]

    def _look(self) -> None:
        self._follow(self._find_streams())

    def _follow(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._followers:
                follower = Follower(
                    self._shared, name, open_reader=self._open_reader, type_of=self._type_of, initial=self._initial
                )
                self._followers[name] = follower
                follower.thread.start()

    def _initial(self, reader: StreamReader, stream: str) -> int:
        bounds = reader.bounds(stream)
        if self._start == "next":
            return 0 if bounds.last is None else bounds.last + 1
        return bounds.first or 0 if self._start == "first" else self._start

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop in order: take nothing more, close all bulks, and wait for the executors.

        What is not done in time, and what waits for a retry, is left to the other members, or to the next start; a
        collector in memory forgets it.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether everything closed was consumed in time.
        """
        if not self._is_started or self._ended.is_set():
            return True
        shared, until = self._shared, time.monotonic() + timeout_s
        shared.stopping.set()
        with shared.changed:
            shared.core.stop()
            shared.changed.notify_all()
        _join([follower.thread for follower in self._followers.values()], until)
        self._input_ended.set()
        shared.notify()
        in_time = _join([worker.thread for worker in self._workers], until)
        shared.abandoned.set()
        self._ended.set()
        shared.notify()
        _join(self._keepers, time.monotonic() + 5)
        self._leave()
        return in_time

    def _leave(self) -> None:
        try:
            self._shared.store.close(self._shared.member)
        except Transient as error:
            # The lease lapses by itself.
            log_defect(error, "lease not given back")
        if self._dead_letters is not None:
            self._dead_letters.close()
        self._shared.store.dispose()

    def run(self, stop: threading.Event) -> None:
        """Start, waiting for servers that are away; go on until `stop` is set; close.

        Raises:
            RelatumError: what waiting would not cure; see `start`.
        """
        for pause in backoff():
            try:
                self.start()
                break
            except Transient as error:
                log_defect(error, "not started yet")
            if stop.wait(pause):
                return
        stop.wait()
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


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name or "\0" in name or len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidInput(f"a collector's name is a text of 1 to {NAME_BYTES_MAX} bytes, not {name!r}")
    return name


NAME_BYTES_MAX: Final = 255
"""Bytes of a collector's name, as of a stream's."""


def _checked_streams(streams: Sequence[str]) -> list[str]:
    if isinstance(streams, str):
        raise InvalidInput(f"streams is a list of names, not {streams!r}")
    return list(dict.fromkeys(streams))


def _checked_start(start: StartAt) -> StartAt:
    is_offset = isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= INTEGER_MAX
    if start not in ("first", "next") and not is_offset:
        raise InvalidInput(f"a collector starts at 'first', 'next' or an offset, not {start!r}")
    return start
