"""Finding a consumer by its name, or making it: every member must want the same of it."""

from datetime import datetime
from typing import Any, Final

from relatum.errors import AccessRefused, ConfigurationError, NotAStream, StreamNotFound
from relatum.store.database import sql
from relatum_consumer.groups.reading._group_requests import GroupSteps
from relatum_consumer.groups.reading._whole_groups import Beginning
from relatum_consumer.groups.sharing._sharing_options import SharedOptions
from relatum_consumer.groups.sharing._sharing_scan import SharedConsumer
from relatum_consumer.lookups import Bounds, Catalog, Select, time_us_of

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


def find_consumer(catalog: Catalog, options: SharedOptions) -> GroupSteps[SharedConsumer]:
    """The consumer that is asked for, as the first member made it."""
    consumer = yield from by_name(catalog, options.consumer.name)
    if consumer is None:
        values = {"vhost": catalog.vhost, "name": options.consumer.name}
        yield from Select(ADD, values | (yield from _wanted(catalog, options)))
        consumer = yield from by_name(catalog, options.consumer.name)
    assert consumer is not None, "it was made, here or by another member"
    if consumer.names != _sorted(options.names) or consumer.order != options.order:
        streams = "all streams" if consumer.names is None else ", ".join(consumer.names)
        raise ConfigurationError(
            f"the consumer {options.consumer.name!r} reads {streams} in {consumer.order} order: its members ask for "
            f"the same; another name begins anew"
        )
    return consumer


def check_dead_letters(name: str | None) -> GroupSteps[None]:
    """See that there is a stream, or a queue, for dead letters: at the start, not when there is the first."""
    if name is None:
        return
    try:
        yield from Bounds(name)
    except StreamNotFound as error:
        raise StreamNotFound(
            f"dead_letter_stream={name!r}: there is no such stream; declare it", stream=name
        ) from error
    except (NotAStream, AccessRefused):
        pass  # A queue will do; and who may publish need not be allowed to read.


def by_name(catalog: Catalog, name: str) -> GroupSteps[SharedConsumer | None]:
    """A consumer as the database has it; None where there is none of that name."""
    rows = yield from Select(BY_NAME, {"vhost": catalog.vhost, "name": name})
    if not rows:
        return None
    consumer_id, names, order, start_offset, start_us, start_stream_id = rows[0]
    start = Beginning(start_offset or 0, start_us)
    return SharedConsumer(consumer_id, None if names is None else tuple(names), order, start, start_stream_id)


def _wanted(catalog: Catalog, options: SharedOptions) -> GroupSteps[dict[str, Any]]:
    """What a new consumer is to be."""
    start = options.start
    present = yield from catalog.streams(options.names)
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
