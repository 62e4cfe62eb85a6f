"""Publishing a group of messages in its logical order, through aio-pika."""

import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from relatum import publishing
from relatum.errors import PublishUnroutable
from relatum.groups._group import GroupBase
from relatum.membership import Membership
from relatum.publishing import intercepted_exchange

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage


class AsyncMessageGroup(GroupBase):
    """Publishes the messages of one group in their order: the twin of `MessageGroup` for aio-pika.

        async with relatum.AsyncMessageGroup(exchange, "orders") as group:
            await group.put(Message(b"first"))
            await group.put(Message(b"second"), last=True)

    A message's number is taken when `put` is called, so several can be under way at once; await them before the block
    is left.

    Args:
        target: An exchange of an intercepted aio-pika connection, or a channel, which means its default exchange. With
            confirms, aio-pika's default, a message that the broker did not take does not use up its number.
        routing_key: The routing key of messages that name none; default "".
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
        """Publish the group's next message; see `MessageGroup.put`.

        Cancelling it leaves its outcome unknown, and its number taken.

        The message is an aio-pika one, and is not changed; `exchange` is an exchange or a channel, `kwargs` are further
        arguments of `Exchange.publish`, such as `timeout`, and what that returns is returned. A message that comes back
        is `PublishUnroutable`, whatever the channel's `on_return_raises`.
        """
        target, _ = intercepted_exchange(self._exchange if exchange is None else exchange)
        routing_key = self._target[1] if routing_key is None else routing_key
        place = self._numbers.take(last=last)
        try:
            result = await target.publish(_grouped(message, place), routing_key, mandatory=mandatory, **kwargs)
            _require_routed(result, place)
        except Exception as error:
            self._failed(place, error)
            raise
        return result

    async def close(self) -> None:
        """End the group, as leaving its block does."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            self._numbers.end()


def _grouped(message: "AbstractMessage", place: Membership) -> Any:
    """A copy of the caller's message with the headers of a place."""
    ours: Any = copy.copy(message)
    ours.headers = {**(message.headers or {}), **place.headers}
    return ours


def _require_routed(result: Any, place: Membership) -> None:
    """Raise where the message came back: aio-pika then returns it, unless the channel says otherwise."""
    if publishing.came_back(result):
        raise PublishUnroutable(
            f"message {place.sequence} of group {place.group_id} came back: nothing is bound for it", in_stream=False
        )
