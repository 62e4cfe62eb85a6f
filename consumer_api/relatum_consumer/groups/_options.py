"""How groups are read and shared: what a caller may choose, checked, and every limit with its unit and origin."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from relatum.checks import checked_choice, checked_count, checked_seconds
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_consumer.groups._assembly import GroupOrder, Member
from relatum_consumer.lookups.arguments import time_us_of

BATCH_MESSAGES: Final = 131_072
"""Messages of the groups that are read in one pass. Groups whose messages are mixed over that many are read as fast
as groups stored one after the other; `read_many` holds 64 MiB of them at most and reads the others again. The last
group of a batch may go beyond it."""

OnDuplicate: TypeAlias = Literal["first", "raise"]
"""What becomes of a number that several messages have."""

OnConflict: TypeAlias = Literal["raise", "skip", "dead_letter"]
"""What becomes of a group with two lasts, a number past its last, or a message that retention took."""

GroupStart: TypeAlias = int | datetime | None
"""Where reading begins: an offset, a moment, or the first message."""


class SharingArguments(TypedDict, total=False):
    """What `Relations.groups` takes with a consumer and without, for type checkers; see there for the defaults."""

    order: GroupOrder
    start: GroupStart
    follow: bool
    idle_timeout_s: float | None
    on_duplicate: OnDuplicate
    on_conflict: OnConflict


class GroupArguments(SharingArguments, total=False):
    """What it takes without a consumer."""

    complete: bool


NAME_CHARACTERS_MAX: Final = 255
"""Characters of a consumer's or member's name: what RabbitMQ allows for names."""

LEASE_S: Final = 15.0
"""Seconds a claim holds without renewal, by default."""

LEASE_S_MIN: Final = 1.0
"""Seconds of the shortest lease: it is renewed three times in that time, over the network."""

PREFETCH: Final = 10
"""Groups a member claims at once, by default: one read gets the messages of all."""

PREFETCH_MAX: Final = 1_000
"""Groups a member may claim at once: all are held in memory, and are another's only when the lease has run out."""

DELIVERIES_MAX: Final = 1_000_000
"""The highest limit of deliveries: a larger one is a mistake, and would outgrow the column it is counted in."""


@dataclass(frozen=True, slots=True)
class GroupConsumer:
    """A consumer that shares groups among its members and keeps its position: `groups(…, consumer=…)`.

    Members are all those that read under one name, in any number of processes. Each group is at one member at a time,
    until that one acknowledges it; what a member had when it died is another's once its lease has run out.

    Attributes:
        name: The consumer's name, up to 255 characters; unique in a virtual host.
        member: This member's name; None (default) makes a new one. A process that is started again under the name it
            had before gets its groups back at once, without waiting for the lease. No two may run under one name.
        lease_s: Seconds after which the groups of a member that does not answer are another's; from 1, default 15. It
            is renewed in the background, so handling a group may take longer.
        prefetch: Groups claimed and read at once, from 1 to 1,000; default 10.
        dead_letter_stream: The stream for dead letters; it must exist.
        deliveries_max: How often a group that is never acknowledged is given, by all members together; from 1 to
            1,000,000. Then it is dead: its messages go to the dead-letter stream, if there is one, and the logger
            `relatum.groups` warns of it either way. None (default): no limit.

    Raises:
        InvalidInput: an option cannot be one, or lacks another that it needs.
    """

    name: str
    member: str | None = None
    lease_s: float = LEASE_S
    prefetch: int = PREFETCH
    dead_letter_stream: str | None = None
    deliveries_max: int | None = None

    def __post_init__(self) -> None:
        check_name("a consumer's name", self.name)
        if self.member is not None:
            check_name("member=", self.member)
        checked_seconds("lease_s", self.lease_s, least=LEASE_S_MIN)
        checked_count("prefetch", self.prefetch, most=PREFETCH_MAX)
        if self.deliveries_max is not None:
            most, otherwise = DELIVERIES_MAX, ", or None for no limit"
            checked_count("deliveries_max", self.deliveries_max, most=most, otherwise=otherwise)
        if self.dead_letter_stream is not None:
            check_name("dead_letter_stream=", self.dead_letter_stream)


def check_name(what: str, name: Any) -> None:
    """Refuse what is no name."""
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX or "\0" in name:
        raise InvalidInput(f"{what} is text of 1 to {NAME_CHARACTERS_MAX} characters")


def consumer_of(given: str | GroupConsumer) -> GroupConsumer:
    """A consumer by its name, or as given."""
    if isinstance(given, str):
        return GroupConsumer(given)
    if not isinstance(given, GroupConsumer):
        raise InvalidInput("consumer= takes a name or a GroupConsumer")
    return given


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of `Relations.groups`, which documents them. `names` are the streams."""

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
        check_order(self.order)
        checked_choice("on_duplicate", self.on_duplicate, get_args(OnDuplicate))
        checked_choice("on_conflict", self.on_conflict, get_args(OnConflict))
        if self.consumer is not None and not self.complete:
            raise InvalidInput("complete= does not go with consumer=: a consumer shares complete groups, as recorded")
        # Readers that keep no position would publish the same dead letters each time they read.
        if self.on_conflict == "dead_letter" and (self.consumer is None or self.consumer.dead_letter_stream is None):
            raise InvalidInput('on_conflict="dead_letter" needs consumer=GroupConsumer(…, dead_letter_stream=…)')
        _check_start(self.start, self.names)
        if self.idle_timeout_s is not None:
            checked_seconds("idle_timeout_s", self.idle_timeout_s)


def check_order(order: Any) -> None:
    """Refuse what is no order of groups."""
    checked_choice("order", order, get_args(GroupOrder))


def _check_start(start: Any, names: tuple[str, ...] | None) -> None:
    """Refuse what is no start; an offset is one stream's own."""
    if start is None or isinstance(start, datetime):
        return
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput("start= takes an offset, a datetime, or None for the first message")
    if names is None or len(names) != 1:
        raise InvalidInput("start= takes an offset only where one stream is named; a datetime serves several")


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where reading begins: groups whose place is before it are left out."""

    offset: int = 0
    since_us: int | None = None

    @classmethod
    def of(cls, start: GroupStart) -> "Beginning":
        """The beginning that was asked for."""
        return cls(since_us=time_us_of(start)) if isinstance(start, datetime) else cls(start or 0)

    def admits(self, head: Member | None) -> bool:
        """Whether a group with this head is to be read."""
        if head is None or head.offset < self.offset:
            return False
        return self.since_us is None or (head.time_us is not None and head.time_us >= self.since_us)
