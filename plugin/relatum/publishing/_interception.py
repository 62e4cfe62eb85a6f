"""The state that all channels of an intercepted connection share, and the replacement of methods of single objects."""

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial, update_wrapper
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pika import BlockingConnection
from pika.connection import Connection

from relatum import metrics
from relatum.common.checks import as_options, checked_choice, checked_name, checked_seconds
from relatum.common.closing import close_when_dropped, close_within
from relatum.common.processes import refuse_in_child
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
from relatum.publishing import _embedded
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
"""Watched pairs of exchange and routing key that are cached: an application may use any number of routing keys."""

RELEASE_S: Final = 2.0
"""Seconds that `release` may take."""

_WATCH_AGAIN_S: Final = 60.0
"""Seconds after which a route that is still used is passed to the recorder again."""

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
        errors: Sent messages whose publish failed, by reason: "unroutable", "nacked", "rejected", "unknown".
        skipped: Values that will not be recorded (`on_invalid="skip"`), by reason.
        receipt_s: Seconds from sending until a receipt had the message's places.
        left: Messages that were unrecorded when `release` returned, by stream; None: an unknown number. The next
            recorder records them. Empty before `release`, and if other connections still use the recorder.
    """

    connections: Annotated[int, Gauge("relatum_publisher_connections", "Intercepted connections")]
    published: Annotated[int, Counter("relatum_publisher_published_total", "Messages sent")]
    errors: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_errors_total", "Sent messages whose publish failed", by="reason"),
    ]
    skipped: Annotated[
        Mapping[str, int],
        Counter("relatum_publisher_skipped_values_total", "Published values that will not be recorded", by="reason"),
    ]
    receipt_s: Annotated[
        Observed,
        Distribution("relatum_publisher_receipt_seconds", "Time from sending until the message's offsets are known"),
    ]
    left: Mapping[str, int | None]


class PublisherCounts:
    """The counters of one connection, updated by the thread or event loop that publishes on it.

    They hold no reference to the connection, and may outlive it.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.published = 0
        self.errors: Counts[str] = Counts()
        self.skipped: Counts[tuple[str, str]] = Counts()
        """Counts by (key, reason)."""
        self.receipt_s = Histogram()
        self.left: Mapping[str, int | None] = {}

    def failed(self, error: PublishError) -> PublishError:
        """Count and return the error of a message that is already counted as published."""
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
        """False after `release`: calls then pass through unchanged."""
        self.counts = PublisherCounts()
        self._connection = connection
        self._stampers: dict[int, Stamper] = {}
        self._watch: Callable[[Any, Any, float], None] | None = None
        self._recorder: EmbeddedRecorder | None = None
        self._agreement_deadline_s = monotonic() + AGREE_S
        self._agreement_lock = asyncio.Lock()
        self._locator: Locator | None = None
        self.records = options.database is not None and options.recorder == "embedded"
        """Whether this process records the streams that the connection publishes to."""
        if options.database is not None and (self.records or options.definitions):
            recorder = self._recorder = _embedded.acquire(self, self.address(), options.database, options.definitions)
            if self.records:
                # Once in each period, so that the recorder finds streams that were declared or bound since.
                self._watch = lru_cache(_WATCHED_MAX)(lambda exchange, key, _period: recorder.watch(exchange, key))
            for stream in (*options.streams, *filter(None, [options.copy_to])):
                self.watch("", stream)
        self.agreement = KeyAgreement() if self._recorder is None else self._recorder.agreement
        if self._recorder is None:
            self.agreement.tell(None)
        refuse_in_child(self, "an intercepted connection")
        metrics.report(self.counts, owner=self, client=client)

    def check_usable(self) -> None:
        """Raise `UsedAfterFork` in a forked child, by `refuse_in_child`; otherwise do nothing."""

    @property
    def is_lost(self) -> bool:
        """Whether a pika connection has ended: it cannot be opened again."""
        if not isinstance(self._connection, BlockingConnection | Connection) or not self._connection.is_closed:
            return False
        # A callback connection that is not open yet is closed, too.
        return isinstance(self._connection, BlockingConnection) or self.counts.published > 0

    def address(self) -> BrokerAddress:
        """Return the address and login for reading streams: those of the option `broker`, or of the connection."""
        return address_of(self.options.broker or self._connection)

    def stamper(self, frame_bytes_max: int, **client: Any) -> Stamper:
        """Return the stamper for a frame size. `client`: options of `Stamper` that depend on the client."""
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
        """Wait for the database's key definitions if `may_wait`. Raise a conflict, unless `on_invalid="skip"`."""
        if may_wait:
            self.agreement.wait(self._agreement_deadline_s - monotonic())
        if self.options.on_invalid == "raise":
            self.agreement.check()

    async def wait_for_definitions(self) -> None:
        """Wait up to a second after `intercept` for the database's key definitions. Publishes keep their order."""
        async with self._agreement_lock:
            if not self.agreement.is_asked and (left_s := self._agreement_deadline_s - monotonic()) > 0:
                await in_thread(None, self.agreement.wait, left_s)

    @property
    def locator(self) -> Locator:
        """The locator of this connection's messages; the first call creates it."""
        if self._locator is None:
            named, records = frozenset(self.options.streams), self.records
            locator = Locator(self.address(), self.options.database, named, self.counts.receipt_s, records=records)
            if self._recorder is not None:
                self._recorder.poll_soon(locator.waits)
            # Close the locator even if the connection is garbage-collected without `release`.
            close_when_dropped(self, locator.close)
            self._locator = locator
        return self._locator

    def locator_or_error(self) -> Locator | ConfigurationError:
        """Return the locator, or the error why this login cannot read streams, which only `settle` raises."""
        try:
            return self.locator
        except ConfigurationError as error:
            return error

    def check_receipts(self) -> None:
        """Check that receipts are possible: there is a database, and no known conflict with its key definitions."""
        if self.options.database is None:
            raise ConfigurationError("a receipt needs the database: intercept the connection with database=URL")
        self.agreement.check()

    def watch(self, exchange: Any, routing_key: Any) -> None:
        """Make the embedded recorder, if any, record the streams of a route. Values that are not names are ignored."""
        watch = self._watch
        if watch is not None and isinstance(exchange, (str, bytes)) and isinstance(routing_key, (str, bytes)):
            watch(exchange, routing_key, monotonic() // _WATCH_AGAIN_S)

    def release(self) -> None:
        """Stop stamping, and release the recorder and the connections for reading.

        Returns within `RELEASE_S`, even if no server answers. Connections still open then are closed in the background;
        messages still unrecorded are logged and counted.
        """
        self.active = self.counts.is_open = False
        metrics.retire(self.counts)
        recorder, self._recorder, self._watch = self._recorder, None, None
        locator, self._locator = self._locator, None
        if recorder is not None and not _embedded.release(self, recorder):
            # Other connections use the recorder.
            recorder = None

        def close() -> None:
            for resource in (recorder, locator):
                if resource is not None:
                    resource.close()

        close_within(close, RELEASE_S, name="relatum-release")
        if recorder is not None:
            self.counts.left = recorder.left()
            _embedded.warn_of_unrecorded("relatum.release(…)", self.counts.left)


def interception_of(connection: object) -> Any:
    """Return the `Interception` of a connection or the `ProcessInterceptions` of an app or broker object, or None."""
    interception = getattr(connection, ATTRIBUTE, None)
    return interception if interception is not None and interception.active else None


# --- replaced methods of one object; classes are not changed ----------------------------------------------------------


class _Replacement(partial[Any]):
    """Stands in for a method. `replaced` is the attribute that the object itself had before, or None."""

    replaced: Any = None
    users = 0
    """The number of calls that use the replacement of a shared Celery producer; the last one removes it."""

    def __getattr__(self, name: str) -> Any:
        # Other libraries read a function's attributes, such as its code object.
        return getattr(vars(self)["__wrapped__"], name)


def install(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object by `function(original, owner, …)`, which looks like the method.

    `original()` returns the method to call: its class may be instrumented later.
    """
    setattr(owner, name, _imitation(owner, name, function, vars(owner).get(name)))


def _imitation(owner: Any, name: str, function: Callable[..., Any], replaced: Any) -> Any:
    """Return a method that `inspect`, decorators and weak references take for the original one."""
    bound, of_class = getattr(owner, name), getattr(type(owner), name, None)

    def original() -> Any:
        if replaced is not None:
            return replaced
        # A test may replace the class's method by an object that is no function.
        found: Any = getattr(type(owner), name, None)
        if found is of_class:
            return bound
        return found.__get__(owner) if hasattr(found, "__get__") else found

    wrapped = original()
    replacement: Any
    if isinstance(wrapped, MethodType):
        replacement = update_wrapper(_Replacement(function, original), wrapped.__func__)
        imitation: Any = MethodType(replacement, owner)
    else:
        imitation = replacement = update_wrapper(_Replacement(function, original, owner), wrapped)
        # OpenTelemetry's instrumentation of pika sets and restores this attribute. The method stays intercepted then.
        # A mock has any attribute, but not in its dictionary.
        bare = getattr(wrapped, "__dict__", {}).get("_original_function")
        if bare is not None:
            replacement._original_function = _imitation(owner, name, function, bare)
    replacement.replaced = replaced
    return imitation


def uninstall(owner: Any, name: str) -> None:
    """Restore the original method. Later wrappers of other libraries stay."""
    replacement = installed(owner, name)
    if replacement is not None:
        if replacement.replaced is None:
            del vars(owner)[name]
        else:
            setattr(owner, name, replacement.replaced)


def installed(owner: Any, name: str) -> _Replacement | None:
    """Return what replaces a method now; None if it is the original, or a later wrapper of another library."""
    current = vars(owner).get(name)
    replacement = current.__func__ if type(current) is MethodType else current
    # `isinstance` would also be true for another library's proxy of a replacement.
    return replacement if type(replacement) is _Replacement else None
