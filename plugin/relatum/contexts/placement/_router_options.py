"""What routers of contexts and of affinity sets are both told, checked in one place."""

from dataclasses import dataclass
from typing import ClassVar, Final

from relatum.checks import as_options, checked_choice, checked_count, checked_name, checked_seconds
from relatum.contexts.placement._publication_requests import WhenAway
from relatum.contexts.placement._session import SESSION_S, SESSION_S_MAX, SESSION_S_MIN
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName, balance_of

CHECK_S_MAX: Final = 0.04
"""Seconds between two looks: below the 0.05 s that a mover waits anyway, so that sessions make it wait no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The options that both kinds of routers have; their fields are documented where they have defaults."""

    kind: ClassVar[str]
    """What is named, for the metrics: "context" or "affinity"."""

    names_are_new: ClassVar[bool]
    """Whether names that a router does not know are mostly placed nowhere yet."""

    when_away: ClassVar[tuple[str, ...]]
    """What `when_database_away` may be."""

    header: str
    balance: BalanceName | Balance
    check_s: float = CHECK_S_MAX
    session_s: float = SESSION_S
    timeout_s: float = 10.0
    when_database_away: WhenAway

    @property
    def names_max(self) -> int:
        """Placements remembered."""
        raise NotImplementedError

    @property
    def open_sets_max(self) -> int | None:
        """Names that may be placed at once; None: any number."""
        return None

    @property
    def idle_s(self) -> float | None:
        """Seconds without use after which sets are closed, for all routers; None: as it is stored."""
        return None

    def rules(self) -> tuple[Balance, Balance]:
        """The rule for names, and the one for messages without a name, begun anew."""
        rule = balance_of(self.balance)
        return rule, rule

    def __post_init__(self) -> None:
        with as_options():
            checked_name("header", self.header)
            checked_seconds("check_s", self.check_s, most=CHECK_S_MAX)
            checked_seconds("session_s", self.session_s, least=SESSION_S_MIN, most=SESSION_S_MAX)
            checked_seconds("timeout_s", self.timeout_s)
            checked_choice("when_database_away", self.when_database_away, self.when_away)
            if self.open_sets_max is not None:
                checked_count("open_sets_max", self.open_sets_max, most=INTEGER_MAX, otherwise=", or None")
        self.rules()
