"""`SuperStream`: a super stream to publish to."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from relatum.superstreams._layout import Layout, Partition
from relatum.superstreams._protocol import Outgoing, Target

RouteBy: TypeAlias = str | Callable[[Outgoing], str | bytes] | None


class SuperStream(Target):
    """A super stream to publish to.

    Args:
        name: The super stream's name.
        route_by: What names a message's key: a header's name, or a function of an `Outgoing`. None (default): the
            routing key given with the message is its key.
        partitions: How many partitions it has, or its layout. None (default): asked of the broker of each connection
            when first published to there.
        strategy: "hash" (default): a key's partition is found by its hash. "key": the key is a binding key.
    """

    def __init__(
        self,
        name: str,
        *,
        route_by: RouteBy = None,
        partitions: int | Layout | None = None,
        strategy: Literal["hash", "key"] = "hash",
    ) -> None:
        raise NotImplementedError

    def layout(self, connection: Any) -> Layout:
        """The partitions on the broker of a pika connection or channel, looked up once."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Ask the broker again before the next publish: partitions were added or taken out."""
        raise NotImplementedError

    def partition_of(self, channel: Any, key: str | bytes) -> Partition:
        """The partition a key goes to."""
        raise NotImplementedError

    def publish(
        self, channel: Any, body: bytes | str, properties: Any = None, *, routing_key: str = "", mandatory: bool = False
    ) -> Any:
        """Publish one message through a pika channel."""
        raise NotImplementedError

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Publish one message through an aio-pika channel."""
        raise NotImplementedError
