"""The blocking message collector, and the base of both collectors: options, executors, handlers, start, end."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, ClassVar, Final, Self, cast

from relatum import metrics
from relatum.collecting._bulk import (
    AnyExecutor,
    Collected,
    Executor,
    ExecutorOptions,
    TypeOf,
    describe_given,
    type_of_property,
)
from relatum.collecting._collector_core import BULKS_MAX, BYTES_MAX, Core
from relatum.collecting._collector_loop import CollectorLoop
from relatum.collecting._collector_status import CollectorStatistics
from relatum.collecting._collector_store import KEEP_S, CollectorStore
from relatum.collecting._consuming import BulkConsumer
from relatum.collecting._following import Following, NamedStreams, StartAt
from relatum.collecting._handlers import Handler, current_call
from relatum.common.checks import (
    SECONDS_MAX,
    checked_callable,
    checked_count,
    checked_event,
    checked_name,
    checked_names,
    checked_seconds,
    is_coroutine_function,
    shown,
)
from relatum.common.closing import Closing
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import AfterStop, backoff, within
from relatum.errors import ConfigurationError, InvalidInput, Transient
from relatum.outcomes import Outcome
from relatum.reading import Broker, BrokerAddress, Message
from relatum.store.database import AnyDatabase

LEASE_S: Final = 15.0
"""Default seconds of a member's lease: others take over its messages after this long without a renewal."""

CLOSE_S: Final = 30.0
"""Default seconds that `close` waits."""

JOIN_S: Final = 1.0
"""Maximum seconds that `close` waits for threads, which end immediately unless a server hangs."""


