"""The state of an intercepted connection, which its channels share; and how methods of its objects are replaced."""

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from relatum import metrics
from relatum.common.checks import as_options, checked_choice, checked_name, checked_seconds
from relatum.common.closing import close_when_dropped, close_within
from relatum.common.processes import of_one_process
from relatum.common.waiting import in_thread
from relatum.errors import (
    ConfigurationError,
    PublishError,
    PublishNacked,
    PublishRejected,
    PublishUnroutable,
)
from relatum.keys import AGREE_S, KeyAgreement, KeyDefinition
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported
from relatum.publishing._embedded import EmbeddedRecorders, warn_of_left
from relatum.publishing._locate import Locator
from relatum.publishing._stamp import OnInvalid, Stamper
from relatum.reading import Broker, BrokerAddress
from relatum.store.address import parse_database
from relatum.store.database import AnyDatabase, Database
from relatum.superstreams.connections import address_of

if TYPE_CHECKING:
    from relatum.recording.embedded import EmbeddedRecorder

RecorderChoice: TypeAlias = Literal["embedded", "external"]

ATTRIBUTE: Final = "_relatum_interception"
"""The attribute of an intercepted connection that holds its interception."""

_WATCHED_MAX: Final = 4096
"""Pairs of exchange and routing key cached as watched: topics may be any number."""

RELEASE_S: Final = 2.0
"""Seconds that `release` may take."""

_FORGET_S: Final = 60.0
"""Seconds after which the recorder gets a pair again that is still used."""

_REASONS: Final[tuple[tuple[type[PublishError], str], ...]] = (
    (PublishUnroutable, "unroutable"),
    (PublishNacked, "nacked"),
    (PublishRejected, "rejected"),
)


@reported("client")
@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStatistics:
    """Counts of an intercepted connection.

    Attributes:
        connections: 1 until the connection is released, then 0.
        published: Messages sent, regardless of their outcome.
        errors: Messages sent whose publish failed, by reason: "unroutable", "nacked", "rejected", "unknown".
        skipped: Values that will not be recorded (`on_invalid="skip"`), by reason.
        receipt_s: Seconds from sending until a receipt had the message's places.
        left: Messages that `release` left to the next recorder, by stream; None: their number is unknown. Empty before
            `release`, if all messages were recorded, and if other connections still use the recorder.
    """

    connections: Annotated[int, Gauge("relatum_publisher_connections", "Intercepted connections")]
    published: Annotated[int, Counter("relatum_publisher_published_total", "Messages sent")]
    errors: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_errors_total", "Messages sent whose publish failed", by="reason"),
    ]
    skipped: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_skipped_values_total", "Values published that will not be recorded", by="reason"),
    ]
    receipt_s: Annotated[
        Observed,
        Distribution("relatum_publisher_receipt_seconds", "Time from sending until the message's offsets are known"),
    ]
    left: Mapping[str, int | None]


