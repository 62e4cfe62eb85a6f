"""How groups are read, checked once for both faces."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from relatum.checks import checked_choice, checked_seconds
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum_consumer.groups.reading._assembly import GroupOrder

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
