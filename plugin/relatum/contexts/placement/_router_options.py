"""What a router is told, checked once for both faces."""

from dataclasses import dataclass
from typing import Final

from relatum.checks import as_options, checked_choice, checked_count, checked_name, checked_seconds
from relatum.contexts.placement._publication_requests import WhenAway
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName

CHECK_S_MAX: Final = 0.04
"""Seconds for which a look may serve: below the 0.05 s that a mover waits before its fence."""

AWAY: Final = ("known", "wait", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How a router places and checks.

    Attributes:
        kind: What is named, for the metrics: "context" or "affinity".
        header: The header that names contexts, or affinity sets.
        balance: By which rule the partition of a name is chosen, and that of messages without one.
        unnamed_balance: By which rule that of messages without a name is chosen; None: by the same.
        check_s: Seconds for which a look at the database serves the confirms after it; 0: none.
        timeout_s: Seconds to wait for a move to end, or for a database that is away, and for each question to it.
        names_max: Placements remembered.
        unchecked_max: Messages that may wait for their check while the database is away.
        open_sets_max: Names that may be placed at once; None: any number.
        when_database_away: Whether known placements go on, or publishing waits, or fails.
        idle_s: Seconds without use after which sets are closed, for all routers; None: as it is stored.
        names_are_new: Whether names this router does not know are mostly placed nowhere yet.
    """

    kind: str
    header: str
    balance: BalanceName | Balance
    unnamed_balance: Balance | None = None
    check_s: float = 0.0
    timeout_s: float = 10.0
    names_max: int = 100_000
    unchecked_max: int = 10_000
    open_sets_max: int | None = None
    when_database_away: WhenAway = "wait"
    names_are_new: bool = False
    idle_s: float | None = None

    def __post_init__(self) -> None:
        with as_options():
            checked_name("header", self.header)
            checked_seconds("check_s", self.check_s, most=CHECK_S_MAX)
            checked_seconds("timeout_s", self.timeout_s)
            for name in ("names_max", "unchecked_max"):
                checked_count(name, getattr(self, name), most=INTEGER_MAX)
            if self.open_sets_max is not None:
                checked_count("open_sets_max", self.open_sets_max, most=INTEGER_MAX, otherwise=", or None")
            checked_choice("when_database_away", self.when_database_away, AWAY)