class PublisherCounts:
    """The counters of one connection, updated by the thread or event loop that publishes on it.

    The object refers to no other, so it may outlive the connection.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.published = 0
        self.errors: Counts[str] = Counts()
        self.skipped: Counts[tuple[str, str]] = Counts()
        """By key and reason."""
        self.receipt_s = Histogram()
        self.left: Mapping[str, int | None] = {}

    def failed(self, error: PublishError) -> PublishError:
        """Count the error of a message already counted as published."""
        self.errors[next((reason for kind, reason in _REASONS if isinstance(error, kind)), "unknown")] += 1
        return error

    def sent_and_failed(self, error: PublishError) -> PublishError:
        self.published += 1
        return self.failed(error)

    def statistics(self) -> PublisherStatistics:
        skipped: Counts[str] = Counts()
        for (_, reason), count in list(self.skipped.items()):
            skipped[reason] += count
        return PublisherStatistics(
            connections=int(self.is_open),
            published=self.published,
            errors=dict(self.errors),
            skipped=dict(skipped),
            receipt_s=self.receipt_s.observed(),
            left=dict(self.left),
        )


@dataclass(frozen=True)
class Options:
    """The arguments of `intercept`. A second call for the same connection must have equal ones."""

    database: "AnyDatabase | None"
    definitions: tuple[KeyDefinition, ...]
    recorder: RecorderChoice
    on_invalid: OnInvalid
    streams: tuple[str, ...]
    broker: str | Broker | None
    confirm_timeout_s: float | None
    copy_to: str | None = None

    def __post_init__(self) -> None:
        with as_options():
            checked_choice("recorder", self.recorder, ("embedded", "external"))
            checked_choice("on_invalid", self.on_invalid, ("raise", "skip"))
            if self.confirm_timeout_s is not None:
                checked_seconds("confirm_timeout_s", self.confirm_timeout_s, zero=False)
            if self.copy_to is not None:
                checked_name("copy_to", self.copy_to)
        if self.broker is not None:
            BrokerAddress.of(self.broker)
        if self.database is not None and not isinstance(self.database, Database):
            parse_database(self.database)


class Interception:
    def __init__(self, options: Options, connection: Any, client: str) -> None:
        self.options = options
        self.active = True
        """False once released: calls then pass through unchanged."""
        self.counts = PublisherCounts()
        self._connection = connection
        self._stampers: dict[int, Stamper] = {}
        self._watched: set[tuple[str | bytes, str | bytes]] = set()
        self._forget_at = monotonic() + _FORGET_S
        self._recorder: EmbeddedRecorder | None = None
        self._agree_until = monotonic() + AGREE_S
        self._waiting_to_agree = 0
        self._turn = asyncio.Lock()
        self._locator: Locator | None = None
        self.watches = options.database is not None and options.recorder == "embedded"
        """Whether this process records, and must learn where messages go."""
        if options.database is not None and (self.watches or options.definitions):
            self._recorder = EmbeddedRecorders.acquire(
                self.address(), options.database, options.definitions, records=self.watches
            )
            for stream in (*options.streams, *filter(None, [options.copy_to])):
                self.watch("", stream)
        self.agreement = KeyAgreement() if self._recorder is None else self._recorder.agreement
        if self._recorder is None:
            self.agreement.tell(None)
        of_one_process(self, "an intercepted connection")
        metrics.report(self.counts, owner=self, client=client)

    def check_usable(self) -> None:
        """Does nothing; in a child of the process, `of_one_process` makes it raise `UsedAfterFork`."""

    def address(self) -> BrokerAddress:
        """Return the address and user for reading streams: the option `broker`, or the client's connection."""
        return address_of(self.options.broker or self._connection)

    def stamper(self, frame_bytes_max: int, **client: Any) -> Stamper:
        """Return the stamper for a frame size. `client`: Options of `Stamper` that depend on the client."""
        stamper = self._stampers.get(frame_bytes_max)
        if stamper is None:
            stamper = self._stampers[frame_bytes_max] = Stamper(
                self.options.definitions,
                on_invalid=self.options.on_invalid,
                frame_bytes_max=frame_bytes_max,
                skipped=self.counts.skipped,
                agreement=self.agreement,
                **client,
            )
        return stamper

    def await_agreement(self, *, may_wait: bool) -> None:
        """Raise a known conflict with the database's key definitions, unless `on_invalid="skip"`."""
        if may_wait:
            self.agreement.wait(self._agree_until - monotonic())
        if self.options.on_invalid == "raise":
            self.agreement.check()

    @property
    def has_agreed(self) -> bool:
        """Whether publishes need not wait for `agreed`."""
        return not self._waiting_to_agree and (self.agreement.is_asked or monotonic() >= self._agree_until)

    async def agreed(self) -> None:
        """Wait for the database's first answer until a second after `intercept`. Publishes keep their order."""
        if self.has_agreed:
            return
        self._waiting_to_agree += 1
        try:
            async with self._turn:
                if not self.agreement.is_asked:
                    await in_thread(None, self.agreement.wait, self._agree_until - monotonic())
        finally:
            self._waiting_to_agree -= 1

    @property
    def locator(self) -> Locator:
        """The locator that finds messages of this connection in the table or in their streams."""
        if self._locator is None:
            named, records = frozenset(self.options.streams), self.watches
            locator = Locator(self.address(), self.options.database, named, self.counts.receipt_s, records=records)
            if self._recorder is not None:
                self._recorder.hurry(locator.waits)
            # For connections that are garbage-collected without `release`.
            close_when_dropped(self, locator.close)
            self._locator = locator
        return self._locator

    def check_receipts(self) -> None:
        """Check that receipts are possible: there is a database, and it defines the keys in the same way."""
        if self.options.database is None:
            raise ConfigurationError("a receipt needs the database: intercept the connection with database=URL")
        self.agreement.check()

    def watch(self, exchange: Any, routing_key: Any) -> None:
        """Make the embedded recorder, if any, record the streams of a route. A known route costs a set lookup.

        Values that are not names are ignored: the client refuses them.
        """
        recorder = self._recorder if self.watches else None
        if recorder is None or not (isinstance(exchange, (str, bytes)) and isinstance(routing_key, (str, bytes))):
            return
        now = monotonic()
        if now >= self._forget_at or len(self._watched) >= _WATCHED_MAX:
            # The recorder asks the broker again, for streams that were declared or bound since.
            self._watched.clear()
            self._forget_at = now + _FORGET_S
        if (exchange, routing_key) not in self._watched:
            self._watched.add((exchange, routing_key))
            recorder.watch(exchange, routing_key)

    def release(self) -> None:
        """Pass calls through from now on, and release the recorder and the connections for reading.

        Returns within `RELEASE_S`, even if no server answers. Connections still open then are closed in the background;
        messages unrecorded by then are logged and counted.
        """
        self.active = self.counts.is_open = False
        metrics.retire(self.counts)
        recorder, self._recorder = self._recorder, None
        locator, self._locator = self._locator, None
        if recorder is not None and not EmbeddedRecorders.give_back(recorder):
            # Other connections use the recorder.
            recorder = None
        closing = [each.close for each in (recorder, locator) if each is not None]

        def close() -> None:
            for each in closing:
                each()

        if closing:
            close_within(close, RELEASE_S, name="relatum-release")
        if recorder is not None:
            self.counts.left = recorder.left()
            warn_of_left("relatum.release(…)", self.counts.left)


