"""Which partition the next message, or the next named set of messages, goes to. Pure."""

import asyncio
import itertools
import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias

from relatum.checks import checked_text, checked_weights, shown
from relatum.closing import Closing
from relatum.errors import ConfigurationError, InvalidInput
from relatum.processes import after_fork
from relatum.superstreams.layout import Layout, Partition, partition_of
from relatum.superstreams.targets import Target

if TYPE_CHECKING:
    from relatum.superstreams._target import SuperStream


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that may be chosen.

    Attributes:
        stream: The stream's name.
        weight: Its share among the candidates for the rule "weighted", above 0; 0 is never chosen by it. Default: 1.
        load: What "least_loaded" compares, such as the number of sets placed there. Default: 0.
    """

    stream: str
    weight: float = 1.0
    load: float = 0


class Balance(Protocol):
    """A rule that chooses among partitions. Any function of this form is one; threads may share it."""

    def __call__(self, name: str | None, candidates: Sequence[Candidate], /) -> int:
        """The index of the chosen one.

        Args:
            name: The name of the set that is placed, or a message's routing key; None where there is none.
            candidates: At least one, in the order of the partitions.
        """


BalanceName: TypeAlias = Literal["round_robin", "least_loaded", "weighted", "hash"]
"""Rules by name: one after the other; where the least is; in proportion to weights; by the hash of the name."""


def _round_robin() -> Balance:
    """One after the other, from a random one on, so that publishers that start together do not begin with the same."""
    turns = itertools.count(secrets.randbelow(1 << 30))
    return lambda _name, candidates: next(turns) % len(candidates)


def _weighted() -> Balance:
    """In proportion to weights, and evenly mixed: 5, 1 and 1 give a a b a c a a, not five times a first.

    Each turn every candidate gains its weight; the one that has most is chosen and gives back what all have gained.
    Streams are known by name, so the proportion holds while partitions come and go.
    """
    gained: dict[str, float] = {}
    lock = threading.Lock()

    def choose(_name: str | None, candidates: Sequence[Candidate], /) -> int:
        total = sum(candidate.weight for candidate in candidates)
        if total <= 0:
            raise InvalidInput("No partition has a weight above 0.")
        with lock:
            now = {each.stream: gained.get(each.stream, 0.0) + each.weight for each in candidates}
            chosen = max((each for each in candidates if each.weight > 0), key=lambda each: now[each.stream])
            now[chosen.stream] -= total
            gained.clear()
            gained.update(now)
        return candidates.index(chosen)

    return choose


def _hash() -> Balance:
    """By the hash of the name, as clients of RabbitMQ route keys; what has no name goes one after the other."""
    unnamed = _round_robin()
    return lambda name, candidates: unnamed(None, candidates) if name is None else partition_of(name, len(candidates))


def _least_loaded() -> Balance:
    """Where the least is; one after the other among those that have equally little."""
    turn = _round_robin()

    def choose(_name: str | None, candidates: Sequence[Candidate], /) -> int:
        least = min(candidate.load for candidate in candidates)
        lightest = [index for index, candidate in enumerate(candidates) if candidate.load == least]
        return lightest[turn(None, [candidates[index] for index in lightest])]

    return choose


_RULES: Final[dict[str, Callable[[], Balance]]] = {
    "round_robin": _round_robin,
    "least_loaded": _least_loaded,
    "weighted": _weighted,
    "hash": _hash,
}


def _checked(rule: Balance) -> Balance:
    """A rule of the caller's own; a `ConfigurationError` where it gives what is no candidate's index."""

    def choose(name: str | None, candidates: Sequence[Candidate], /) -> int:
        index = rule(name, candidates)
        if not isinstance(index, int) or not 0 <= index < len(candidates):
            raise ConfigurationError(
                f"the function that balances gives the index of one of {len(candidates)} candidates, not {index!r}; "
                "nothing was sent"
            )
        return index

    return choose


def balance_of(rule: "BalanceName | Balance") -> Balance:
    """The rule of that name, begun anew; a rule of the caller's own, whose answers are checked.

    Raises:
        ConfigurationError: there is no rule of that name, or it cannot be called.
    """
    if callable(rule):
        return _checked(rule)
    if not isinstance(rule, str) or rule not in _RULES:
        raise ConfigurationError(f"balance is one of {', '.join(_RULES)}, or a function, not {shown(rule)}")
    return _RULES[rule]()


_TOKEN_VERSION: Final = 1
"""What a token begins with, so that a later form can be told from this one."""


class Placing:
    """Chooses the partitions of one super stream's handles, so that they are balanced among each other."""

    def __init__(self) -> None:
        self._rules: dict[BalanceName | Balance, Balance] = {}
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()
        after_fork(self, Placing._renew)

    def _renew(self) -> None:
        """In a child: no other thread places; the handles that came along are open here as well."""
        self._lock = threading.Lock()
        self._rules = {}

    def place(
        self, layout: Layout, balance: BalanceName | Balance, name: str | None, weights: Mapping[str, float]
    ) -> Partition:
        """Choose for another handle, which counts as open from now on."""
        with self._lock:
            if balance not in self._rules:
                self._rules[balance] = balance_of(balance)
            candidates = [
                Candidate(each.stream, weights.get(each.stream, 1.0), self._open[each.stream]) for each in layout
            ]
            chosen = layout.partitions[self._rules[balance](name, candidates)]
            self._open[chosen.stream] += 1
            return chosen

    def end(self, partition: Partition) -> None:
        """Count a handle no longer."""
        with self._lock:
            self._open[partition.stream] -= 1


