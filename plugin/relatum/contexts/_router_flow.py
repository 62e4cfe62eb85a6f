"""The steps of publishing through a router, over pika or aio-pika.

Coroutines define the flow once. The asyncio router awaits them. The blocking router runs them without an event loop:
there they await only blocking code, so they never suspend.
"""

import copy
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from relatum.common.checks import checked_seconds, shown
from relatum.common.headers import PLACED_HEADER
from relatum.common.ids import MessageId
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import Deadline
from relatum.contexts._context_options import AffinityOptions, ContextOptions, RouterOptions, RouterStatistics
from relatum.contexts._placement_cache import NameLocks, Sent
from relatum.contexts._placements import PartitionRow, Placement
from relatum.contexts._router_core import RouterCore, outcome_unknown
from relatum.contexts._router_sets import Predecessors, SetLifecycle, SetPlace, set_request_of
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishRejected, PublishUnroutable
from relatum.reading import Broker
from relatum.store.database import AnyDatabase
from relatum.superstreams.connections import vhost_of
from relatum.superstreams.targets import aiormq_connection, channel_of, was_returned

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

Options = TypeVar("Options", bound=RouterOptions)
T = TypeVar("T")


_NO_PROPERTIES: Final = BasicProperties()


@dataclass(frozen=True, slots=True)
class PikaCall:
    channel: Any
    body: bytes | str
    properties: BasicProperties | None
    routing_key: str
    mandatory: bool

    @property
    def envelope(self) -> Any:
        """The object with the message's headers and its `message_id`."""
        return self.properties or _NO_PROPERTIES

    def require_confirms(self) -> None:
        if not isinstance(self.channel, BlockingChannel):
            raise ConfigurationError(
                "messages of a context or an affinity set need a BlockingChannel of pika, not "
                f"{type(self.channel).__name__}; nothing was sent"
            )
        if not self.channel._delivery_confirmation:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: channel.confirm_delivery(); nothing was sent"
            )

    async def source(self) -> Any:
        return self.channel

    async def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        own = copy.copy(self.properties) if self.properties else BasicProperties()
        own.headers = headers
        return self.channel.basic_publish(core.super_stream, placement.binding_key, self.body, own, mandatory=True)

    async def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        try:
            result = self.channel.basic_publish(
                core.super_stream, partition.binding_key, self.body, self.properties, mandatory=self.mandatory
            )
        except UnroutableError:
            core.has_layout = False
            raise
        core.published_unnamed()
        return result


@dataclass(frozen=True, slots=True)
class AioPikaCall:
    """A publish through aio-pika: the arguments of `Exchange.publish`, and the methods of `PikaCall`."""

    target: "AbstractChannel | AbstractExchange"
    message: "AbstractMessage"
    routing_key: str
    kwargs: dict[str, Any]

    @property
    def envelope(self) -> Any:
        return self.message

    def require_confirms(self) -> None:
        if not channel_of(self.target).publisher_confirms:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: open the channel with "
                "publisher_confirms=True; nothing was sent"
            )

    async def source(self) -> Any:
        return await aiormq_connection(channel_of(self.target))

    async def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        own: Any = copy.copy(self.message)
        own.headers = headers
        result = await self._publish(core, own, placement.binding_key, {**self.kwargs, "mandatory": True})
        if was_returned(result):
            raise PublishUnroutable(
                f"the message of {placement.name!r} was returned: {placement.stream!r} is not bound; bind it again",
                in_stream=False,
            )
        return result

    async def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        result = await self._publish(core, self.message, partition.binding_key, self.kwargs)
        if was_returned(result):
            core.has_layout = False
        else:
            core.published_unnamed()
        return result

    async def _publish(self, core: RouterCore, message: Any, binding_key: str, kwargs: dict[str, Any]) -> Any:
        exchange = await channel_of(self.target).get_exchange(core.super_stream, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)


Call: TypeAlias = PikaCall | AioPikaCall


def run_blocking(flow: Callable[..., Coroutine[Any, Any, T]], *args: Any, **options: Any) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        flow(*args, **options).send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("a blocking flow was suspended")


