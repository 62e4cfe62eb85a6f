"""rstream: the only module that imports it, and only once somebody has such a producer.

A producer's `send`, `send_wait`, `send_batch` and `send_sub_entry` are stood in for, as attributes of the very
producer. They hand on a stand-in for each message, whose bytes are the stamped ones and whose publishing id is the
caller's message's own: rstream writes it there. A super stream's producer makes a producer of its own when it first
sends, which is intercepted then; routing and its functions see the caller's message.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any, Final

from rstream import AMQPMessage, CompressionType, Producer, SuperStreamProducer
from rstream.exceptions import ServerError
from rstream.utils import RawMessage

from relatum.errors import PublishError, PublishOutcomeUnknown, PublishRejected
from relatum.ids import MessageId
from relatum.processes import of_one_process
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._locate import Sent
from relatum.publishing._publish_errors import outcome
from relatum.publishing._receipt import AsyncReceipt
from relatum.publishing._settle import Unsettled, final_at
from relatum.publishing.clients._attributes import Late, Replacement, put, put_back
from relatum.publishing.clients._encoded_messages import Ready, are_plain, plainly_ready, ready
from relatum.publishing.clients._rstream_frames import (
    AROUND_MAX,
    check_message,
    check_sub_entry,
    frame_bytes_max,
    in_frames,
)
from relatum.wire import plain_message

NAME: Final = "rstream"
"""The client, as metrics name it."""

IS_OF_PROCESSES: Final = False
"""Whether it is made before processes are forked off that publish."""

_ONE: Final = {"send": "message", "send_wait": "message"}
_MANY: Final = {"send_batch": "batch", "send_sub_entry": "sub_entry_messages"}
_SENDS: Final = {**_ONE, **_MANY}
"""What sends, and the name of the argument that holds what is sent; the stream comes before it."""

_PROPERTIES_END: Final = 4
_BODY: Final = 5
"""Places in rstream's message: header, annotations and properties come first, then headers and the body."""

_PRODUCER_OF: Final = "_get_producer"
_EXTRACTOR: Final = "_filter_value_extractor"

_routed: ContextVar[dict[int, Ready] | None] = ContextVar("relatum_rstream_routed", default=None)
"""The message that a super stream's producer sends now: with one stamp, to however many partitions."""


class Stamped:
    """Stands in for a message on its way: the caller's own, but for its bytes."""

    def __init__(self, given: Any, ready: Ready) -> None:
        self.given = given
        self.ready = ready
        self.is_taken = False
        """Whether the client has taken the bytes to send them."""

    @property
    def publishing_id(self) -> Any:
        """The caller's, or what rstream has given the caller's message."""
        return self.given.publishing_id

    @publishing_id.setter
    def publishing_id(self, value: Any) -> None:
        self.given.publishing_id = value

    def __bytes__(self) -> bytes:
        self.is_taken = True
        return self.ready.raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.given, name)