def interception_of(connection: object) -> Any:
    """Return a connection's interception (an app's or broker object's `ProcessInterceptions`), or None."""
    interception = getattr(connection, ATTRIBUTE, None)
    return interception if interception is not None and interception.active else None


# --- replaced methods of one object; classes are not changed ----------------------------------------------------------


class Replacement:
    """Replaces a method of one object and resembles it: decorators check its name, and whether it is awaited.

    `replaced` is the object's own earlier attribute, None if it had none; `__wrapped__` is the replaced method.
    """

    replaced: Any = None

    @property
    def __class__(self) -> Any:
        """The method's class: `inspect` and `unittest.mock` use it to recognise a method."""
        return self.__wrapped__.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        # `relatum.common.processes` sets it to end the object in a child.
        vars(object)["__class__"].__set__(self, kind)

    def __getattr__(self, name: str) -> Any:
        # `inspect` reads attributes, such as the code object, to see whether a function returns a coroutine.
        if name == "__wrapped__" or not vars(self):
            raise AttributeError(name)  # `copy` has not set the attributes yet.
        return getattr(self.__wrapped__, name)


class LateBound(Replacement):
    """Looks the method up at each call: its class may be instrumented later. `owner` returns the object."""

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner = owner
        self._name = name

    @property
    def __wrapped__(self) -> Any:
        """The object's method, or what another library had set instead."""
        if self.replaced is not None:
            return self.replaced
        owner = self._owner()
        return getattr(type(owner), self._name).__get__(owner)


class Watch(LateBound):
    """A wrapper of a client's method: calls it, then `after(result, *args, **kwargs)`."""

    def __init__(self, owner: Callable[[], Any], name: str, after: Callable[..., None]) -> None:
        super().__init__(owner, name)
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        self._after(result, *args, **kwargs)
        return result


def put(owner: Any, name: str, replacement: Replacement) -> None:
    replacement.replaced = vars(owner).get(name)
    wrapped = replacement.__wrapped__
    # The replacement's class has these too, so `__getattr__` is not called for them.
    replacement.__doc__, replacement.__module__ = wrapped.__doc__, wrapped.__module__
    setattr(owner, name, replacement)


def put_back(owner: Any, name: str) -> None:
    """Restore the original method. Wrappers that others have added since stay."""
    present = vars(owner).get(name)
    if isinstance(present, Replacement):
        if present.replaced is None:
            delattr(owner, name)
        else:
            setattr(owner, name, present.replaced)
