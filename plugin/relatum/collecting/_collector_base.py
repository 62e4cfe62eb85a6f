"""The base of the blocking and the asyncio message collector: options, executors, handlers, start and end."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final, Generic, TypeVar

from relatum import metrics
from relatum.checks import (
    SECONDS_MAX,
    checked_callable,
    checked_count,
    checked_name,
    checked_names,
    checked_seconds,
    shown,
)
from relatum.collecting._bulk import Collected, Executor, TypeOf, describe, type_of_property
from relatum.collecting._bulks import BULKS_MAX, BYTES_MAX, ExecutorOptions
from relatum.collecting._collector_core import Core
from relatum.collecting._collector_loop import CollectorLoop
from relatum.collecting._collector_store import KEEP_S, CollectorStore
from relatum.collecting._consuming import BulkConsumer
from relatum.collecting._following import Following
from relatum.collecting._handlers import Handler, current_call, logger
from relatum.collecting._named_streams import NamedStreams, StartAt
from relatum.collecting._statistics import CollectorStatistics
from relatum.errors import ConfigurationError, InvalidInput, Transient
from relatum.processes import of_one_process
from relatum.publishing import DeadLetters
from relatum.reading import Broker, BrokerAddress, Message
from relatum.store.database import AnyDatabase
from relatum.waiting import log_failure

LEASE_S: Final = 15.0
"""Default seconds of a member's lease: others take over its messages after this long without a renewal."""

LEASE_MIN_S: Final = 1.0
"""Minimum seconds of a lease: a busy process could not renew a shorter one in time."""

CLOSE_S: Final = 30.0
"""Default seconds that `close` waits."""

JOIN_S: Final = 1.0
"""Seconds that `close` waits for threads to end: they end at once unless a server hangs."""

ExecutorT = TypeVar("ExecutorT")
T = TypeVar("T")


