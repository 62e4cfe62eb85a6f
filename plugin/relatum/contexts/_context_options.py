"""The options and the statistics of routers and serial consumers."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from relatum.common.checks import as_options, checked_choice, checked_count, checked_name, checked_seconds, shown
from relatum.common.headers import AFFINITY_HEADER, CONTEXT_HEADER
from relatum.common.limits import INTEGER_MAX
from relatum.contexts._super_stream_rows import IDLE_S_MIN
from relatum.errors import ConfigurationError
from relatum.metrics import Counter, Distribution, Gauge, Observed, reported
from relatum.superstreams import Balance, BalanceName, Candidate, balance_of

WhenAway: TypeAlias = Literal["known", "wait", "fail"]
"""What a router does while the database is unavailable: use cached placements, wait, or fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The options that both kinds of routers share; `ContextOptions` and `AffinityOptions` document the fields."""

    kind: ClassVar[str]
    """The kind of router in metrics: "context" or "affinity"."""

    when_away: ClassVar[tuple[str, ...]]
    """The valid values of `when_database_away`."""

    names_option: ClassVar[str]
    """The name of the option that limits the cache."""

    header: str
    balance: BalanceName | Balance
    trust_clock: bool = True
    timeout_s: float = 10.0
    when_database_away: WhenAway

    @property
    def names_max(self) -> int:
        value: int = getattr(self, self.names_option)
        return value

    @property
    def open_sets_max(self) -> int | None:
        return None

    @property
    def idle_s(self) -> float | None:
        return None

    def rules(self) -> tuple[Balance, Balance]:
        """Return new balance rules: one for contexts or sets, one for messages without a name."""
        rule = balance_of(self.balance)
        return rule, rule

    def __post_init__(self) -> None:
        with as_options():
            checked_name("header", self.header)
            if not isinstance(self.trust_clock, bool):
                raise ConfigurationError(f"trust_clock= takes True or False, not {shown(self.trust_clock)}")
            checked_seconds("timeout_s", self.timeout_s)
            checked_choice("when_database_away", self.when_database_away, self.when_away)
            checked_count(self.names_option, self.names_max, most=INTEGER_MAX)
            if self.open_sets_max is not None:
                checked_count("open_sets_max", self.open_sets_max, most=INTEGER_MAX, otherwise=", or None")
        self.rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions(RouterOptions):
    """Options of a router of serialization contexts.

    Attributes:
        header: The header that names a message's context. All users of the super stream must agree on it.
        balance: How the router chooses the partition of a new context. "hash" (default): by the context's name, as
            RabbitMQ's stream clients route keys; or "round_robin", "least_loaded", "weighted" or a function. Adding
            partitions later does not move existing contexts.
        trust_clock: True (default): a message is valid if the router's last refresh from the database began less than
            0.2 s before the confirm, by this machine's clock; a thread refreshes while messages are published. False:
            the router refreshes after each message. Use False on machines that can be paused together with their clock.
        timeout_s: Seconds to wait for a move to end, or for an unavailable database. Default: 10. 0 does not wait.
        contexts_max: How many contexts' partitions to cache; the database is queried for others. Default: 100,000.
        when_database_away: "wait" (default): wait up to `timeout_s` for an unavailable database. "fail": do not wait.

    Raises:
        ConfigurationError: an option is invalid.
    """

    kind: ClassVar[str] = "context"
    when_away: ClassVar[tuple[str, ...]] = ("wait", "fail")
    names_option: ClassVar[str] = "contexts_max"

    header: str = CONTEXT_HEADER
    balance: BalanceName | Balance = "hash"
    contexts_max: int = 100_000
    when_database_away: Literal["wait", "fail"] = "wait"


def _by_sent_messages(rule: Balance) -> Balance:
    """Return a balance rule for messages without a set: a partition's load is the number of messages sent to it."""
    sent: defaultdict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def choose(name: str | None, candidates: Sequence[Candidate], /) -> int:
        with lock:
            loads = [Candidate(each.stream, each.weight, sent[each.stream]) for each in candidates]
            index = rule(name, loads)
            sent[candidates[index].stream] += 1
            return index

    return choose