class ThreadLock:
    """A thread lock for `async with`, which blocks and never suspends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class RouterBase(Generic[Options]):
    """The flow of a message through a blocking router. The asyncio router overrides some methods."""

    _options_class: Any

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: Options | None = None,
        *,
        broker: str | Broker | None = None,
    ) -> None:
        self._options: Options = self._options_class() if options is None else options
        if not isinstance(self._options, self._options_class):
            raise ConfigurationError(f"options= takes {self._options_class.__name__}, not {shown(options)}")
        self._core = RouterCore(super_stream, database, self._options, broker=broker)
        self._create_parts()
        refuse_in_child(self, "a router")

    def _create_parts(self) -> None:
        """Create the objects that this kind of router needs in addition to its core."""
        self._locks = NameLocks(ThreadLock)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    @property
    def session(self) -> str:
        """The router's id in its messages' header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.name

    def statistics(self) -> RouterStatistics:
        """Return the counts since the router was opened. No I/O."""
        return self._core.statistics()

    # --- methods that the asyncio router overrides ------------------------------------------------------------------

    async def _call(self, function: Callable[..., T], *args: Any, to_end: bool = True) -> T:
        """Make a blocking call. `to_end`: it completes even if cancelled, as later messages must not overtake it."""
        return function(*args)

    async def _end(self, function: Callable[[], None]) -> None:
        function()

    def _for_application(self, flow: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Callable[..., Any]:
        """Return a flow as a function that the application can call, or await."""
        return partial(run_blocking, flow, *args)

    def _settle_set(self, name: str) -> None:
        """Settle a name. The thread of `SetLifecycle` calls this."""
        run_blocking(self._settle_name, name)

    # --- the flow ---------------------------------------------------------------------------------------------------

    async def _connect(self, call: Call, *, with_database: bool = True) -> None:
        source = await call.source()
        await self._call(partial(self._core.open, source, with_database=with_database), to_end=False)

    async def _publish(self, call: Call) -> Any:
        raise NotImplementedError

    async def _publish_locked(self, call: Call, name: str, *, stream: str | None = None) -> tuple[Placement, Any]:
        """Publish a message, and return its placement and the client's result. The caller holds the name's lock."""
        call.require_confirms()
        core, publications = self._core, self._core.publications
        if not core.is_open:
            await self._connect(call)
        core.check_vhost(vhost_of(await call.source()))
        placement = publications.at_hand(name)
        if placement is None:
            placement = await self._call(publications.place, name, stream)
        sent = publications.next_of(placement)
        try:
            headers = {**(call.envelope.headers or {}), core.options.header: sent.name, PLACED_HEADER: str(sent.wanted)}
            result = await call.send_named(core, placement, headers)
        except PublishOutcomeUnknown as error:
            error.settle = self._for_application(self._settle_unknown, error.settle, sent)
            raise
        with outcome_unknown(name, self._for_application(self._settle, name)):
            if not publications.is_known_valid(sent):
                await self._call(partial(publications.settle, name, must=False))
        core.published()
        return placement, result

    async def _unnamed_partition(self, call: Call) -> PartitionRow:
        """Choose the partition of a message without a name. Needs no database."""
        core = self._core
        if not core.has_layout:
            await self._connect(call, with_database=False)
        core.check_vhost(vhost_of(await call.source()))
        return core.unnamed(call.routing_key)

    async def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        async with self._locks(name):
            await self._call(self._core.publications.settle, name, timeout_s)

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[()]:
        """Wait until a confirmed message is valid. Returns no places: its partition is known."""
        with outcome_unknown(name, self._for_application(self._settle, name)):
            await self._settle_name(name, timeout_s)
        return ()

    async def _settle_unknown(
        self, settle: Callable[..., Any], sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> tuple[MessageId, ...]:
        """Settle a message without a confirm: return its places, or raise `PublishRejected` if it is not valid."""
        deadline = Deadline(timeout_s)
        found = settle(timeout_s, streams=streams or (sent.stream,))
        places: tuple[MessageId, ...] = await found if isawaitable(found) else found
        left_s = None if timeout_s is None else deadline.left_s()
        if await self._call(self._core.publications.counts, sent, left_s):
            return places
        raise PublishRejected(
            f"the message of {sent.name!r} reached {sent.stream!r} after its context had moved, so serial consumers "
            "skip it: publish it again",
            in_stream=False,
        )

    async def _check(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            await self._settle_name(name, timeout_s)

    async def _close(self) -> None:
        try:
            if self._core.is_open:
                await self._check()
        finally:
            await self._end(self._core.close)


class ContextFlow(RouterBase[ContextOptions]):
    _options_class = ContextOptions

    async def _publish(self, call: Call) -> Any:
        name = self._core.name_of(call.envelope.headers)
        if name is None:
            return await call.send_unnamed(self._core, await self._unnamed_partition(call))
        # Do not suspend before the lock: messages of a name are published in the order of the calls.
        async with self._locks(name):
            return (await self._publish_locked(call, name))[1]


class AffinityFlow(RouterBase[AffinityOptions]):
    _options_class = AffinityOptions

    def _create_parts(self) -> None:
        super()._create_parts()
        self._predecessors = Predecessors(self._core, self._options.predecessors_max)
        self._sets = SetLifecycle(self._core, self._settle_set)

    async def _publish(self, call: Call) -> Any:
        core, sets, predecessors = self._core, self._sets, self._predecessors
        request = set_request_of(call.envelope.headers, core.options.header)
        # For a cached set, do not suspend before its lock: its messages are published in the order of the calls.
        place = predecessors.cached(request)
        if place is None:
            await self._connect(call)
            place = await self._call(predecessors.find, request.predecessor, to_end=False)
        if place.name is None:
            # To the predecessor's partition, or by the balance rule.
            partition = core.active(place.stream or "") or await self._unnamed_partition(call)
            result = await call.send_unnamed(core, partition)
            predecessors.remember(SetPlace(None, partition.stream), call.envelope.message_id)
            return result
        async with self._locks(place.name):
            if sets.is_ending(place.name):
                await self._call(sets.close_ended, place.name)
            placement, result = await self._publish_locked(call, place.name, stream=place.stream)
            predecessors.remember(SetPlace(placement.name, placement.stream), call.envelope.message_id)
            sets.record_use(placement.name, placement.epoch, is_last=request.is_last)
        return result

    async def _close(self) -> None:
        try:
            await self._end(self._sets.close)
        finally:
            await super()._close()