class _Send(Late):
    """Stands in for one of a producer's methods that send."""

    def __init__(self, producer: Producer, name: str, interception: Interception) -> None:
        super().__init__(lambda: producer, name)
        self._producer = producer
        self._payload = _SENDS[name]
        self._is_of_one = name in _ONE
        self.interception = interception
        of_one_process(self, "an intercepted producer")

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send with what is missing added; arguments, result and what is raised before sending are rstream's."""
        interception = self.interception
        given = args[1] if len(args) > 1 else kwargs.get(self._payload)
        stream = args[0] if args else kwargs.get("stream")
        messages = _messages_of(given, self._is_of_one)
        if not interception.active or not isinstance(stream, str) or not messages:
            # Released; or not a call rstream takes: let rstream say so.
            return await self.__wrapped__(*args, **kwargs)
        if not interception.has_agreed:
            await interception.agreed()
        stamped = [stamp(interception, message) for message in messages]
        if self._name == "send_sub_entry":
            compression = args[2] if len(args) > 2 else kwargs.get("compression_type", CompressionType.No)
            if compression is CompressionType.No:
                check_sub_entry(
                    [len(each.ready.raw) for each in stamped], messages, frame_bytes_max(self._producer, stream)
                )
        if len(args) > 1:
            return await self.send(stream, stamped, lambda sent: self.__wrapped__(stream, sent, *args[2:], **kwargs))
        return await self.send(stream, stamped, lambda sent: self.__wrapped__(*args, **{**kwargs, self._payload: sent}))

    async def with_receipt(self, _producer: Any, message: Any, stream: str, **kwargs: Any) -> AsyncReceipt:
        """Send a message and wait for its confirm; what gives its place."""
        interception = self.interception
        await interception.agreed()
        stamped = stamp(interception, message, asks=True)
        await self.send(stream, [stamped], lambda sent: self.__wrapped__(stream, sent, **kwargs))
        sent = stamped.ready.sent("", stream)
        assert sent is not None, "what is no message was refused"
        return AsyncReceipt(sent, interception.locator)

    async def send(self, stream: str, stamped: list[Stamped], wrapped: Callable[[Any], Awaitable[Any]]) -> Any:
        """Call rstream with what stands in for the messages; more than a frame takes, in several calls."""
        interception = self.interception
        parts = self._in_frames(stream, stamped)
        interception.watch("", stream)
        began_s = monotonic()
        results: list[Any] = []
        try:
            for part in parts:
                # No comprehension: what was sent before an error has to be known.
                results.append(await wrapped(part[0] if self._is_of_one else part))  # noqa: PERF401
        except Exception as error:
            # Where nothing was encoded yet, nothing was sent: there is no such stream, or no connection.
            begun = stamped if results else parts[0]
            if self._name == "send_sub_entry" or not (results or all(each.is_taken for each in begun)):
                raise
            ended = self._outcome(error, stream, stamped, began_s)
            interception.counts.published += len(stamped)
            interception.counts.failed(ended)
            raise ended from error
        interception.counts.published += len(stamped)
        return results[0] if len(results) == 1 else [each for result in results for each in result]

    def _in_frames(self, stream: str, stamped: list[Stamped]) -> list[list[Stamped]]:
        """What each call is given: all of them, unless that is more than a frame takes."""
        sizes = [len(each.ready.raw) for each in stamped]
        bytes_max = frame_bytes_max(self._producer, stream)
        if sum(sizes) + AROUND_MAX * len(sizes) <= bytes_max or self._name == "send_sub_entry":
            return [stamped]
        for each, size in zip(stamped, sizes, strict=True):
            check_message(size, each.given, bytes_max)
        has_filters = self._producer._filter_value_extractor is not None
        return [stamped[part] for part in in_frames(sizes, bytes_max, has_filters=has_filters)]

    def _outcome(self, error: Exception, stream: str, stamped: list[Stamped], began_s: float) -> PublishError:
        with _registry_kept():
            if isinstance(error, ServerError) and type(error) is not ServerError:
                return outcome(PublishRejected, error, in_stream=False)
            # What ends a connection is a ServerError without a code. After a mere time-out the connection lives on, and
            # what was sent may still arrive at any time.
            is_late = isinstance(error, TimeoutError)
            until = None if is_late else final_at(self._producer._pool._heartbeat, announced=False)
            sent = [each.ready.sent("", stream, began_s) for each in stamped]
            settle = _Settling(self.interception, [each for each in sent if each is not None], until).settle
            return outcome(PublishOutcomeUnknown, error, in_stream=None, settle=settle)