class Collector(Generic[ExecutorT]):
    """The base of `MessageCollector` and `AsyncMessageCollector`, with the same arguments."""

    def __init__(
        self,
        name: str,
        *,
        broker: str | Broker | None = None,
        database: AnyDatabase,
        streams: Sequence[str] = (),
        start: StartAt = "first",
        bytes_max: int = BYTES_MAX,
        bulks_max: int = BULKS_MAX,
        dead_letter_stream: str | None = None,
        type_of: TypeOf = type_of_property,
        lease_s: float = LEASE_S,
        keep_s: int | None = KEEP_S,
    ) -> None:
        checked_seconds("lease_s", lease_s, least=LEASE_MIN_S)
        if keep_s is not None:
            checked_count("keep_s", keep_s, most=SECONDS_MAX)
        if dead_letter_stream is not None:
            checked_name("dead_letter_stream", dead_letter_stream)
        checked_callable("type_of", type_of)
        self.name = checked_name("name", name)
        self._address: BrokerAddress | None = None
        if broker is not None:
            self._address = BrokerAddress.of(broker)
        self._streams = NamedStreams(self._address, checked_names("streams", streams), start, dead_letter_stream)
        self._type_of = type_of
        self._dead_letters: DeadLetters | None = None
        if self._address is not None and dead_letter_stream:
            self._dead_letters = DeadLetters(self._address, dead_letter_stream)
        self._shared = CollectorLoop(
            CollectorStore(name, database, vhost="/" if self._address is None else self._address.vhost, keep_s=keep_s),
            Core(bytes_max, bulks_max),
            lease_s=lease_s,
            leave=self._leave,
            broker="" if self._address is None else str(self._address),
        )
        self._is_started = False
        of_one_process(self, "a collector")
        metrics.report(self._shared, collector=self.name)

    def _check_startable(self) -> None:
        """Refuse to start twice, or with streams but no executor."""
        if self._is_started:
            raise ConfigurationError("a collector can be started only once: create another one")
        if self._streams.names and not self._shared.workers:
            raise ConfigurationError(
                "the collector follows streams but has no executor for their messages: register one before the start"
            )

    def _check_awaited(self, called: Callable[..., object]) -> None:
        """Raise if the collector cannot await a coroutine function."""

    def _called_in_thread(self, executor: ExecutorT) -> Executor:
        """Return the executor as a function for a worker's thread."""
        raise NotImplementedError

    # --- executors and handlers ---------------------------------------------------------------------------------------

    def register_executor(
        self,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        executor: ExecutorT,
        options: ExecutorOptions = ExecutorOptions(),
    ) -> None:
        """Register the executor of a type. Call this before `start`.

        Args:
            type: The messages' type.
            executor: Called with each `Bulk`, in a thread of the type; with asyncio it may be a coroutine function. It
                returns None (messages without another result succeeded), one result per message in order, or a mapping.
                It may also set results with `bulk.succeeded` and `bulk.failed`. A result is None, a `Failure` or an
                exception. If it raises, the messages without a result fail.
            options: How bulks are filled and consumed.

        Raises:
            InvalidInput: The type already has an executor, or an argument has the wrong type.
            ConfigurationError: "spill" was given without a broker, or the collector was started already.
        """
        if self._is_started:
            raise ConfigurationError("the collector was started already: register executors before the start")
        if not callable(executor):
            raise InvalidInput(f"an executor is called with each bulk, but {executor!r} is not callable")
        checked_name("type", type)
        if not isinstance(options, ExecutorOptions):
            raise InvalidInput(f"options= takes ExecutorOptions, not {shown(options)}")
        if options.when_full == "spill" and self._address is None:
            raise ConfigurationError("'spill' reads bodies from their streams again: give the collector a broker")
        called, shared = self._called_in_thread(executor), self._shared
        shared.core.register(type, options)
        shared.workers[type] = BulkConsumer(
            shared, type, options, called, open_reader=self._streams.open_reader, dead_letters=self._dead_letters
        )

    def register_result_handler(
        self,
        handler: Handler,
        *,
        type: str | None = None,  # noqa: A002
        message_id: str | None = None,
    ) -> None:
        """Call a handler with each outcome that this member stores: when a message is collected, and when it is final.

        Handlers run in the collector's threads: a slow one blocks a worker. Exceptions are logged. Other processes
        use `Outcomes`.

        Args:
            handler: Called with each `Outcome`.
            type: Only messages of this type, which need not have an executor here. None (default): all types.
            message_id: Only this message; the handler is removed after the final outcome. None (default): all.

        Raises:
            InvalidInput: Both a type and a message id were given, an argument has the wrong type, or a blocking
                collector got a coroutine function.
        """
        checked_callable("handler", handler)
        self._check_awaited(handler)
        for name, value in (("type", type), ("message_id", message_id)):
            if value is not None:
                checked_name(name, value)
        if type is not None and message_id is not None:
            raise InvalidInput("a result handler takes type= or message_id=, not both")
        self._shared.handlers.register(handler, type=type, message_id=message_id)

    def _described(self, messages: Iterable[Message], timeout_s: float | None) -> list[Collected]:
        """Check the arguments of `collect_many`, and return the messages with type, id and size."""
        if not self._is_started:
            raise ConfigurationError("the collector is not running: start it")
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        if not isinstance(messages, Iterable):
            raise InvalidInput(f"collect_many takes messages, not {type(messages).__name__}")
        given: list[Any] = list(messages)
        for message in given:
            if not isinstance(message, Message):
                name = type(message).__name__
                raise InvalidInput(f"a collector takes relatum.reading.Message, which a stream contains, not {name}")
        return [describe(message, self._type_of) for message in given]

    def _check_flushed(self, type_: str | None) -> None:
        """Refuse to flush a type without an executor here: it may be misspelt."""
        if type_ is not None and checked_name("type", type_) not in self._shared.workers:
            raise InvalidInput(f"type {type_!r} has no executor in this collector, so it has no bulk to flush")

    # --- state --------------------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        """Return what this member has counted and what it holds now. No I/O."""
        return self._shared.statistics()

    # --- start --------------------------------------------------------------------------------------------------------

    def _join_members(self) -> list[str]:
        """Join as a member, and return the streams to follow. An error leaves nothing behind."""
        shared = self._shared
        try:
            names = self._streams.checked()
            shared.member = shared.store.open(shared.core.types, shared.lease_s)
        except BaseException:
            shared.store.dispose()
            raise
        return names

    def _begin(self, names: list[str]) -> None:
        """Start the loop. Does not block."""
        shared = self._shared
        self._is_started = True
        if names:
            assert self._address is not None, "streams are followed on a broker"
            shared.following = Following(shared, self._address, self._type_of, self._streams)
        shared.loop.start()
        shared.loop.call(shared.begin, names)

    # --- calls into the loop ------------------------------------------------------------------------------------------

    @property
    def _is_own(self) -> bool:
        """Whether the caller is an executor or handler of this collector, for which closing would wait."""
        return current_call(self._shared) is not None

    @property
    def _is_storer(self) -> bool:
        """Whether the caller is a handler of `collected`, which must not wait for messages stored after it."""
        call = current_call(self._shared)
        return call is not None and call.is_storing

    def _refused(self, count: int) -> list[bool]:
        """Return the answers of a closed collector."""
        self._shared.refused += count
        return [False] * count

    def _result_of(self, function: Callable[..., Any], *args: Any, otherwise: Callable[[], T]) -> T:
        """Run a coroutine function in the loop, and return its result; call `otherwise` if the loop has ended."""
        result = self._shared.loop.run(function, *args)
        if result is None:
            return otherwise()
        try:
            answer: T = result.result()
        except CancelledError:
            return otherwise()
        except BaseException:
            # For example Ctrl-C.
            result.cancel()
            raise
        return answer

    # --- end ----------------------------------------------------------------------------------------------------------

    def _close_behind(self, timeout_s: float) -> None:
        """Begin to close, without waiting."""
        self._shared.loop.run(self._shared.close, timeout_s)

    def _close(self, timeout_s: float) -> bool:
        """Close in order; return whether all bulks were consumed in time."""
        shared = self._shared
        self._result_of(shared.close, timeout_s, otherwise=lambda: None)
        shared.joined(JOIN_S)
        return shared.in_time

    def _leave(self) -> None:
        """End the lease, and close all connections."""
        shared = self._shared
        try:
            shared.store.close(shared.member)
        except Transient as error:
            # The lease will lapse.
            log_failure(logger, error, shared.label("leaving") + " could not release its lease", level=logging.INFO)
        if self._dead_letters is not None:
            self._dead_letters.close()
        for worker in shared.workers.values():
            worker.close()
        shared.store.dispose()
        metrics.retire(shared)
