"""The methods of `Relations` that iterate over groups, and the status of group consumers."""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Unpack, overload
from weakref import WeakSet

from relatum.common.checks import checked_name
from relatum.errors import InvalidInput, NotFound
from relatum.reading import BrokerAddress, StreamBounds
from relatum.store.coverage import merged, missing
from relatum.store.database import sql
from relatum_consumer.groups._assembly import GroupOrder
from relatum_consumer.groups._consumer import SharedConsumer, by_name, scanned_of
from relatum_consumer.groups._finding import whole_groups
from relatum_consumer.groups._one_group import OneGroupMethods
from relatum_consumer.groups._options import GroupArguments, GroupConsumer, GroupOptions, SharingArguments
from relatum_consumer.groups._reading import Group
from relatum_consumer.groups._shared_groups import SharedGroups
from relatum_consumer.lookups.arguments import Names, names_of
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import all_ends
from relatum_consumer.lookups.telemetry import lookup
from relatum_consumer.lookups.waiting import Pause, without_pauses

STATES: Final = ("open", "ready", "claimed", "done", "dead")


@dataclass(frozen=True, slots=True)
class GroupMemberStatus:
    """A member of a group consumer that holds claims.

    Attributes:
        holder: The member's name, given or generated.
        claimed: Number of groups that it has claimed.
        lease_expires_at: When the first of its leases expires, unless it is renewed.
        is_alive: Whether `lease_expires_at` is in the future.
    """

    holder: str
    claimed: int
    lease_expires_at: datetime
    is_alive: bool


@dataclass(frozen=True, slots=True)
class GroupSourceStatus:
    """A stream that a group consumer reads.

    Attributes:
        stream: The stream's name.
        scanned_to: The offset before which members have scanned the stream for groups; None if no scan has begun.
        lag_offsets: Number of retained offsets that are not scanned: not recorded yet, or recorded since the last scan.
            None if the broker does not have the stream.
    """

    stream: str
    scanned_to: int | None
    lag_offsets: int | None


@dataclass(frozen=True, slots=True)
class GroupConsumerStatus:
    """The status of a group consumer.

    Attributes:
        consumer: The consumer's name.
        streams: The streams and super streams that it reads; None: all recorded streams.
        order: The order of its groups.
        counts: Number of groups by state: "open" (incomplete), "ready", "claimed", "done", "dead".
        oldest_waiting_at: When the oldest ready or claimed group was found; None if there is none.
        oldest_open_at: When the oldest open group was found; None if there is none.
        members: The members that hold claims, ordered by name.
        sources: The recorded streams that it reads, ordered by name.
    """

    consumer: str
    streams: tuple[str, ...] | None
    order: GroupOrder
    counts: Mapping[str, int]
    oldest_waiting_at: datetime | None
    oldest_open_at: datetime | None
    members: tuple[GroupMemberStatus, ...]
    sources: tuple[GroupSourceStatus, ...]


NAMES: Final = sql("SELECT name FROM relatum.group_consumers WHERE vhost = :vhost::text ORDER BY name")

COUNTS: Final = sql("""
    SELECT state, count(*), min(opened_at)
    FROM relatum.group_states
    WHERE consumer_id = :consumer_id::int
    GROUP BY state""")

# PostgreSQL uses the index `group_states_next` only if the condition on `state` is literally that of the index.
HOLDERS: Final = sql("""
    SELECT holder, count(*), min(lease_expires_at), min(lease_expires_at) >= clock_timestamp()
    FROM relatum.group_states
    WHERE consumer_id = :consumer_id::int AND state IN ('ready', 'claimed') AND holder IS NOT NULL
    GROUP BY holder
    ORDER BY holder""")
"""Selects the members with claims: holder, number of claims, when the first lease expires, whether that is to come."""


def _sources(catalog: Catalog, consumer: SharedConsumer) -> Iterator[GroupSourceStatus]:
    present = {stream.name: stream.stream_id for stream in catalog.streams(consumer.names)}
    scanned = scanned_of(catalog.servers, consumer, present.values())
    for stream, bounds in all_ends(catalog.servers, sorted(present), is_named=False).items():
        number, lag = present[stream], None
        known = merged(scanned.get(number, ()))
        if isinstance(bounds, StreamBounds):
            retained = (max(bounds.first or 0, consumer.low(number)), 0 if bounds.last is None else bounds.last + 1)
            lag = sum(stop - start for start, stop in missing(retained, known))
        yield GroupSourceStatus(stream, known[-1][1] if known else None, lag)


