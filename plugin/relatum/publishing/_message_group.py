"""Publishes a group of messages in its logical order, through pika or aio-pika."""

import copy
from bisect import insort
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel

from relatum.common.processes import refuse_in_child
from relatum.errors import GroupConflict, IncompleteGroup, PublishOutcomeUnknown, PublishUnroutable
from relatum.membership import (
    Anomaly,
    GroupFault,
    GroupPosition,
    Membership,
    Ranges,
    checked_group_id,
    checked_sequence,
    new_group_id,
)
from relatum.publishing._pika import OwnProperties, copy_with
from relatum.publishing._publish import intercepted_exchange, publisher_of
from relatum.superstreams.targets import was_returned

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

_FINAL_ANOMALIES = (Anomaly.TWO_LASTS, Anomaly.PAST_LAST, Anomaly.EXPIRED)
"""Anomalies that no later message can repair."""


class Numbering:
    """The sequence numbers of one group that is being published, from `start` on; lower numbers count as published.

    A group takes a number before it sends the message, and frees the number if the message is certainly in no stream.
    The next message gets the freed number, so the group has no gap.
    """

    def __init__(self, group_id: str | None = None, start: int = 1) -> None:
        if group_id is None and start != 1:
            raise GroupFault.OPTION_INVALID.error("start= continues a group: pass its group_id=")
        self.group_id = new_group_id() if group_id is None else checked_group_id(group_id)
        """The group's id: 48 hexadecimal digits."""
        self.last_sequence: int | None = None
        """The number of the group's last message; None until that message is put."""
        self._next_free = checked_sequence(start)
        """The number after the highest taken one."""
        self._gaps: list[tuple[int, int]] = []
        """Ranges of free numbers below `_next_free`, ascending."""
        self._has_ended = False

    def _resume(self, position: GroupPosition) -> None:
        """Continue from a position: first with the missing numbers, then with those above the highest."""
        if position.group_id != self.group_id and self._is_begun:
            raise GroupFault.OPTION_INVALID.error(
                f"group {self.group_id} already has messages: resume group {position.group_id} in a new MessageGroup"
            )
        for anomaly in _FINAL_ANOMALIES:
            if anomaly in position.anomalies:
                raise GroupConflict(
                    f"group {position.group_id} cannot be continued: {anomaly}; start a new group",
                    group_id=position.group_id,
                    anomaly=str(anomaly),
                )
        self.group_id = position.group_id
        self.last_sequence = position.last_sequence
        self._next_free = (position.last_sequence or position.highest) + 1
        self._gaps = list(position.missing)

    def _take(self, *, last: bool = False) -> Membership:
        """Take the next message's place: the lowest free number; for the last message, a number above all others."""
        if self._has_ended or (self.last_sequence is not None and (last or not self._gaps)):
            raise GroupFault.ENDED.error(f"group {self.group_id} has ended; nothing was sent: start a new group")
        if self._gaps and not last:
            first, end = self._gaps[0]
            self._gaps[:1] = [(first + 1, end)] if first < end else []
            return Membership(self.group_id, first, False)
        number = checked_sequence(self._next_free)
        self._next_free = number + 1
        if last:
            self.last_sequence = number
        return Membership(self.group_id, number, last)

    def _give_back(self, place: Membership) -> None:
        """Free the number of a message that is in no stream."""
        if place.last:
            self.last_sequence = None
        insort(self._gaps, (place.sequence, place.sequence))
        # Free numbers above all taken ones are not gaps.
        while self.last_sequence is None and self._gaps and self._gaps[-1][1] == self._next_free - 1:
            self._next_free = self._gaps.pop()[0]

    @property
    def next_sequence(self) -> int:
        """The number of the next message; the group's last message gets a number above all others."""
        return self._gaps[0][0] if self._gaps else self._next_free

    @property
    def _is_begun(self) -> bool:
        return self._next_free > 1

    @property
    def is_complete(self) -> bool:
        """Whether the last message and all messages before it have been put."""
        return self.last_sequence is not None and not self._gaps

    @property
    def _missing(self) -> Ranges:
        """The free numbers below the highest taken one, as ranges (first, last), ascending."""
        joined: list[tuple[int, int]] = []
        for first, last in self._gaps:
            if joined and joined[-1][1] == first - 1:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        return tuple(joined)

    def _incomplete(self) -> IncompleteGroup:
        numbers = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in self._missing)
        missing = "its last message" if self.last_sequence is None else f"messages {numbers}"
        return IncompleteGroup(
            f"group {self.group_id} ended without {missing}: resume it from its position, and put what is missing",
            group_id=self.group_id,
            missing=self._missing,
            last_sequence=self.last_sequence,
        )


