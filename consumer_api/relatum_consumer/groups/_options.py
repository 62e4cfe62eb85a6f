"""The options for reading and sharing groups, their checks, and their limits."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias, TypedDict, get_args

from relatum.common.checks import checked_choice, checked_count, checked_name, checked_seconds
from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput
from relatum_consumer.groups._assembly import GroupOrder, Row
from relatum_consumer.lookups.arguments import time_us_of

BATCH_MESSAGES: Final = 131_072
"""Messages in a batch of groups, which is read in one pass; the last group may exceed it. Groups that are mixed within
this many messages are read as fast as groups stored one after the other. `read_many` holds at most 64 MiB of messages,
and reads the others again."""

OnDuplicate: TypeAlias = Literal["first", "raise"]
"""What to do if several messages have the same number."""

OnConflict: TypeAlias = Literal["raise", "skip", "dead_letter"]
"""What to do with a group that has two last messages, numbers past the last, or messages that retention has dropped."""

GroupStart: TypeAlias = int | datetime | None
"""Where reading begins: an offset, a time, or the first message (None)."""


class SharingArguments(TypedDict, total=False):
    """Arguments of `Relations.groups` with or without a consumer, for type checkers. The method states the defaults."""

    order: GroupOrder
    start: GroupStart
    follow: bool
    idle_timeout_s: float | None
    on_duplicate: OnDuplicate
    on_conflict: OnConflict


class GroupArguments(SharingArguments, total=False):
    """Arguments of `Relations.groups` without a consumer."""

    complete: bool


LEASE_S: Final = 15.0
"""Default lease of a claim, in seconds: a claim that is not renewed for so long expires."""

LEASE_S_MIN: Final = 1.0
"""Shortest lease in seconds: time for three renewals over the network."""

PREFETCH: Final = 10
"""Default number of groups that a member claims together; their messages are read together."""

PREFETCH_MAX: Final = 1_000
"""Highest `prefetch=`: a member holds all these groups in memory, and if it dies, they wait for the lease to expire."""

DELIVERIES_MAX: Final = 1_000_000
"""Highest `deliveries_max=`: a higher limit is a mistake, and would overflow the counter's column."""


@dataclass(frozen=True, slots=True)
class GroupConsumer:
    """A consumer that shares groups among its members, and stores its position: `groups(…, consumer=…)`.

    All iterators with the same consumer name are its members, in any number of processes. A group is claimed by one
    member at a time, until it acknowledges the group. Other members claim a dead member's groups after its leases end.

    Attributes:
        name: The consumer's name, up to 255 bytes; unique in a virtual host.
        member: This member's name, unique among running members. None (default): a new name. A process restarted under
            its previous name claims its groups again immediately, without waiting for the leases to expire.
        lease_s: Seconds after which other members may claim the groups of a dead member; from 1. Default: 15. The
            lease is renewed in the background, so handling a group may take longer.
        prefetch: Number of groups claimed and read together, from 1 to 1,000. Default: 10.
        dead_letter_stream: The stream for dead letters, which must exist. Default: None.
        deliveries_max: How often a group that is never acknowledged is delivered, by all members together; from 1 to
            1,000,000. After that the group is dead: its messages go to the dead-letter stream, if there is one, and
            the logger `relatum.groups` logs a warning. None (default): no limit.

    Raises:
        InvalidInput: an option is invalid.
    """

    name: str
    member: str | None = None
    lease_s: float = LEASE_S
    prefetch: int = PREFETCH
    dead_letter_stream: str | None = None
    deliveries_max: int | None = None

    def __post_init__(self) -> None:
        checked_name("name", self.name)
        if self.member is not None:
            checked_name("member", self.member)
        checked_seconds("lease_s", self.lease_s, least=LEASE_S_MIN)
        checked_count("prefetch", self.prefetch, most=PREFETCH_MAX)
        if self.deliveries_max is not None:
            most, otherwise = DELIVERIES_MAX, ", or None for no limit"
            checked_count("deliveries_max", self.deliveries_max, most=most, otherwise=otherwise)
        if self.dead_letter_stream is not None:
            checked_name("dead_letter_stream", self.dead_letter_stream)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of `Relations.groups`, which documents them. `names`: The streams and super streams."""

    names: tuple[str, ...] | None
    consumer: GroupConsumer | None = None
    order: GroupOrder = "logical"
    start: GroupStart = None
    complete: bool = True
    follow: bool = False
    idle_timeout_s: float | None = None
    on_duplicate: OnDuplicate = "first"
    on_conflict: OnConflict = "raise"

    def __post_init__(self) -> None:
        checked_choice("order", self.order, get_args(GroupOrder))
        checked_choice("on_duplicate", self.on_duplicate, get_args(OnDuplicate))
        checked_choice("on_conflict", self.on_conflict, get_args(OnConflict))
        if self.consumer is not None and not self.complete:
            raise InvalidInput("leave out complete=False: with consumer=, only recorded messages are read in any case")
        # Without a stored position, each iteration would publish the same dead letters again.
        if self.on_conflict == "dead_letter" and (self.consumer is None or self.consumer.dead_letter_stream is None):
            raise InvalidInput('on_conflict="dead_letter" needs consumer=GroupConsumer(…, dead_letter_stream=…)')
        if self.idle_timeout_s is not None:
            checked_seconds("idle_timeout_s", self.idle_timeout_s)
        if self.start is None or isinstance(self.start, datetime):
            return
        if type(self.start) is not int or not 0 <= self.start <= INTEGER_MAX:
            raise InvalidInput("start= takes an offset, a datetime, or None for the first message")
        if self.names is None or len(self.names) != 1:
            raise InvalidInput("start= takes an offset only if you name one stream: use a datetime for several streams")


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where reading begins; groups with an earlier place are left out."""

    offset: int = 0
    since_us: int | None = None

    @classmethod
    def of(cls, start: GroupStart) -> "StartPosition":
        return cls(since_us=time_us_of(start)) if isinstance(start, datetime) else cls(start or 0)

    def admits(self, head: Row) -> bool:
        """Whether a group with this head is read."""
        *_, offset, time_us = head
        return offset >= self.offset and (self.since_us is None or (time_us is not None and time_us >= self.since_us))
