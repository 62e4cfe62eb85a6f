"""How a router of contexts places and checks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from relatum.checks import as_options, checked_count
from relatum.contexts.placement._router_options import RouterOptions
from relatum.headers import CONTEXT_HEADER
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions(RouterOptions):
    """How a router of contexts places and checks.

    Attributes:
        header: The header that names a message's context. All who use the super stream must agree.
        balance: Where a context is placed by its first message. "hash" (default): by its name, as RabbitMQ's stream
            clients route keys; or "round_robin", "least_loaded", "weighted" or a function. Partitions that are added
            later move no context.
        check_s: Seconds for which one look at the database serves the confirms after it. 0 (default): each message is
            checked before `publish` returns. Above, up to 0.04: `publish` mostly returns at once with the confirm.
            Should this process die then, while the clock of its machine stood still across a move, a message told of
            as published may be in no consumer's order.
        timeout_s: Seconds to wait for a move to end, and for the database where it is away. Default: 10. 0: not at all.
        contexts_max: Contexts whose partitions are remembered; others are read again when they are used.
        when_database_away: "wait" (default): up to `timeout_s` for a database that is away. "fail": not at all.

    Raises:
        ConfigurationError: one of them cannot be.
    """

    kind: ClassVar[str] = "context"
    names_are_new: ClassVar[bool] = False
    when_away: ClassVar[tuple[str, ...]] = ("wait", "fail")

    header: str = CONTEXT_HEADER
    balance: BalanceName | Balance = "hash"
    check_s: float = 0.0
    contexts_max: int = 100_000
    when_database_away: Literal["wait", "fail"] = "wait"

    @property
    def names_max(self) -> int:
        """Placements remembered."""
        return self.contexts_max

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        with as_options():
            checked_count("contexts_max", self.contexts_max, most=INTEGER_MAX)
