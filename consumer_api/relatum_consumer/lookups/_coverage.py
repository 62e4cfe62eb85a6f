"""What is recorded of streams, and of which streams something is recorded now."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from relatum.store.coverage import CoverageRow
from relatum.store.database import sql
from relatum_consumer.lookups._catalog import Catalog, PresentStream
from relatum_consumer.lookups._requests import Select, Steps

COVERAGE: Final = sql(
    f"""
    SELECT {", ".join(CoverageRow.__dataclass_fields__)}
    FROM relatum.coverage
    WHERE stream_id = ANY (:stream_ids::int[])
    ORDER BY stream_id, from_offset
    """
)


def coverage_by_stream(recorded: Sequence[PresentStream]) -> Steps[dict[int, list[CoverageRow]]]:
    """What is recorded of streams, by their numbers, in the order of offsets."""
    rows = yield from Select(COVERAGE, {"stream_ids": [stream.stream_id for stream in recorded]})
    ranges: dict[int, list[CoverageRow]] = defaultdict(list)
    for values in rows:
        row = CoverageRow(*values)
        ranges[row.stream_id].append(row)
    return ranges


ATTENDED: Final = sql(
    """
    SELECT s.name
    FROM relatum.streams s
    WHERE s.vhost = :vhost::text AND s.name = ANY (:streams::text[]) AND s.replaced_at IS NULL
      AND EXISTS (
        SELECT * FROM relatum.recorder_members m
        WHERE m.holder = s.lease_holder AND m.lease_expires_at >= clock_timestamp()
      )
    """
)


def attended(catalog: Catalog, streams: Sequence[str]) -> Steps[set[str]]:
    """Those of the streams that some process records now."""
    if not streams:
        return set()
    rows = yield from Select(ATTENDED, {"vhost": catalog.vhost, "streams": list(streams)})
    return {name for (name,) in rows}
