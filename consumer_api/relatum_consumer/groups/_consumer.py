"""Consumers that share groups: finding one by name, making it, and its status."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from relatum.checks import checked_name
from relatum.errors import AccessRefused, ConfigurationError, NotAStream, NotFound, StreamNotFound
from relatum.metrics import Counter, Gauge, reported
from relatum.reading import StreamBounds
from relatum.store.coverage import Range, merged, missing
from relatum.store.database import sql
from relatum_consumer.groups._assembly import GroupOrder, Member
from relatum_consumer.groups._options import Beginning, GroupOptions
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import all_ends
from relatum_consumer.lookups.servers import Servers


@dataclass(frozen=True, slots=True)
class SharedConsumer:
    """A consumer, as stored in the database for all its members: the columns of `BY_NAME`."""

    consumer_id: int
    names: list[str] | None
    order: GroupOrder
    start_offset: int | None
    start_us: int | None
    start_stream_id: int | None

    def low(self, stream_id: int) -> int:
        """Return the first offset of a stream that belongs to the consumer."""
        return (self.start_offset or 0) if self.start_stream_id in (None, stream_id) else 0

    def admits(self, head: Member, stream_id: int) -> bool:
        """Return whether a group belongs to this consumer, by the group's place."""
        return Beginning(self.low(stream_id), self.start_us).admits(head)


ADD: Final = sql(
    """
    INSERT INTO relatum.group_consumers (vhost, name, streams, ordering, start_offset, start_us, start_stream_id)
    VALUES (
      :vhost::text, :name::text, :streams::text[], :ordering::text, :start_offset::bigint, :start_us::bigint,
      :start_stream_id::int
    )
    ON CONFLICT DO NOTHING
    RETURNING consumer_id
    """
)
"""Adds a consumer, unless there is one of that name."""

BY_NAME: Final = sql(
    """
    SELECT consumer_id, streams, ordering, start_offset, start_us, start_stream_id
    FROM relatum.group_consumers
    WHERE vhost = :vhost::text AND name = :name::text
    """
)


def find_consumer(catalog: Catalog, name: str, options: GroupOptions) -> SharedConsumer:
    """Return the consumer of a name. The first member makes it."""
    names = None if options.names is None else sorted(set(options.names))
    consumer = by_name(catalog, name)
    if consumer is None:
        start, present = Beginning.of(options.start), catalog.streams(options.names)
        wanted = {
            "vhost": catalog.vhost,
            "name": name,
            "streams": names,
            "ordering": options.order,
            "start_offset": start.offset or None,
            "start_us": start.since_us,
            "start_stream_id": present[0].stream_id if start.offset and len(present) == 1 else None,
        }
        catalog.servers.rows(ADD, wanted)
        consumer = by_name(catalog, name)
    assert consumer is not None, "it was made, here or by another member"
    if consumer.names != names or consumer.order != options.order:
        streams = "all streams" if consumer.names is None else ", ".join(consumer.names)
        raise ConfigurationError(
            f"the consumer {name!r} reads {streams} in {consumer.order} order: use the same streams= and order=, "
            "or another consumer name"
        )
    return consumer


def check_dead_letters(servers: Servers, name: str | None) -> None:
    """Check at the start, not at the first dead letter, that their stream or queue exists."""
    if name is None:
        return
    try:
        servers.bounds(name)
    except StreamNotFound as error:
        raise StreamNotFound(
            f"dead_letter_stream={name!r}: there is no such stream; declare it", stream=name
        ) from error
    except (NotAStream, AccessRefused):
        pass  # A queue will do, and a user allowed to publish need not be allowed to read.


def by_name(catalog: Catalog, name: str) -> SharedConsumer | None:
    """Return a consumer from the database; None if there is none of that name."""
    rows = catalog.servers.rows(BY_NAME, {"vhost": catalog.vhost, "name": name})
    return SharedConsumer(*rows[0]) if rows else None


SCANS: Final = sql(
    """
    SELECT stream_id, from_offset, to_offset
    FROM relatum.group_scans
    WHERE consumer_id = :consumer_id::int AND stream_id = ANY (:stream_ids::int[])
    ORDER BY stream_id, from_offset
    """
)


def scanned_of(servers: Servers, consumer: SharedConsumer, stream_ids: Iterable[int]) -> dict[int, list[Range]]:
    """Return the ranges a consumer has scanned, by stream id."""
    parameters = {"consumer_id": consumer.consumer_id, "stream_ids": list(stream_ids)}
    found: dict[int, list[Range]] = defaultdict(list)
    for stream_id, start, stop in servers.rows(SCANS, parameters):
        found[stream_id].append((start, stop))
    return found