class GroupMethods(OneGroupMethods):
    """The methods of `Relations` that read groups."""

    _address: BrokerAddress
    _shared_groups: "WeakSet[SharedGroups]"

    @overload
    def groups(
        self, streams: Names = None, *, consumer: None = None, **options: Unpack[GroupArguments]
    ) -> Generator[Group, None, None]: ...
    @overload
    def groups(
        self, streams: Names = None, *, consumer: str | GroupConsumer, **options: Unpack[SharingArguments]
    ) -> SharedGroups: ...
    def groups(
        self,
        streams: Names = None,
        *,
        consumer: str | GroupConsumer | None = None,
        **options: Any,
    ) -> Generator[Group, None, None] | SharedGroups:
        """Return an iterator over complete groups, however their messages are spread over streams and mixed.

        Groups that are complete now are returned in their order. With `follow`, a group that becomes complete later is
        returned at that time, even if its place is before a group already returned. No group is lost, and each is
        returned once. Memory holds the places of a batch of groups; of their messages, at most 64 MiB and one group, as
        for `StreamReader.read_many`.

        Args:
            streams: The streams and super streams to search; others are ignored. None: all recorded streams.
            consumer: The name under which several processes share the groups and store their position, or a
                `GroupConsumer` with options. The iterator then yields `SharedGroup`s of recorded messages, which you
                acknowledge one by one; do not set `complete`. None (default): no position is stored.
            **options: The following keyword arguments.
            order: "logical" (default): groups by the place of their message 1, messages by number. "physical": groups
                by the place of the first message that arrived, messages in the order of arrival. Within a stream, that
                is the order of offsets; streams are merged by the messages' times, then by name.
            start: Where to begin: an offset, if you name one stream; a `datetime` (without a zone: UTC), for groups
                whose place has that time or a later one; None for the first message. A group whose place is before the
                start is left out. A group whose place is after it has all its messages, even earlier ones.
            complete: True (default) also reads retained messages that are not recorded yet, so that no complete group
                is missing. False reads only recorded messages.
            follow: True continues with groups that become complete later, once they are recorded. Default: False.
            idle_timeout_s: With `follow`: end after this many seconds without a group. None (default): never end.
            on_duplicate: What to do if several messages have the same number: "first" (default) takes the first to
                arrive, and puts the others into `Group.duplicates`; "raise" raises `GroupConflict`. A message that an
                exchange routed to several streams is not a duplicate.
            on_conflict: What to do with a group that has all numbers, but also two last messages, numbers past the
                last, or messages that retention has dropped: "raise" (default) raises `GroupConflict` at its turn, and
                ends the iteration; "skip" skips the group; "dead_letter" publishes its messages to the consumer's
                dead-letter stream.

        Returns:
            An iterator; use `contextlib.closing` if you leave it early. With a consumer it is a context manager.

        Raises:
            KeyNotDefined: the key `message_group`, which finds groups, is not defined.
            GroupConflict: see `on_duplicate` and `on_conflict`. With a consumer, the group is released.
            ConfigurationError: the consumer exists with other streams, or another order.
            InvalidInput: too many messages are not recorded.
            StreamReplaced: a stream was recorded anew or forgotten during the iteration: groups may be missing.
        """
        names = names_of("streams", streams)
        if consumer is not None:
            member = GroupConsumer(consumer) if isinstance(consumer, str) else consumer
            if not isinstance(member, GroupConsumer):
                raise InvalidInput("consumer= takes a name or a GroupConsumer")
            shared = SharedGroups(self._catalog, self._address, GroupOptions(names, member, **options))
            self._shared_groups.add(shared)
            return shared
        return without_pauses(self._groups(names, **options))

    def _groups(
        self, names: tuple[str, ...] | None, **options: Unpack[GroupArguments]
    ) -> Generator[Group | Pause, None, None]:
        """Like `groups`, but also yields pauses, during which the caller sleeps."""
        return whole_groups(self._catalog, GroupOptions(names, None, **options))

    @lookup
    def group_consumers(self) -> tuple[str, ...]:
        """Return the names of the consumers that share groups in this virtual host, in order."""
        return tuple(name for (name,) in self._catalog.servers.rows(NAMES, {"vhost": self._catalog.vhost}))

    @lookup
    def group_consumer_status(self, name: str) -> GroupConsumerStatus:
        """Return a group consumer's status: its groups by state, its members, and its streams with their lag.

        The call counts all groups that the consumer has found: a few million done groups take about a second.

        Args:
            name: The consumer's name.

        Raises:
            NotFound: there is no consumer of that name.
        """
        checked_name("name", name)
        consumer = by_name(self._catalog, name)
        if consumer is None:
            raise NotFound(f"there is no group consumer {name!r}: check the name; a consumer's first member creates it")
        parameters = {"consumer_id": consumer.consumer_id}
        counts = dict.fromkeys(STATES, 0)
        oldest: dict[str, datetime] = {}
        for state, count, opened_at in self._catalog.servers.rows(COUNTS, parameters):
            counts[state], oldest[state] = count, opened_at
        members = self._catalog.servers.rows(HOLDERS, parameters)
        return GroupConsumerStatus(
            name,
            None if consumer.names is None else tuple(consumer.names),
            consumer.order,
            counts,
            min((oldest[state] for state in ("ready", "claimed") if state in oldest), default=None),
            oldest.get("open"),
            tuple(GroupMemberStatus(*row) for row in members),
            tuple(_sources(self._catalog, consumer)),
        )