class _Group(Numbering):
    """The common base: the group's exchange and routing key, its continuation and its end."""

    def __init__(self, exchange: str, routing_key: str, group_id: str | None, start: int) -> None:
        for name, value in (("exchange", exchange), ("routing_key", routing_key)):
            if not isinstance(value, str):
                raise GroupFault.OPTION_INVALID.error(f"{name}= takes a text, not {type(value).__name__}")
        self._target = exchange, routing_key
        super().__init__(group_id, start)
        refuse_in_child(self, "a message group")

    def __repr__(self) -> str:
        state = "complete" if self.is_complete else f"next {self.next_sequence}"
        return f"<{type(self).__name__} {self.group_id} {state}>"

    def resume(self, position: GroupPosition, *, unproven: bool = False) -> None:
        """Continue the group from a position: after a failure, or in another process.

        The next messages get the missing numbers, then numbers above the highest. If a stream has the last message,
        only the missing messages can be put.

        Args:
            position: The group's position: `relations.group_position(group_id, streams=…)`. `streams` must include the
                stream that this group is published to, which the database may not know yet.
            unproven: True: accept a position that is not proven (`position.is_proven`), because it was read with
                `complete=False` or a leader could not be reached. The group may then have more messages, whose numbers
                would be used twice. Default: False.

        Raises:
            InvalidGroup: the position does not cover the group's stream, is not proven, or is another group's although
                this group already has messages.
            GroupConflict: no further message can complete the group (field `anomaly`).
        """
        if not isinstance(position, GroupPosition):
            raise GroupFault.OPTION_INVALID.error(
                f"position= takes the result of group_position(…), not {type(position).__name__}"
            )
        exchange, routing_key = self._target
        name = exchange or routing_key
        if name and not position.holds_for(exchange, routing_key):
            raise GroupFault.OPTION_INVALID.error(
                f"the position of group {position.group_id} does not cover {name!r}, which this group publishes to: "
                f"call group_position(…, streams={name!r})"
            )
        if not (position.is_proven or unproven):
            raise GroupFault.OPTION_INVALID.error(
                f"the position of group {position.group_id} is not proven, so the group may have more messages: read "
                "it with complete=True and the stream protocol, or call resume(…, unproven=True)"
            )
        self._resume(position)

    def _failed(self, place: Membership, error: Exception) -> None:
        """Free the failed message's number, unless the message may be in a stream."""
        if not isinstance(error, PublishOutcomeUnknown):
            self._give_back(place)

    def _end(self, error: BaseException | None = None) -> None:
        """End the group. `error`: what its block raised; None: raise `IncompleteGroup` if messages are missing."""
        self._has_ended = True
        if error is None and self._is_begun and not self.is_complete:
            raise self._incomplete()


