"""How a router of affinity sets places and checks."""

from dataclasses import dataclass
from typing import ClassVar

from relatum.checks import as_options, checked_count, checked_seconds
from relatum.contexts.affinity._balancing import MessageBalance
from relatum.contexts.placement._placement_opening import IDLE_S_MIN
from relatum.contexts.placement._publication_requests import WhenAway
from relatum.contexts.placement._router_options import RouterOptions
from relatum.headers import AFFINITY_HEADER
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName, balance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityOptions(RouterOptions):
    """How a router of affinity sets places and checks.

    Attributes:
        header: The header that names a message's set. All who use the super stream must agree.
        balance: Where a set is placed by its first message: "round_robin" (default), "least_loaded" (fewest open
            sets), "weighted" (by those `AffinitySets.set_weights` stored), "hash" (of its name), or a function.
        check_s: Seconds between two looks at the database by a thread, up to 0.04 (default: 0.02): how long it may be
            unknown here that a set was closed or moved. 0: each message is followed by a look of its own.
        session_s: Seconds for which a move waits for this router, where that does not answer. Default: 2; 0.1 to 60.
        timeout_s: Seconds to wait for a move to end, and for what else is waited for. Default: 10. 0: not at all.
        when_database_away: "known" (default): messages of known sets go on, a first message is `DatabaseUnavailable`.
            "wait": all wait up to `timeout_s`. "fail": all are `DatabaseUnavailable`.
        idle_s: Seconds without a message after which sets are closed, whoever opened them; at least 60, and up to 30
            more. It is the super stream's: the first router that names it sets it, one that names another is refused.
            None (default): as it is stored, never where nobody named it.
        open_sets_max: Sets of the super stream that may be open. None (default): any number. With a number, sets are
            placed one after the other by all routers.
        known_sets_max: Sets whose partitions are remembered; others are asked for again when they are used. Default:
            100,000, some 50 MB of memory where that many are open.
        predecessors_max: Messages remembered as predecessors, by their `message_id`.

    Raises:
        ConfigurationError: one of them cannot be.
    """

    kind: ClassVar[str] = "affinity"
    names_are_new: ClassVar[bool] = True
    when_away: ClassVar[tuple[str, ...]] = ("known", "wait", "fail")

    header: str = AFFINITY_HEADER
    balance: BalanceName | Balance = "round_robin"
    check_s: float = 0.02
    when_database_away: WhenAway = "known"
    idle_s: float | None = None
    open_sets_max: int | None = None
    known_sets_max: int = 100_000
    predecessors_max: int = 65_536

    @property
    def names_max(self) -> int:
        """Placements remembered."""
        return self.known_sets_max

    def rules(self) -> tuple[Balance, Balance]:
        """The rule for sets, and the one for messages of none, begun anew."""
        return balance_of(self.balance), MessageBalance(self.balance)

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        with as_options():
            if self.idle_s is not None:
                checked_seconds("idle_s", self.idle_s, least=IDLE_S_MIN)
            checked_count("known_sets_max", self.known_sets_max, most=INTEGER_MAX)
            checked_count("predecessors_max", self.predecessors_max, least=0, most=INTEGER_MAX)