class Collector:
    """The base of `MessageCollector` and `AsyncMessageCollector`, with the same arguments."""

    _awaits: ClassVar = False
    """Whether executors and handlers may be coroutine functions."""

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
        # A busy process could not renew a shorter lease in time.
        checked_seconds("lease_s", lease_s, least=1.0)
        if keep_s is not None:
            checked_count("keep_s", keep_s, most=SECONDS_MAX)
        if dead_letter_stream is not None:
            checked_name("dead_letter_stream", dead_letter_stream)
        checked_callable("type_of", type_of)
        self.name = checked_name("name", name)
        address = None if broker is None else BrokerAddress.of(broker)
        self._streams = NamedStreams(address, checked_names("streams", streams), start, dead_letter_stream)
        store = CollectorStore(name, database, vhost="/" if address is None else address.vhost, keep_s=keep_s)
        self._shared = CollectorLoop(store, Core(bytes_max, bulks_max), self._streams, lease_s)
        self._type_of = type_of
        self._is_started = False
        refuse_in_child(self, "a collector")
        metrics.report(self._shared, collector=self.name)

    def _check_awaited(self, called: Callable[..., object]) -> None:
        if not self._awaits and is_coroutine_function(called):
            raise InvalidInput(f"MessageCollector cannot await {called!r}: use AsyncMessageCollector")

    def _called_in_thread(self, executor: AnyExecutor) -> Executor:
        """Return the executor as a function for a worker's thread."""
        return cast("Executor", executor)

    # --- executors and handlers ---------------------------------------------------------------------------------------

    def register_executor(
        self,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        executor: AnyExecutor,
        options: ExecutorOptions = ExecutorOptions(),
    ) -> None:
        """Register the executor of a type. Call this before `start`.

        Args:
            type: The messages' type.
            executor: Called with each `Bulk`, in a thread of the type; with asyncio it may be a coroutine function. It
                returns None (messages without another result succeeded), one result per message in order, or a mapping.
                It may also set results with `bulk.succeeded` and `bulk.failed`. A result is None, a `Failure` or an
                exception. If the executor raises, messages without a result fail; with `joins_transaction`, all do.
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
        if options.when_full == "spill" and self._streams.address is None:
            raise ConfigurationError("when_full='spill' reads bodies from their streams: pass broker= to the collector")
        self._check_awaited(executor)
        called, shared = self._called_in_thread(executor), self._shared
        shared.core.register(type, options)
        shared.workers[type] = BulkConsumer(shared, type, options, called)

    def register_result_handler(
        self,
        handler: Handler,
        *,
        type: str | None = None,  # noqa: A002
        message_id: str | None = None,
    ) -> None:
        """Call a handler with each outcome that this member stores: `collected`, and later the final one.

        Handlers run in the collector's threads: a slow one blocks a worker. Exceptions are logged. In other processes,
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
        return describe_given(messages, self._type_of)

    def _check_flushed(self, type_: str | None) -> None:
        """Refuse to flush a type without an executor here: it may be misspelled."""
        if type_ is not None and checked_name("type", type_) not in self._shared.workers:
            raise InvalidInput(f"type {type_!r} has no executor in this collector, and no bulk to flush: register one")

    # --- state --------------------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        """Return this member's counts, and the number and bytes of messages that it holds now. No I/O."""
        return self._shared.statistics()

    def _join_members(self) -> list[str]:
        """Join as a member, and return the streams to follow. After an error, nothing stays open."""
        shared = self._shared
        if self._is_started:
            raise ConfigurationError("a collector can be started only once: create another one")
        if self._streams.names and not shared.workers:
            raise ConfigurationError(
                "the collector follows streams but has no executor for their messages: register one before the start"
            )
        try:
            shared.store.reopen()
            self._streams.open()
            names = self._streams.checked()
            shared.member = shared.store.open(shared.workers, shared.lease_s)
        except BaseException:
            self._streams.close()
            shared.store.dispose()
            raise
        return names

    def _begin(self, names: list[str]) -> None:
        """Start the loop. Does not block."""
        shared = self._shared
        self._is_started = True
        if names:
            assert self._streams.address is not None, "streams are followed on a broker"
            shared.following = Following(shared, self._streams.address, self._type_of)
        shared.loop.start()
        shared.loop.call(shared.begin, names)

    @property
    def _is_storer(self) -> bool:
        """Whether the caller is a handler of `collected`: it must not wait for messages, which are stored after it."""
        call = current_call(self._shared)
        return call is not None and call.is_storing

    def _result_of(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a coroutine function in the loop, and return its result; None if the loop has ended."""
        result = self._shared.loop.run(function, *args)
        if result is None:
            return None
        try:
            return result.result()
        except CancelledError:
            return None
        except BaseException:
            # For example Ctrl-C.
            result.cancel()
            raise


class MessageCollector(Collector, Closing):
    """Collects messages into bulks by type, calls executors with them, and stores the outcome of each message.

    A context manager: entering starts the collector, leaving closes it. Thread-safe. All collectors with one name, in
    any number of processes, are members of one collector: they share its streams and take over from each other.

    Args:
        name: The collector's name.
        broker: The broker's URL, or a `Broker`. None (default): no streams, "spill", takeover or dead-letter stream.
        database: PostgreSQL's URL, or a `Database`.
        streams: Streams and super streams to follow; each message is collected exactly once. Default: none.
        start: Where to begin in a stream never followed before: "first" (default), "next" (its end when this member
            starts; the beginning if the stream is missing then) or an offset.
        bytes_max: Maximum bytes of all held messages. Default: 64 MiB.
        bulks_max: Maximum number of bulks being filled. Default: 64.
        dead_letter_stream: An existing stream or queue for messages that failed for good. None (default): no stream.
        type_of: A function that returns a message's type, or None to pass it over. Default: the property `type`.
        lease_s: Seconds after which others take over from a dead member, at least 1. Default: 15.
        keep_s: Seconds after which a finished message is deleted, and its outcome is unknown again. Default: 7 days.
            None: never. The value of the member that joined last applies.

    Raises:
        InvalidInput: An argument has the wrong type, or is out of range.
        ConfigurationError: An argument needs a broker, and none was given.
    """

    # --- messages in --------------------------------------------------------------------------------------------------

    def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Collect a message. The collector stores it a moment later, and then calls handlers.

        Args:
            message: A message of a stream. Stream and offset identify it: if you give it twice, it is consumed once.
            timeout_s: Seconds to wait for room; 0 does not wait, None (default) waits without limit. A call from a
                handler of `collected` never waits, since no message is stored until it returns. An executor must not
                wait without limit for room of the type that it consumes: room is free only after it returns.

        Returns:
            False if the message was refused and is not stored: its type has no executor, there was no room in time, or
            the collector is closing.

        Raises:
            ConfigurationError: The collector is not running.
            InvalidInput: The argument is not a message of a stream.
            UndecodableMessage: The message's batch cannot be unpacked.
        """
        return self.collect_many([message], timeout_s=timeout_s)[0]

    def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Collect messages in order; see `collect`.

        Args:
            messages: The messages.
            timeout_s: Seconds to wait for room, in total. None (default): without limit.

        Returns:
            Whether each message was taken.
        """
        described = self._described(messages, timeout_s)
        wait_s = 0.0 if self._is_storer else timeout_s
        taken: list[bool] | None = self._result_of(self._shared.collect, described, wait_s)
        return taken or [False] * len(described)

    def flush(self, type: str | None = None) -> None:  # noqa: A002
        """Close the bulks of a type, or of all types, that are being filled, with all messages taken before the call.

        Waits until these messages are stored, except in a handler of `collected`: nothing is stored until that returns.

        Raises:
            InvalidInput: The type has no executor here.
        """
        self._check_flushed(type)
        self._result_of(self._shared.flush, type, not self._is_storer)

    # --- state --------------------------------------------------------------------------------------------------------

    def outcome(self, message_id: str) -> Outcome:
        """Return a message's outcome in this collector, whichever member stored it."""
        checked_name("message_id", message_id)
        return self._shared.store.outcomes_of([message_id])[message_id]

    # --- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join as a member, and start to collect.

        Raises:
            BrokerUnavailable, DatabaseUnavailable: A server is unreachable; safe to retry.
            StreamNotFound: The dead-letter stream is missing. A missing stream to follow is logged and waited for.
            NotAStream: A stream to follow is a queue of another type.
            SchemaMissing: The database has no schema: run `relatum migrate`.
            ConfigurationError: The collector was started before, has streams but no executor, or would publish dead
                letters to a stream that it follows.
        """
        self._begin(self._join_members())

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Refuse new messages, close all bulks, and wait for the executors. Idempotent.

        Messages that are not finished in time, or wait for a retry, are left to other members or the next start.

        Args:
            timeout_s: Seconds to wait for executors. Default: 30. At most five more if PostgreSQL does not answer.

        Returns:
            Whether all bulks were consumed in time. Always False in an executor or a handler, which cannot wait for
            itself: the collector then closes in the background.
        """
        checked_seconds("timeout_s", timeout_s)
        if not self._is_started:
            return True
        if current_call(self._shared) is not None:
            self._shared.loop.run(self._shared.close, timeout_s)
            return False
        self._result_of(self._shared.close, timeout_s)
        self._shared.joined(JOIN_S)
        return self._shared.in_time

    def run(self, stop: threading.Event) -> None:
        """Start, retrying while a server is unreachable; wait until `stop` is set; then close.

        Raises:
            RelatumError: An error that no retry can cure; see `start`.
        """
        checked_event("stop", stop)
        label = self._shared.label("starting")
        for pause in backoff():
            try:
                with within(AfterStop(stop)):
                    self.start()
                break
            except Transient as error:
                self._shared.outages.failed(label, error)
            if stop.wait(pause):
                return
        self._shared.outages.over(label)
        try:
            stop.wait()
        finally:
            # Also after Ctrl-C.
            self.close()

    def __enter__(self) -> Self:
        self.start()
        return self
