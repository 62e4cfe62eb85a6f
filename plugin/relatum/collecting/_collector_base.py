"""What both faces of the message collector are told: options, executors, handlers. And what they can be asked."""

import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

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
from relatum.collecting._bulk import Collected, Executor
from relatum.collecting._collector_core import CollectorLimits
from relatum.collecting._collector_loop import CollectorLoop
from relatum.collecting._collector_options import BULKS_MAX, BYTES_MAX, ExecutorOptions
from relatum.collecting._collector_rows import KEEP_S
from relatum.collecting._collector_statistics import CollectorStatistics
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._handlers import Handler
from relatum.collecting._intake import TypeOf, describe, type_of_property
from relatum.errors import ConfigurationError, InvalidInput
from relatum.limits import INTEGER_MAX
from relatum.processes import of_one_process
from relatum.publishing import DeadLetters
from relatum.reading import AuthMechanism, BrokerAddress, Message, StreamBounds
from relatum.store.database import AnyDatabase

LEASE_S: Final = 15.0
"""Seconds a member's lease holds by default: after so long without a sign of life, others take its messages over."""

LEASE_MIN_S: Final = 1.0
"""Seconds a lease holds at least: a busy process that renews later than this would lose its messages to others."""

StartAt = Literal["first", "next"] | int
"""Where to begin with a stream that was never followed: its first message, what is published from now on, an offset."""

ExecutorT = TypeVar("ExecutorT")


class Collector(Generic[ExecutorT]):
    """The options of a collector, its executors and handlers.

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
        self._streams = list(dict.fromkeys(checked_names("streams", streams)))
        self._plain: set[str] = set()
        self._start = _checked_start(start)
        self._type_of = type_of
        if self._address is None and (self._streams or dead_letter_stream):
            raise ConfigurationError("streams are followed, and dead letters published, on a broker: give `broker`")
        if dead_letter_stream in self._streams:
            raise _endless(dead_letter_stream)
        self._dead_letters: DeadLetters | None = None
        if self._address is not None and dead_letter_stream:
            self._dead_letters = DeadLetters(self._address, dead_letter_stream)
        self._shared = CollectorLoop(
            CollectorStore(name, database, vhost="/" if self._address is None else self._address.vhost, keep_s=keep_s),
            CollectorLimits(bytes_max, bulks_max),
            lease_s=lease_s,
            broker="" if self._address is None else str(self._address),
        )
        self._executors: dict[str, Executor] = {}
        self._is_started = False
        of_one_process(self, "a collector")
        metrics.report(self._shared, collector=self.name)

    def _check_startable(self) -> None:
        """Refuse what would go wrong from the start."""
        if self._is_started:
            raise ConfigurationError("a collector is started once")
        if self._streams and not self._executors:
            raise ConfigurationError(
                "streams are followed for executors: register one before the start, or all messages are passed over"
            )

    def _checked_followed(self, names: list[str]) -> list[str]:
        """The streams to follow, none of which may be the one for dead letters."""
        if self._dead_letters is not None and self._dead_letters.stream in names:
            raise _endless(self._dead_letters.stream)
        return names

    def _check_awaited(self, called: Callable[..., object]) -> None:
        """Refuse a coroutine function where this face would not await it."""

    def _called_in_thread(self, executor: ExecutorT) -> Executor:
        """The executor as a worker calls it, in its thread; refuses what this face could not call."""
        raise NotImplementedError

    def _initial(self, bounds: StreamBounds) -> int:
        """Where to begin with a stream that was never followed."""
        if self._start == "next":
            return bounds.end
        return bounds.first or 0 if self._start == "first" else self._start

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
        called = self._called_in_thread(executor)
        self._shared.core.register(type, options)
        # Told from the start, as 0.
        self._shared.counts[type]
        self._executors[type] = called

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
        if type_ is not None and checked_name("type", type_) not in self._executors:
            raise InvalidInput(f"type {type_!r} has no executor in this collector: there is no bulk of it to flush")

    # --- what it knows --------------------------------------------------------------------------------------------

    def statistics(self) -> CollectorStatistics:
        """What this member has counted, and what it holds. It asks nobody."""
        return self._shared.statistics()

    @property
    def held_messages(self) -> int:
        """Messages this member has taken and is not done with."""
        return self._shared.core.held_messages

    @property
    def held_bytes(self) -> int:
        """What counts towards `bytes_max`."""
        return self._shared.core.held_bytes

    @property
    def passed_over(self) -> int:
        """Messages this member met whose type has no executor."""
        return self._shared.intake.passed_over

    @property
    def refused(self) -> int:
        """Messages that `collect` refused: for want of room in time, at the end, or since they cannot be stored."""
        return self._shared.intake.refused


def _endless(stream: str | None) -> ConfigurationError:
    return ConfigurationError(
        f"{stream!r} is followed, and dead letters are to be published to it: each would be collected again, for ever"
    )


def _checked_start(start: StartAt) -> StartAt:
    is_offset = isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= INTEGER_MAX
    if start not in ("first", "next") and not is_offset:
        raise InvalidInput(f"start= takes 'first', 'next' or an offset, not {shown(start)}")
    return start