@dataclass(frozen=True, slots=True, kw_only=True)
class AffinityOptions(RouterOptions):
    """Options of a router of affinity sets.

    Attributes:
        header: The header that names a message's set. All users of the super stream must agree on it.
        balance: How the router chooses the partition of a new set: "round_robin" (default), "least_loaded" (fewest open
            sets), "weighted" (by the weights of `AffinitySets.set_weights`), "hash" (of the set's name), or a function.
        trust_clock: See `ContextOptions`.
        timeout_s: Seconds that a publish may wait, mainly for a move to end. Default: 10. 0 does not wait.
        when_database_away: While the database is unavailable, "known" (default) publishes messages of cached sets, and
            raises `DatabaseUnavailable` for others. "wait": messages of all sets wait up to `timeout_s`. "fail":
            they raise `DatabaseUnavailable`. Messages without a set are published.
        idle_s: Seconds without a message after which a router closes a set (up to 45 s later); at least 60. The value
            applies to the whole super stream: the first router stores it, and another value raises
            `SuperStreamConflict`. None (default): the stored value; if there is none, sets are never closed.
        open_sets_max: How many sets of the super stream may be open. None (default): no limit. With a limit, routers
            open sets one at a time.
        known_sets_max: How many sets' partitions to cache; the database is queried for others. Default: 100,000, about
            50 MB of memory if that many are open.
        predecessors_max: How many messages to remember as predecessors, by their `message_id`. Default: 65,536.

    Raises:
        ConfigurationError: an option is invalid.
    """

    kind: ClassVar[str] = "affinity"
    when_away: ClassVar[tuple[str, ...]] = ("known", "wait", "fail")
    names_option: ClassVar[str] = "known_sets_max"

    header: str = AFFINITY_HEADER
    balance: BalanceName | Balance = "round_robin"
    when_database_away: WhenAway = "known"
    idle_s: float | None = None
    open_sets_max: int | None = None
    known_sets_max: int = 100_000
    predecessors_max: int = 65_536

    def rules(self) -> tuple[Balance, Balance]:
        return balance_of(self.balance), _by_sent_messages(balance_of(self.balance))

    def __post_init__(self) -> None:
        RouterOptions.__post_init__(self)
        with as_options():
            if self.idle_s is not None:
                checked_seconds("idle_s", self.idle_s, least=IDLE_S_MIN)
            checked_count("predecessors_max", self.predecessors_max, least=0, most=INTEGER_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialOptions:
    """Options of a serial consumer.

    Attributes:
        start: Where a consumer with a new name begins: at the "first" message (default), or the "next" one published.
        header: The header that names contexts. None (default): the stored header, or "serialization_context" if the
            super stream is new to the database.
        batch_messages: Maximum messages in a batch. Default: 1,000.
        batch_bytes: Approximate maximum bytes in a batch; a larger message gets its own batch. Default: 4 MiB.
        batch_s: Seconds to wait for more messages before the consumer delivers a smaller batch; 0 does not wait.
            Default: 0.02.
        held_messages_max: Maximum messages held back in a partition. At the limit, reading pauses until some of them
            are delivered. Default: 10,000.
        held_bytes_max: The same limit in bytes. Default: 64 MiB.
        lease_s: Seconds after which other members take over from a dead member; at least 1. A member renews its lease
            three times in this time. Default: 4.

    Raises:
        InvalidInput: an option is invalid.
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
        # A lease shorter than a second expires while its holder waits for a busy database.
        checked_seconds("lease_s", self.lease_s, least=1.0)


@reported("super_stream", "kind")
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """Counts of a router since it was opened, and the size of its cache.

    Attributes:
        published: Published messages with a context or an affinity set.
        unnamed: Published messages without a context or set, placed by the balance rule.
        asked: Messages that made the router query the database, because its last refresh did not prove them valid.
        adopted: Messages overtaken by a move, and adopted into the partition their context moved to.
        move_wait_s: Seconds that messages waited for a move to end.
        known_names: Contexts or sets whose partition is cached.
        unchecked: Published messages that are not yet known to be valid.
    """

    published: Annotated[int, Counter("relatum_router_published_total", "Messages published with a context or set")]
    unnamed: Annotated[int, Counter("relatum_router_unnamed_total", "Messages published without a context or set")]
    asked: Annotated[int, Counter("relatum_router_asked_total", "Messages that needed a query to the database")]
    adopted: Annotated[int, Counter("relatum_router_adopted_total", "Messages adopted after a move overtook them")]
    move_wait_s: Annotated[
        Observed, Distribution("relatum_router_move_wait_seconds", "Time that messages waited for a move to end")
    ]
    known_names: Annotated[int, Gauge("relatum_router_known_names", "Contexts or sets whose partition is cached")]
    unchecked: Annotated[
        int, Gauge("relatum_router_unchecked_messages", "Messages published and not yet known to be valid")
    ]


@reported("super_stream", "consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SerialStatistics:
    """Counts of one member of a serial consumer, and its partitions and held messages.

    Attributes:
        partitions: Partitions that the member reads now.
        delivered: Messages delivered to the application; those of a returned batch count again.
        acknowledged: Messages that the application acknowledged; their position is stored.
        held_messages: Messages held back until earlier messages of their context in another partition are consumed.
        held_bytes: The bytes of those messages.
        pause_s: Seconds for which messages of moved contexts were held back in their new partition.
    """

    partitions: Annotated[int, Gauge("relatum_serial_partitions", "Partitions that this process reads")]
    delivered: Annotated[int, Counter("relatum_serial_delivered_total", "Messages handed to the application")]
    acknowledged: Annotated[int, Counter("relatum_serial_acknowledged_total", "Messages acknowledged")]
    held_messages: Annotated[int, Gauge("relatum_serial_held_messages", "Messages held back for a move")]
    held_bytes: Annotated[int, Gauge("relatum_serial_held_bytes", "Bytes of messages held back for a move")]
    pause_s: Annotated[
        Observed,
        Distribution("relatum_serial_pause_seconds", "Time that a moved context was held back in its new partition"),
    ]
