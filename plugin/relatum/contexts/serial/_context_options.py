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
        check_s: Seconds between two looks at the database by a thread, while messages are published. Default: 0.04,
            which is also the most. While they go on, `publish` returns with the confirm. 0: without a session, each
            message is followed by a look of its own, and no clock has a say.
        session_s: Seconds for which a move waits for this router, where that does not answer. Default: 2; from 0.1 to
            60. After so long without PostgreSQL, messages wait for it again.
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
