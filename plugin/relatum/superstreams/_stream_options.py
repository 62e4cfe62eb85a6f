"""What the streams of a super stream are declared with."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from relatum.checks import checked_count, checked_text
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

PARTITIONS_DEFAULT: Final = 3
"""As many as `rabbitmq-streams add_super_stream` makes."""


ORDER_ARGUMENT: Final = "x-stream-partition-order"
"""The binding argument with a partition's place."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the streams of a super stream are declared with.

    Attributes:
        max_length_bytes: Bytes a stream keeps, at least; the oldest segments are dropped beyond. None: no limit.
        max_age: For how long it keeps messages, at least; whole seconds. None: no limit.
        segment_bytes_max: Bytes of a segment. None: the broker's 500,000,000.
        leader_locator: Where leaders are put: "client-local", "balanced", "least-leaders". None: the broker's choice.
        initial_cluster_size: How many nodes have a copy. None: all.
    """

    max_length_bytes: int | None = None
    max_age: timedelta | None = None
    segment_bytes_max: int | None = None
    leader_locator: str | None = None
    initial_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_length_bytes", "segment_bytes_max", "initial_cluster_size"):
            value = getattr(self, name)
            if value is not None:
                checked_count(name, value, most=INTEGER_MAX, otherwise=", or None")
        if self.leader_locator is not None:
            checked_text("leader_locator", self.leader_locator)
        if self.max_age is not None and not (
            isinstance(self.max_age, timedelta) and self.max_age >= timedelta(seconds=1)
        ):
            raise InvalidInput(f"max_age is a timedelta of a second at least, not {self.max_age!r}.")

    def arguments(self) -> dict[str, Any]:
        """The arguments of `queue.declare`."""
        wanted = {
            "x-max-length-bytes": self.max_length_bytes,
            "x-max-age": None if self.max_age is None else f"{int(self.max_age.total_seconds())}s",
            "x-stream-max-segment-size-bytes": self.segment_bytes_max,
            "x-queue-leader-locator": self.leader_locator,
            "x-initial-cluster-size": self.initial_cluster_size,
        }
        return {"x-queue-type": "stream"} | {name: value for name, value in wanted.items() if value is not None}
