"""What both faces of the message collector share: options, executors, handlers, its beginning and its end."""

import logging
import ssl
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
from relatum.collecting._collector_rows import KEEP_S
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._consuming import BulkConsumer
from relatum.collecting._following import Following
from relatum.collecting._handlers import Handler, call_of, logger
from relatum.collecting._named_streams import NamedStreams, StartAt
from relatum.collecting._statistics import CollectorStatistics
from relatum.errors import ConfigurationError, InvalidInput, Transient
from relatum.processes import of_one_process
from relatum.publishing import DeadLetters
from relatum.reading import AuthMechanism, BrokerAddress, Message
from relatum.store.database import AnyDatabase
from relatum.waiting import log_failure

LEASE_S: Final = 15.0
"""Seconds a member's lease holds by default: after so long without a sign of life, others take its messages over."""

LEASE_MIN_S: Final = 1.0
"""Seconds a lease holds at least: a busy process that renews later than this would lose its messages to others."""

CLOSE_S: Final = 30.0
"""Seconds `close` waits by default."""

JOIN_S: Final = 1.0
"""Seconds to wait for threads that have ended but for one that a server still holds."""

ExecutorT = TypeVar("ExecutorT")
T = TypeVar("T")


class Collector(Generic[ExecutorT]):
    """A collector: its options, executors and handlers, its life, and what it can be asked.

    Args: as for `MessageCollector`.
    """

    def __init__(
        self,
        name: str,
        *,
        database: AnyDatabase,
        broker: str | BrokerAddress | None = None,
        stream_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
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
            self._address = BrokerAddress.of(broker, stream_url, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
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
        """Refuse what would go wrong from the start."""
        if self._is_started:
            raise ConfigurationError("a collector is started once")
        if self._streams.names and not self._shared.workers:
            raise ConfigurationError(
                "streams are followed for executors: register one before the start, or all messages are passed over"
            )

    def _check_awaited(self, called: Callable[..., object]) -> None:
        """Refuse a coroutine function where this face would not await it."""

    def _called_in_thread(self, executor: ExecutorT) -> Executor:
        """The executor as a worker calls it, in its thread; refuses what this face could not call."""
        raise NotImplementedError

    # --- who consumes, and who is told ----------------------------------------------------------------------------

    def register_executor(
        self,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        executor: ExecutorT,
        options: ExecutorOptions = ExecutorOptions(),
    ) -> None:
        """Consume the messages of a type by an executor. To be called before `start`.

        Args:
            type: The messages' type.
            executor: Is called with each `Bulk`, in a thread of the type; with asyncio it may be a coroutine function.
                It returns None where all its messages succeeded, a result for each message in order, or a mapping; it
                may note results as it goes. A result is None, a `Failure` or an exception. Raising fails the messages
                that have no result yet.
            options: How its bulks are made and handed on.

        Raises:
            InvalidInput: The type has an executor already, or an option cannot be one.
            ConfigurationError: "spill" without a broker, or the collector runs.
        """
        if self._is_started:
            raise ConfigurationError("executors are registered before the collector starts")
        if not callable(executor):
            raise InvalidInput(f"an executor is called with each bulk; {executor!r} cannot be called")
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
        """Tell a handler of outcomes that this member stores: when a message is collected, and when it is final.

        Handlers are called on the collector's threads, one after the other: one that takes long holds up a worker. One
        that raises is logged. Other processes ask `Outcomes`.

        Args:
            handler: Is called with each `Outcome`.
            type: Only of messages of this type. It may have no executor here: nothing is told then.
            message_id: Only of this message; the handler goes after its final outcome.

        Raises:
            InvalidInput: Both a type and a message id were given, or one of the arguments cannot be one: with threads
                also a coroutine function, which nobody would await.
        """
        checked_callable("handler", handler)
        self._check_awaited(handler)
        for name, value in (("type", type), ("message_id", message_id)):
            if value is not None:
                checked_name(name, value)
        if type is not None and message_id is not None:
            raise InvalidInput("a result handler is of a type, of a message, or of all: not of two of them")
        self._shared.handlers.register(handler, type=type, message_id=message_id)

    def _described(self, messages: Iterable[Message], timeout_s: float | None) -> list[Collected]:
        """What this collector needs to know of messages that are given, all of which are looked at first."""
        if not self._is_started:
            raise ConfigurationError("the collector does not run: start it")
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        if not isinstance(messages, Iterable):
            raise InvalidInput(f"collect_many takes messages, not {type(messages).__name__}")
        given: list[Any] = list(messages)
        for message in given:
            if not isinstance(message, Message):
                name = type(message).__name__
                raise InvalidInput(f"a relatum.reading.Message is collected, which lies in a stream, not {name}")
        return [describe(message, self._type_of) for message in given]

    def _check_flushed(self, type_: str | None) -> None:
        """Refuse to flush a type nobody consumes here: a misspelt one would leave its bulk open."""
        if type_ is not None and checked_name("type", type_) not in self._shared.workers:
            raise InvalidInput(f"type {type_!r} has no executor in this collector: there is no bulk of it to flush")

    # --- what it knows --------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        """What this member has counted, and what it holds. It asks nobody."""
        return self._shared.statistics()

    # --- its beginning ------------------------------------------------------------------------------------------------

    def _join_members(self) -> list[str]:
        """Become a member; gives the streams to follow. Where it raises, nothing is left of it."""
        shared = self._shared
        try:
            names = self._streams.checked()
            shared.member = shared.store.open(shared.core.types, shared.lease_s)
        except BaseException:
            shared.store.dispose()
            raise
        return names

    def _begin(self, names: list[str]) -> None:
        """Start its loop; it waits for nothing."""
        shared = self._shared
        self._is_started = True
        if names:
            assert self._address is not None, "streams are followed on a broker"
            shared.following = Following(shared, self._address, self._type_of, self._streams)
        shared.loop.start()
        shared.loop.call(shared.begin, names)

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
        self._shared.refused += count
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
        self._shared.loop.run(self._shared.close, timeout_s)

    def _close(self, timeout_s: float) -> bool:
        """Stop in order; whether all was done in time."""
        shared = self._shared
        self._result_of(shared.close, timeout_s, otherwise=lambda: None)
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