class AffinityHandle(Target, Closing):
    """An affinity set: all messages published by it go to the partition that its first one went to.

    Made by `SuperStream.affinity`. The partition is known to this object alone: no database is asked, and no header is
    added. Another process goes on with the set by its `token`. Threads may share it as far as they may share the
    channels they publish on.

    Args:
        super_stream: The super stream.
        balance, name, weights: As of `SuperStream.affinity`.
        partition: The partition, where it is known already.

    Raises:
        ConfigurationError: there is no such rule.
    """

    def __init__(
        self,
        super_stream: "SuperStream",
        *,
        balance: "BalanceName | Balance" = "round_robin",
        name: str | None = None,
        weights: Mapping[str, float] | None = None,
        partition: Partition | None = None,
    ) -> None:
        if not isinstance(super_stream, Target):
            raise InvalidInput(f"super_stream= takes a SuperStream, not {shown(super_stream)}")
        if not isinstance(partition, Partition | None):
            raise InvalidInput(f"partition= takes a Partition, or None, not {shown(partition)}")
        balance_of(balance)  # A wrong name is an error now, not with the first message.
        self._super_stream = super_stream
        self._balance: BalanceName | Balance = balance
        self._name = name
        if name is not None:
            checked_text("name", name)
        self._weights = {} if weights is None else checked_weights("weights", weights)
        self._partition = partition
        self._is_counted = False
        self._lock = threading.Lock()
        after_fork(self, AffinityHandle._renew)

    def _renew(self) -> None:
        """In a child: no other thread places it. Where it is placed already, both go on with the same partition."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        where = "not placed yet" if self._partition is None else self._partition.stream
        return f"<AffinityHandle of {self._super_stream.name}: {where}>"

    @property
    def partition(self) -> Partition | None:
        """Where the set's messages go; None before the first one."""
        return self._partition

    @property
    def token(self) -> str:
        """Text by which another process goes on with the set: `AffinityHandle.from_token`.

        Raises:
            InvalidInput: no message was published yet, so there is no partition to tell.
        """
        partition = self._partition
        if partition is None:
            raise InvalidInput("this affinity set is not placed yet: publish its first message, then pass the token on")
        facts = [_TOKEN_VERSION, self._super_stream.name, partition.place, partition.stream, partition.binding_key]
        return json.dumps(facts, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_token(cls, token: str) -> Self:
        """The set of a token; nothing is asked of anybody.

        Where the partition was taken out of the super stream since, a mandatory message is `PublishUnroutable`.

        Raises:
            InvalidInput: this is no token.
        """
        # Not at the top: a super stream makes handles.
        from relatum.superstreams._target import SuperStream

        try:
            version, super_stream, place, stream, binding_key = json.loads(token)
        except (TypeError, ValueError):
            raise InvalidInput("this is no token of an affinity handle") from None
        texts = (super_stream, stream, binding_key)
        if version != _TOKEN_VERSION or not isinstance(place, int) or not all(isinstance(each, str) for each in texts):
            raise InvalidInput("this is no token of an affinity handle, or one of a later version")
        return cls(SuperStream(super_stream), partition=Partition(place, stream, binding_key))

    def destination(self, channel: Any, body: bytes | str, properties: Any, routing_key: str) -> tuple[str, str]:
        """The exchange and the routing key of the set's messages; places the set where it is not placed yet."""
        partition = self._partition or self._place(self._super_stream.layout(channel))
        return self._super_stream.name, partition.binding_key

    async def destination_async(self, channel: Any, message: Any, routing_key: str) -> tuple[str, str]:
        """The exchange and the routing key of the set's messages; places the set where it is not placed yet."""
        partition = self._partition
        if partition is None:
            connection = (await channel.get_underlay_channel()).connection
            partition = self._place(await asyncio.to_thread(self._super_stream.layout, connection))
        return self._super_stream.name, partition.binding_key

    def close(self) -> None:
        """Count as open no longer: "least_loaded" is about open handles. It can still be published by."""
        with self._lock:
            is_counted, self._is_counted = self._is_counted, False
        if is_counted and self._partition is not None:
            self._super_stream.placing.end(self._partition)

    def _place(self, layout: Layout) -> Partition:
        """Choose once, whoever asks first."""
        with self._lock:
            if self._partition is None:
                placing = self._super_stream.placing
                self._partition = placing.place(layout, self._balance, self._name, self._weights)
                self._is_counted = True
            return self._partition
