"""How groups are read: what a caller may choose, checked, and every limit by name, with its unit and origin."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from relatum.checks import checked_choice, checked_seconds
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_consumer.groups.reading._assembly import GroupOrder

WINDOW_OFFSETS: Final = 131_072
"""Offsets of a stream whose rows are asked for at once; each row takes about 200 bytes while it is held."""

BATCH_MESSAGES: Final = 131_072
"""Messages of the groups that are read in one pass. Groups that lie mixed over so many messages are read as fast as
those that lie one behind the other; `read_many` holds 64 MiB of them at most, and 1 GiB more in a file; a group at the
end of a batch may go beyond it."""

FIRST_GROUPS: Final = 64
"""Groups whose rows are asked for at first, while nothing is known of how large groups are."""

GROUPS_AT_ONCE: Final = 2_048
"""Groups whose rows are asked for at once: what follows many small groups may be large ones."""

UNRECORDED_MEMBERS_MAX: Final = 500_000
"""Messages of groups that are not recorded yet and are held by their places, 200 bytes each: a recorder is to blame,
or a back-fill is due, where there are more."""

READ_RETRIES: Final = 1
"""How often a batch is gone on with on a new connection: the broker closes one while its groups are being handled."""


OnDuplicate: TypeAlias = Literal["first", "raise"]
"""What becomes of a number that several messages have."""

OnConflict: TypeAlias = Literal["raise", "skip", "dead_letter"]
"""What becomes of a group with two lasts, a number past its last, or a message that retention took."""

GroupStart: TypeAlias = int | datetime | None
"""Where reading begins: an offset, a moment, or the first message."""


class SharingArguments(TypedDict, total=False):
    """What `Relations.groups` takes with a consumer and without, for type checkers; defaults are told there."""

    order: GroupOrder
    start: GroupStart
    follow: bool
    idle_timeout_s: float | None
    on_duplicate: OnDuplicate
    on_conflict: OnConflict


class GroupArguments(SharingArguments, total=False):
    """What it takes without a consumer."""

    complete: bool


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of `Relations.groups`, where they are told."""

    names: tuple[str, ...] | None
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
        if self.on_conflict == "dead_letter":
            self._check_dead_letters()
        _check_start(self.start, self.names)
        if self.idle_timeout_s is not None:
            checked_seconds("idle_timeout_s", self.idle_timeout_s)

    @property
    def is_named(self) -> bool:
        """Whether streams were named: then one that was deleted is an error."""
        return self.names is not None

    def _check_dead_letters(self) -> None:
        # Whoever reads again without a position of its own would dead-letter again.
        raise InvalidInput('on_conflict="dead_letter" needs consumer=')


def check_order(order: Any) -> None:
    """See that an order of groups is one."""
    checked_choice("order", order, get_args(GroupOrder))


def _check_start(start: Any, names: tuple[str, ...] | None) -> None:
    """See that a start is one: an offset is one stream's own."""
    if start is None or isinstance(start, datetime):
        return
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput("start= takes an offset, a datetime, or None for the first message")
    if names is None or len(names) != 1:
        raise InvalidInput("start= takes an offset only where one stream is named; a datetime serves several")
