"""The options of routers and of serial consumers, and what these count."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from relatum.checks import as_options, checked_choice, checked_count, checked_name, checked_seconds, shown
from relatum.contexts._publication import WhenAway
from relatum.contexts._super_stream_rows import IDLE_S_MIN
from relatum.errors import ConfigurationError
from relatum.headers import AFFINITY_HEADER, CONTEXT_HEADER
from relatum.limits import INTEGER_MAX
from relatum.metrics import Counter, Distribution, Gauge, Observed, reported
from relatum.superstreams import Balance, BalanceName, Candidate, balance_of


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
    trust_clock: bool = True
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
            if not isinstance(self.trust_clock, bool):
                raise ConfigurationError(f"trust_clock= takes True or False, not {shown(self.trust_clock)}")
            checked_seconds("timeout_s", self.timeout_s)
            checked_choice("when_database_away", self.when_database_away, self.when_away)
            if self.open_sets_max is not None:
                checked_count("open_sets_max", self.open_sets_max, most=INTEGER_MAX, otherwise=", or None")
        self.rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions(RouterOptions):
    """How a router of contexts places and checks.

    Attributes:
        header: The header that names a message's context. All who use the super stream must agree.
        balance: Where a context is placed by its first message. "hash" (default): by its name, as RabbitMQ's stream
            clients route keys; or "round_robin", "least_loaded", "weighted" or a function. Partitions that are added
            later move no context.
        trust_clock: True (default): a message counts once it is confirmed, where the router's last look at the database
            began less than 0.2 s before, by this machine's clock; a thread looks while messages are published. False:
            each message is followed by a look of its own. For machines that are paused together with their clock.
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


def _by_messages(rule: Balance) -> Balance:
    """The rule for sets, for messages of none, with turns of its own: their load is what was sent here."""
    sent: defaultdict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def choose(name: str | None, candidates: Sequence[Candidate], /) -> int:
        with lock:
            seen = [Candidate(each.stream, each.weight, sent[each.stream]) for each in candidates]
            index = rule(name, seen)
            sent[candidates[index].stream] += 1
            return index

    return choose


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityOptions(RouterOptions):
    """How a router of affinity sets places and checks.

    Attributes:
        header: The header that names a message's set. All who use the super stream must agree.
        balance: Where a set is placed by its first message: "round_robin" (default), "least_loaded" (fewest open
            sets), "weighted" (by those `AffinitySets.set_weights` stored), "hash" (of its name), or a function.
        trust_clock: As of `ContextOptions`.
        timeout_s: Seconds to wait for a move to end, and for what else is waited for. Default: 10. 0: not at all.
        when_database_away: "known" (default): messages of known sets go on, a first message is `DatabaseUnavailable`.
            "wait": all wait up to `timeout_s`. "fail": all are `DatabaseUnavailable`.
        idle_s: Seconds without a message after which sets are closed, those of all routers; at least 60, and up to 45
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
        return balance_of(self.balance), _by_messages(balance_of(self.balance))

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        with as_options():
            if self.idle_s is not None:
                checked_seconds("idle_s", self.idle_s, least=IDLE_S_MIN)
            checked_count("known_sets_max", self.known_sets_max, most=INTEGER_MAX)
            checked_count("predecessors_max", self.predecessors_max, least=0, most=INTEGER_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialOptions:
    """How a serial consumer reads.

    Attributes:
        start: Where a new name begins: with the "first" message, or with the "next" one that is published.
        header: The header that names contexts; None takes the one stored, and "serialization_context" where nobody has
            opened the super stream yet.
        batch_messages: Messages of a batch, at most.
        batch_bytes: Their bytes, about; one larger message still is a batch.
        batch_s: Seconds a batch that is not full waits for more; 0 for not at all.
        held_messages_max: Messages held back in a partition; then it is read no further until some are delivered.
        held_bytes_max: Their bytes.
        lease_s: Seconds after which others take over from a member that died; at least 1. It renews four times as
            often.

    Raises:
        InvalidInput: one of them cannot be.
    """

    start: Literal["first", "next"] = "first"
    header: str | None = None
    batch_messages: int = 1_000
    batch_bytes: int = 4 * 1024 * 1024
    batch_s: float = 0.02
    held_messages_max: int = 10_000
    held_bytes_max: int = 64 * 1024 * 1024
    lease_s: float = 4.0

    def __post_init__(self) -> None:
        checked_choice("start", self.start, ("first", "next"))
        if self.header is not None:
            checked_name("header", self.header)
        for name in ("batch_messages", "batch_bytes", "held_messages_max", "held_bytes_max"):
            checked_count(name, getattr(self, name), most=INTEGER_MAX)
        checked_seconds("batch_s", self.batch_s)
        # A lease shorter than a second lapses while its holder waits for a busy database.
        checked_seconds("lease_s", self.lease_s, least=1.0)


@reported("super_stream", "kind")
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """What a router has counted, and what it remembers.

    Attributes:
        published: Messages of a context, or an affinity set, that were published.
        unnamed: Messages of none, which went by the rule.
        asked: Messages that needed a look at the database of their own, since no look was recent enough.
        adopted: Messages that a move had overtaken, and that were taken in again where their context is now.
        move_wait_s: Seconds that messages waited for a move to end.
        known_names: Contexts, or sets, whose partition is remembered.
        unchecked: Messages that are published and not known to count yet.
    """

    published: Annotated[int, Counter("relatum_router_published_total", "Messages of a context or set published")]
    unnamed: Annotated[int, Counter("relatum_router_unnamed_total", "Messages of no context or set published")]
    asked: Annotated[int, Counter("relatum_router_asked_total", "Messages of which the database had to be asked")]
    adopted: Annotated[int, Counter("relatum_router_adopted_total", "Messages taken in again behind a move")]
    move_wait_s: Annotated[
        Observed, Distribution("relatum_router_move_wait_seconds", "Time that messages waited for a move to end")
    ]
    known_names: Annotated[
        int, Gauge("relatum_router_known_names", "Contexts or sets whose partition is remembered now")
    ]
    unchecked: Annotated[
        int, Gauge("relatum_router_unchecked_messages", "Messages published and not known to count yet")
    ]


@reported("super_stream", "consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SerialStatistics:
    """What one member of a serial consumer has counted, and what it has.

    Attributes:
        partitions: Partitions it reads now.
        delivered: Messages handed to the application; again, where a batch is given back.
        acknowledged: Messages whose position is stored.
        held_messages: Messages that wait for what their context has in another partition.
        held_bytes: Their bytes.
        pause_s: Seconds that moved contexts waited in their new partition.
    """

    partitions: Annotated[int, Gauge("relatum_serial_partitions", "Partitions that this process reads")]
    delivered: Annotated[int, Counter("relatum_serial_delivered_total", "Messages handed to the application")]
    acknowledged: Annotated[int, Counter("relatum_serial_acknowledged_total", "Messages acknowledged")]
    held_messages: Annotated[int, Gauge("relatum_serial_held_messages", "Messages held back behind a move")]
    held_bytes: Annotated[int, Gauge("relatum_serial_held_bytes", "Bytes held back behind a move")]
    pause_s: Annotated[
        Observed, Distribution("relatum_serial_pause_seconds", "Time that a moved context waited in its new partition")
    ]
