"""Finding a consumer by its name, or making it: every member must want the same of it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from relatum.errors import AccessRefused, ConfigurationError, NotAStream, StreamNotFound
from relatum.store.database import sql
from relatum_consumer.groups.reading._assembly import GroupOrder, Member
from relatum_consumer.groups.reading._whole_groups import Beginning
from relatum_consumer.groups.sharing._sharing_options import SharedOptions
from relatum_consumer.lookups import Catalog, Servers, time_us_of


@dataclass(frozen=True, slots=True)
class SharedConsumer:
    """A consumer name as the database has it: what all its members go by."""

    consumer_id: int
    names: tuple[str, ...] | None
    order: GroupOrder
    start: Beginning
    start_stream_id: int | None

    def low(self, stream_id: int) -> int:
        """The first offset of a stream that counts."""
        return self.start.offset if self.start_stream_id in (None, stream_id) else 0

    def admits(self, head: Member, stream_id: int) -> bool:
        """Whether a group is one of this consumer's, which depends on where it stands."""
        return Beginning(self.low(stream_id), self.start.since_us).admits(head)


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
"""Makes a consumer, unless there is one of that name."""

BY_NAME: Final = sql(
    """
    SELECT consumer_id, streams, ordering, start_offset, start_us, start_stream_id
    FROM relatum.group_consumers
    WHERE vhost = :vhost::text AND name = :name::text
    """
)


def find_consumer(catalog: Catalog, options: SharedOptions) -> SharedConsumer:
    """The consumer that is asked for, as the first member made it."""
    consumer = by_name(catalog, options.consumer.name)
    if consumer is None:
        values = {"vhost": catalog.vhost, "name": options.consumer.name}
        catalog.servers.rows(ADD, values | _wanted(catalog, options))
        consumer = by_name(catalog, options.consumer.name)
    assert consumer is not None, "it was made, here or by another member"
    if consumer.names != _sorted(options.names) or consumer.order != options.order:
        streams = "all streams" if consumer.names is None else ", ".join(consumer.names)
        raise ConfigurationError(
            f"the consumer {options.consumer.name!r} reads {streams} in {consumer.order} order: its members ask for "
            f"the same; another name begins anew"
        )
    return consumer


def check_dead_letters(servers: Servers, name: str | None) -> None:
    """See that there is a stream, or a queue, for dead letters: at the start, not when there is the first."""
    if name is None:
        return
    try:
        servers.bounds(name)
    except StreamNotFound as error:
        raise StreamNotFound(
            f"dead_letter_stream={name!r}: there is no such stream; declare it", stream=name
        ) from error
    except (NotAStream, AccessRefused):
        pass  # A queue will do; and who may publish need not be allowed to read.


def by_name(catalog: Catalog, name: str) -> SharedConsumer | None:
    """A consumer as the database has it; None where there is none of that name."""
    rows = catalog.servers.rows(BY_NAME, {"vhost": catalog.vhost, "name": name})
    if not rows:
        return None
    consumer_id, names, order, start_offset, start_us, start_stream_id = rows[0]
    start = Beginning(start_offset or 0, start_us)
    return SharedConsumer(consumer_id, None if names is None else tuple(names), order, start, start_stream_id)


def _wanted(catalog: Catalog, options: SharedOptions) -> dict[str, Any]:
    """What a new consumer is to be."""
    start = options.start
    present = catalog.streams(options.names)
    offset = None if isinstance(start, datetime) else start
    return {
        "streams": None if options.names is None else list(_sorted(options.names) or ()),
        "ordering": options.order,
        "start_offset": offset,
        "start_us": time_us_of(start) if isinstance(start, datetime) else None,
        "start_stream_id": present[0].stream_id if offset is not None and len(present) == 1 else None,
    }


def _sorted(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(sorted(set(names)))