@reported("consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroupsStatistics:
    """The counters of one member.

    Attributes:
        given: Groups delivered to the application.
        redelivered: Delivered groups that had been delivered before, to this or another member.
        acknowledged: Groups acknowledged.
        given_up: Groups given up: published as dead letters, or delivered too often.
        held: Groups claimed and neither acknowledged nor released.
    """

    given: Annotated[int, Counter("relatum_group_consumer_given_total", "Groups delivered to the application")]
    redelivered: Annotated[int, Counter("relatum_group_consumer_redelivered_total", "Groups delivered again")]
    acknowledged: Annotated[int, Counter("relatum_group_consumer_acknowledged_total", "Groups acknowledged")]
    given_up: Annotated[int, Counter("relatum_group_consumer_given_up_total", "Groups given up")]
    held: Annotated[int, Gauge("relatum_group_consumer_held_groups", "Groups claimed and not acknowledged")]


STATES: Final = ("open", "ready", "claimed", "done", "dead")


@dataclass(frozen=True, slots=True)
class GroupMemberStatus:
    """A member that has claimed groups.

    Attributes:
        holder: The member's name, given or generated.
        claimed: How many groups it has claimed.
        lease_expires_at: When the first of its leases expires, unless it is renewed.
        is_alive: Whether that is in the future.
    """

    holder: str
    claimed: int
    lease_expires_at: datetime
    is_alive: bool


@dataclass(frozen=True, slots=True)
class GroupSourceStatus:
    """A stream of a consumer.

    Attributes:
        stream: The stream's name.
        scanned_to: The offset up to which members have scanned the stream for groups; None if no scan has begun.
        lag_offsets: How many retained offsets are not scanned: not recorded yet, or recorded since the last scan.
            None if the broker does not know the stream.
    """

    stream: str
    scanned_to: int | None
    lag_offsets: int | None


@dataclass(frozen=True, slots=True)
class GroupConsumerStatus:
    """A consumer that shares groups.

    Attributes:
        consumer: The consumer's name.
        streams: The streams and super streams it reads; None for all recorded ones.
        order: The order of its groups.
        counts: How many groups are open (not complete), ready, claimed, done and dead.
        oldest_waiting_at: When the oldest ready or claimed group was found; None if there is none.
        oldest_open_at: When the oldest open group was found; None if there is none.
        members: The members that have claimed groups, ordered by name.
        sources: The recorded streams it reads, ordered by name.
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


COUNTS: Final = sql(
    """
    SELECT state, count(*), min(opened_at)
    FROM relatum.group_states
    WHERE consumer_id = :consumer_id::int
    GROUP BY state
    """
)
"""The number of groups in each state, and when the oldest was found."""

# The condition on `state` must be literally that of the index `group_states_next`, or the index cannot be used.
HOLDERS: Final = sql(
    """
    SELECT holder, count(*), min(lease_expires_at), min(lease_expires_at) >= clock_timestamp()
    FROM relatum.group_states
    WHERE consumer_id = :consumer_id::int AND state IN ('ready', 'claimed') AND holder IS NOT NULL
    GROUP BY holder
    ORDER BY holder
    """
)
"""The members with claims: holder, number of claims, the first lease's expiry, whether that is in the future."""


def consumer_status(catalog: Catalog, name: str) -> GroupConsumerStatus:
    """Return the status of a consumer."""
    checked_name("name", name)
    consumer = by_name(catalog, name)
    if consumer is None:
        raise NotFound(f"there is no group consumer {name!r}: its first member creates it")
    mine = {"consumer_id": consumer.consumer_id}
    counts = dict.fromkeys(STATES, 0)
    oldest: dict[str, datetime] = {}
    for state, count, opened_at in catalog.servers.rows(COUNTS, mine):
        counts[state], oldest[state] = count, opened_at
    members = catalog.servers.rows(HOLDERS, mine)
    return GroupConsumerStatus(
        name,
        None if consumer.names is None else tuple(consumer.names),
        consumer.order,
        counts,
        min((oldest[state] for state in ("ready", "claimed") if state in oldest), default=None),
        oldest.get("open"),
        tuple(GroupMemberStatus(*row) for row in members),
        tuple(_sources(catalog, consumer)),
    )


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
