"""Finding a consumer by its name, or making it: every member must want the same of it."""

from datetime import datetime
from typing import Any

from relatum.errors import ConfigurationError
from relatum_consumer._catalog import Catalog
from relatum_consumer._lookups import time_us_of
from relatum_consumer._requests import Select
from relatum_consumer.grouping import _durable_statements as statements
from relatum_consumer.grouping._durable_options import SharedOptions
from relatum_consumer.grouping._durable_scan import SharedConsumer
from relatum_consumer.grouping._reading import Beginning
from relatum_consumer.grouping._requests import GroupSteps


def find_consumer(catalog: Catalog, options: SharedOptions) -> GroupSteps[SharedConsumer]:
    """The consumer that is asked for, as the first member made it.

    Raises:
        ConfigurationError: it reads other streams, or in another order.
    """
    by_name = {"vhost": catalog.vhost, "name": options.consumer.name}
    rows = yield Select(statements.consumer(), by_name)
    if not rows:
        yield Select(statements.add_consumer(), by_name | (yield from _wanted(catalog, options)))
        rows = yield Select(statements.consumer(), by_name)
    consumer_id, names, order, start_offset, start_us, start_stream_id = rows[0]
    names = None if names is None else tuple(names)
    if names != _sorted(options.names) or order != options.order:
        raise ConfigurationError(
            f"the consumer {options.consumer.name!r} reads {'all streams' if names is None else ', '.join(names)} "
            f"in {order} order: its members ask for the same; another name begins anew"
        )
    return SharedConsumer(consumer_id, names, order, Beginning(start_offset or 0, start_us), start_stream_id)


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
