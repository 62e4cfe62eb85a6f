"""Making the table equal to the streams again where `verify` found a difference."""

from collections.abc import Iterable

import sqlalchemy as sa

from relatum.errors import Conflict
from relatum.recording._compare import Difference, StreamVerified
from relatum.recording._verify import VerifyReport
from relatum.store import (
    as_engine,
    current_stream,
    key_definitions,
    lock_stream,
    relationships,
    time_blocks,
    translated_errors,
)


def repair(report: VerifyReport, database: str | sa.Engine, *, vhost: str = "/", dry_run: bool = True) -> list[str]:
    """Write the missing rows and delete the wrong ones that a report lists.

    Args:
        report: What `verify` found. Differences beyond those it lists need another verify and repair.
        database: PostgreSQL's URL, or an engine.
        vhost: The streams' virtual host.
        dry_run: Only say what would be done. The default: look first.

    Returns:
        What was done, or would be: a line for each difference.

    Raises:
        Conflict: a stream has a new generation since; verify again.
    """
    done: list[str] = []
    with as_engine(database) as engine, translated_errors():
        for stream in report.streams:
            if stream.differences:
                done += _repair_stream(engine, vhost, stream, dry_run=dry_run)
    return done


def _repair_stream(engine: sa.Engine, vhost: str, found: StreamVerified, *, dry_run: bool) -> list[str]:
    with engine.begin() as connection:
        row = current_stream(connection, vhost, found.stream)
        if row is None:
            raise Conflict(f"stream {found.stream!r} is not known any more: verify again")
        lock_stream(connection, row.stream_id)
        ids = {definition.name: definition.key_id for definition in key_definitions(connection)}
        done = [_describe(found.stream, difference) for difference in found.differences]
        if not dry_run:
            for difference in found.differences:
                for statement in _statements(row.stream_id, ids, difference):
                    connection.execute(statement)
    return done


def _describe(stream: str, difference: Difference) -> str:
    what = {
        "missing": "insert the row",
        "unsound": "delete the row",
        "duplicate": "delete all but one of the rows",
        "time_missing": "insert into the time index",
        "replaced": "nothing: run `relatum record`, which notices it and begins anew",
    }[difference.kind]
    shown = f" {difference.key}={difference.value!r}" if difference.value else ""
    return f"{stream}@{difference.offset}{shown}: {what}"


def _statements(stream_id: int, ids: dict[str, int], difference: Difference) -> Iterable[sa.Executable]:
    if difference.kind == "replaced":
        return []
    if difference.kind == "time_missing":
        moment, offset = difference.time_us, difference.offset
        block = {"min_us": moment, "max_us": moment, "first_offset": offset, "last_offset": offset}
        return [sa.insert(time_blocks).values(stream_id=stream_id, width_class=0, **block)]
    row = {
        "stream_offset": difference.offset,
        "time_us": difference.time_us,
        "stream_id": stream_id,
        "key_id": ids[difference.key],
        "value": difference.value,
    }
    same = [
        relationships.c.stream_id == stream_id,
        relationships.c.stream_offset == difference.offset,
        relationships.c.key_id == ids[difference.key],
        relationships.c.value == difference.value,
        relationships.c.time_us.is_not_distinct_from(difference.time_us),
    ]
    delete: sa.Executable = sa.delete(relationships).where(*same)
    insert: sa.Executable = sa.insert(relationships).values(row)
    return {"missing": [insert], "unsound": [delete], "duplicate": [delete, insert]}[difference.kind]
