"""What one member of a consumer that shares groups tells of itself."""

from dataclasses import dataclass
from typing import Annotated

from relatum.metrics import Counter, Gauge, reported


@dataclass(slots=True)
class SharedGroupsCounts:
    """What is counted; whoever counts is the one that iterates, or acknowledges."""

    given: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    given_up: int = 0


@reported("group consumer", "consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroupsStatistics:
    """What one member has counted.

    Attributes:
        given: Groups given to the application.
        redelivered: Those of them that had been given before, here or to another member.
        acknowledged: Groups acknowledged.
        given_up: Groups given up: published as dead letters, or given too often.
        held: Groups given and neither acknowledged nor given back.
    """

    given: Annotated[int, Counter("relatum_group_consumer_given_total", "Groups given to the application")]
    redelivered: Annotated[int, Counter("relatum_group_consumer_redelivered_total", "Groups given once more")]
    acknowledged: Annotated[int, Counter("relatum_group_consumer_acknowledged_total", "Groups acknowledged")]
    given_up: Annotated[int, Counter("relatum_group_consumer_given_up_total", "Groups given up")]
    held: Annotated[int, Gauge("relatum_group_consumer_held_groups", "Groups given and not acknowledged")]
