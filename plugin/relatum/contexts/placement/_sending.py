"""A message on its way through a router, with the channel it is sent on: the two clients, side by side."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from relatum import publishing
from relatum.contexts.placement._model import PartitionRow, Placement
from relatum.contexts.placement._placement_core import RouterCore
from relatum.errors import ConfigurationError, PublishUnroutable
from relatum.publishing import OwnProperties, copy_with
from relatum.superstreams.connections import vhost_of
from relatum.superstreams.targets import channel_of

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage


@dataclass(frozen=True, slots=True)
class Sending:
    """A message, as `basic_publish` of pika's channel takes it."""

    channel: Any
    body: bytes | str
    properties: BasicProperties | None
    routing_key: str
    mandatory: bool

    @property
    def headers(self) -> Mapping[str, Any] | None:
        """Its headers; None for none."""
        return self.properties.headers if self.properties else None

    @property
    def message_id(self) -> str | None:
        """Its `message_id`; None for none."""
        return self.properties.message_id if self.properties else None

    def require_confirms(self) -> None:
        """Refuse a channel that does not tell when the broker has a message.

        Raises:
            ConfigurationError: it is no blocking channel of pika in confirm mode; nothing was sent.
        """
        if not isinstance(self.channel, BlockingChannel):
            raise ConfigurationError(
                "messages of a context or an affinity set need a BlockingChannel of pika, not "
                f"{type(self.channel).__name__}; nothing was sent"
            )
        if not self.channel._delivery_confirmation:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: channel.confirm_delivery(); nothing was sent"
            )

    def source(self) -> Any:
        """What names the broker."""
        return self.channel

    def vhost(self) -> str:
        """The virtual host it would be published in."""
        return vhost_of(self.channel)

    def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        """Publish it under a placement, with these headers; gives what the client gives."""
        own = (
            copy_with(self.properties, headers, self.properties.message_id)
            if self.properties
            else OwnProperties(headers=headers)
        )
        return self.channel.basic_publish(core.super_stream, placement.binding_key, self.body, own, mandatory=True)

    def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        """Publish it as it is, under no name; gives what the client gives."""
        try:
            result = self.channel.basic_publish(
                core.super_stream, partition.binding_key, self.body, self.properties, mandatory=self.mandatory
            )
        except UnroutableError:
            core.forget_layout()
            raise
        core.published_unnamed()
        return result


@dataclass(frozen=True, slots=True)
class AsyncSending:
    """A message, as `publish` of aio-pika's exchange takes it; its methods are as of `Sending`."""

    target: "AbstractChannel | AbstractExchange"
    message: "AbstractMessage"
    routing_key: str
    kwargs: dict[str, Any]

    @property
    def headers(self) -> Mapping[str, Any] | None:
        return self.message.headers

    @property
    def message_id(self) -> str | None:
        return self.message.message_id

    def require_confirms(self) -> None:
        if not channel_of(self.target).publisher_confirms:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: open the channel with "
                "publisher_confirms=True; nothing was sent"
            )

    async def source(self) -> Any:
        return (await channel_of(self.target).get_underlay_channel()).connection

    async def vhost(self) -> str:
        return vhost_of(await self.source())

    async def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        own: Any = copy.copy(self.message)
        own.headers = headers
        result = await self._publish(core, own, placement.binding_key, {**self.kwargs, "mandatory": True})
        if publishing.came_back(result):
            raise PublishUnroutable(
                f"the message of {placement.name!r} came back: {placement.stream!r} is not bound any more",
                in_stream=False,
            )
        return result

    async def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        result = await self._publish(core, self.message, partition.binding_key, self.kwargs)
        if publishing.came_back(result):
            core.forget_layout()
        else:
            core.published_unnamed()
        return result

    async def _publish(self, core: RouterCore, message: Any, binding_key: str, kwargs: dict[str, Any]) -> Any:
        exchange = await channel_of(self.target).get_exchange(core.super_stream, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)