class MessageGroup(_Group):
    """Publishes the messages of one group in order, with the group's id and sequence numbers.

        with relatum.MessageGroup(channel, "", "orders") as group:
            group.put(b"first")
            group.put(b"second", last=True)

    Each message gets the headers `group_id`, `group_sequence` and `group_last`, which replace the caller's.
    Bodies, properties and other headers are as for `basic_publish`. Use the group on the connection's thread.

    Leaving the block without a last message raises `IncompleteGroup`, unless nothing was put. If the block raises
    another exception, that one propagates, and you can continue the group with `resume` or `start`.

    Args:
        channel: A channel of an intercepted pika connection, blocking or not. With confirms on a blocking channel, a
            message that the broker did not accept does not use up its number; otherwise each sent message does.
        exchange: The exchange, if `put` names none. Default: "", the default exchange.
        routing_key: The routing key, if `put` names none. Default: "".
        group_id: The group to continue, 48 hexadecimal digits. None (default): a new group.
        start: The number of the first message put here; only with `group_id`. Lower numbers count as published: pass
            `position.next_sequence` of a group without gaps. Default: 1.

    Raises:
        ConfigurationError: the channel's connection is not intercepted.
        InvalidGroup: an option is invalid.
    """

    def __init__(
        self,
        channel: "BlockingChannel | Channel",
        exchange: str = "",
        routing_key: str = "",
        *,
        group_id: str | None = None,
        start: int = 1,
    ) -> None:
        publisher_of(channel)
        super().__init__(exchange, routing_key, group_id, start)
        self._channel = channel

    def put(
        self,
        body: bytes | str,
        properties: BasicProperties | None = None,
        last: bool = False,
        *,
        exchange: str | None = None,
        routing_key: str | None = None,
        mandatory: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Publish the group's next message.

        Args:
            body: The body; not changed.
            properties: As for `basic_publish`; not changed.
            last: Whether the group ends with this message. Default: False.
            exchange: The message's exchange. None (default): the group's exchange.
            routing_key: The message's routing key. None (default): the group's routing key.
            mandatory: True (default): with confirms, a message routed to no queue raises `PublishUnroutable`. False:
                the broker drops such a message, and the group keeps a gap.
            kwargs: Further arguments of the client's own `basic_publish`.

        Returns:
            What the client's `basic_publish` returns.

        Raises:
            InvalidGroup: the group has its last message, its block has ended, or it would have over 999,999,999
                messages. Nothing was sent.
            InvalidRelationshipKey, HeadersRefused: nothing was sent; the next message gets this number.
            PublishUnroutable, PublishNacked, PublishRejected: the message is in no stream; its number is used again. If
                an exchange routes to several streams, one may have a message that another refused: then two messages
                have the number.
            PublishOutcomeUnknown: the message may be in the stream, and its number stays taken. Settle it, or `resume`.
        """
        exchange = self._target[0] if exchange is None else exchange
        routing_key = self._target[1] if routing_key is None else routing_key
        # Only an interceptor's errors tell whether the message was sent.
        publisher_of(self._channel)
        place = self._take(last=last)
        try:
            grouped = OwnProperties(headers=place.headers)
            if properties:
                grouped = copy_with(properties, {**(properties.headers or {}), **place.headers}, properties.message_id)
            return self._channel.basic_publish(exchange, routing_key, body, grouped, mandatory, **kwargs)
        except Exception as error:
            self._failed(place, error)
            raise

    def close(self) -> None:
        """End the group, like leaving its block.

        Raises:
            IncompleteGroup: some of its messages are missing (fields `missing`, `last_sequence`).
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)


class AsyncMessageGroup(_Group):
    """Publishes the messages of one group in order, like `MessageGroup`, but for aio-pika.

        async with relatum.AsyncMessageGroup(exchange, "orders") as group:
            await group.put(Message(b"first"))
            await group.put(Message(b"second"), last=True)

    `put` takes the message's number immediately, so several messages may be sent concurrently. Await all of them before
    leaving the block.

    Args:
        target: An exchange of an intercepted aio-pika connection, or a channel, for its default exchange. With
            confirms, aio-pika's default, a message that the broker did not accept does not use up its number.
        routing_key: The routing key, if `put` names none. Default: "".
        group_id: As for `MessageGroup`.
        start: As for `MessageGroup`.
    """

    def __init__(
        self,
        target: "AbstractExchange | AbstractChannel",
        routing_key: str = "",
        *,
        group_id: str | None = None,
        start: int = 1,
    ) -> None:
        self._exchange = intercepted_exchange(target)[0]
        super().__init__(self._exchange.name, routing_key, group_id, start)

    async def put(
        self,
        message: "AbstractMessage",
        last: bool = False,
        *,
        exchange: "AbstractExchange | AbstractChannel | None" = None,
        routing_key: str | None = None,
        mandatory: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Publish the group's next message. See `MessageGroup.put`.

        If `put` is cancelled, the message's outcome is unknown, and its number stays taken.

        `message` is not changed. `exchange` is an exchange or a channel; `kwargs` are further arguments of
        `Exchange.publish`, such as `timeout`. Returns the result of `Exchange.publish`. A message that the broker
        returns raises `PublishUnroutable`, regardless of the channel's `on_return_raises`.
        """
        target, _ = intercepted_exchange(self._exchange if exchange is None else exchange)
        routing_key = self._target[1] if routing_key is None else routing_key
        place = self._take(last=last)
        try:
            grouped: Any = copy.copy(message)
            grouped.headers = {**(message.headers or {}), **place.headers}
            result = await target.publish(grouped, routing_key, mandatory=mandatory, **kwargs)
        except Exception as error:
            self._failed(place, error)
            raise
        if was_returned(result):
            # aio-pika's publish returns an unroutable message, unless `on_return_raises` is set.
            self._give_back(place)
            raise PublishUnroutable(
                f"message {place.sequence} of group {place.group_id} was returned: no queue is bound for it; bind one, "
                "then put the message again"
            )
        return result

    async def close(self) -> None:
        """End the group. See `MessageGroup.close`."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)