class _Settling:
    """Finds out what became of messages that were sent together."""

    def __init__(self, interception: Interception, sent: list[Sent], final_at: float | None) -> None:
        self._unsettled = [Unsettled(each, interception.locator, final_at) for each in sent]

    async def settle(self, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> tuple[MessageId, ...]:
        """The places of all of them, as `settle` of one: the first that is in no stream, or not found, ends it."""
        places: list[MessageId] = []
        for each in self._unsettled:
            places += await each.settle_async(timeout_s, streams=streams)
        return tuple(places)


class _RoutedSend(Late):
    """Stands in for a super stream producer's `send`: a message that goes to several partitions is stamped once."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _routed.set({})
        try:
            return await self.__wrapped__(*args, **kwargs)
        finally:
            _routed.reset(token)


class _ProducerGetter(Late):
    """Stands in for what gives a super stream's producer the producer that it sends with."""

    def __init__(self, producer: SuperStreamProducer, interception: Interception) -> None:
        super().__init__(lambda: producer, _PRODUCER_OF)
        self._interception = interception

    async def __call__(self) -> Producer:
        found: Producer = await self.__wrapped__()
        if self._interception.active:
            _intercept_producer(found, self._interception)
        return found


class _Extractor(Replacement):
    """Stands in for the caller's function that gives a filter's value: it sees the caller's message."""

    @property
    def __wrapped__(self) -> Any:
        return self.replaced

    async def __call__(self, message: Any) -> Any:
        return await self.replaced(message.given if isinstance(message, Stamped) else message)


def intercept(producer: Any, interception: Interception) -> None:
    """Send through the interception whatever the producer sends."""
    setattr(producer, ATTRIBUTE, interception)
    if isinstance(producer, Producer):
        _intercept_producer(producer, interception)
        return
    put(producer, "send", _RoutedSend(lambda: producer, "send"))
    put(producer, _PRODUCER_OF, _ProducerGetter(producer, interception))
    if producer._producer is not None:
        _intercept_producer(producer._producer, interception)


def may_wait(_producer: Any) -> bool:
    """Whether its thread may wait for a server: never, it runs an event loop."""
    return False


def release(producer: Any) -> None:
    """Put back what was there before. What somebody else has wrapped since stays, and passes everything through."""
    if isinstance(producer, SuperStreamProducer):
        put_back(producer, "send")
        put_back(producer, _PRODUCER_OF)
    sending = producer if isinstance(producer, Producer) else producer._producer
    if sending is not None:
        for name in (*_SENDS, _EXTRACTOR):
            put_back(sending, name)
    delattr(producer, ATTRIBUTE)


def stamp(interception: Interception, given: Any, *, asks: bool = False) -> Stamped:
    """What stands in for a message."""
    if isinstance(given, Stamped):
        return given
    routed = _routed.get()
    made = routed.get(id(given)) if routed is not None else None
    if made is None and not asks and type(given) is AMQPMessage and (known := _known(given)) is not None:
        # What rstream gives, byte for byte, in a fifth of its time.
        made = plainly_ready(interception, plain_message(*known) or bytes(given), *known)
    if made is None:
        # Not isinstance: it asks after a protocol, which takes as long as all else.
        is_message = AMQPMessage in type(given).__mro__
        made = ready(interception, bytes(given), is_message=is_message, asks=asks)
    if routed is not None:
        routed[id(given)] = made
    return Stamped(RawMessage(given) if isinstance(given, bytes) else given, made)


def _known(message: Any) -> tuple[dict[str, Any], bytes] | None:
    """Headers and body as a reader will see them, where that is sure: plain values, and nothing else."""
    headers = message.application_properties or {}
    body = message[_BODY]
    if type(body) is not bytes or not body or any(message[:_PROPERTIES_END]) or any(message[_BODY + 1 :]):
        return None
    return (headers, body) if are_plain(headers) else None


def _intercept_producer(producer: Producer, interception: Interception) -> None:
    present = [vars(producer).get(name) for name in _SENDS]
    if any(isinstance(each, _Send) and each.interception is interception for each in present):
        return
    for name in _SENDS:
        put(producer, name, _Send(producer, name, interception))
    if producer._filter_value_extractor is not None:
        put(producer, _EXTRACTOR, _Extractor())


def _messages_of(given: Any, is_one: bool) -> Sequence[Any]:
    """What a call is to send; nothing, where rstream would not take it."""
    if is_one:
        return (given,) if hasattr(given, "__bytes__") else ()
    return given if isinstance(given, Sequence) and all(hasattr(each, "__bytes__") for each in given) else ()


@contextmanager
def _registry_kept() -> Iterator[None]:
    """Make an error's class beside rstream's without rstream taking it for its own: it enters each in a table."""
    known = dict(ServerError._registry)
    try:
        yield
    finally:
        ServerError._registry.clear()
        ServerError._registry.update(known)
