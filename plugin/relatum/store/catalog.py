"""Reads and writes key definitions and streams in the database, which all processes share.

Tables and columns are defined only in `relatum_migrations/sql`. To avoid deadlocks, transactions that change
several kinds of rows lock them in this order: placements by name, the row of `super_streams`, partitions by id.
"""

import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.common.checks import checked_name, meant
from relatum.common.limits import KEYS_MAX
from relatum.errors import (
    AccessRefused,
    CoverageConflict,
    InvalidKeyDefinition,
    KeyDefinitionConflict,
    KeyNotDefined,
    StreamNotFound,
)
from relatum.keys import KeyDefinition, as_definitions
from relatum.store.database import sql, transaction

logger = logging.getLogger("relatum.keys")

FORGOTTEN: Final = "forgotten"
"""The state of a stream that was forgotten while its rows are being deleted."""


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A row of `relatum.streams`: one generation of a stream; a stream that is declared again gets the next one.

    Messages below `first_offset` were dropped by retention; rows below `retained_from` may have been pruned.
    """

    stream_id: int
    vhost: str
    name: str
    super_stream: str | None
    generation: int
    record_time: bool
    first_offset: int | None
    broker_id: UUID | None = None
    retained_from: int | None = None


STREAM_COLUMNS: Final = ", ".join(StreamRow.__dataclass_fields__).replace(
    "first_offset", "greatest(first_offset, retained_from) AS first_offset"
)

KEYS_IN_FORCE: Final = sql("""
    SELECT key.key_id, key.name, key.sources, key.type, key.since, named.name AS names, key.masked
    FROM relatum.keys key LEFT JOIN relatum.keys named ON key.names_key_id = named.key_id
    WHERE key.removed_at IS NULL
    ORDER BY key.key_id""")
"""Selects rows for `definitions_of`. `names` may name a removed key; it then means the next key of that name."""

_ADD_KEYS: Final = sql("""
    INSERT INTO relatum.keys (name, sources, type, masked)
    VALUES (:name::text, :sources::text[], :type::text, :masked::boolean)""")

# Rows of an earlier definition do not count, so consumers must scan all groups again, also behind their positions.
_SCAN_AGAIN: Final = sql("DELETE FROM relatum.group_scans")

_OF_KEY: Final = "WHERE name = :key::text AND removed_at IS NULL"

_SET_NAMES: Final = sql(f"""
    UPDATE relatum.keys SET names_key_id = (
        SELECT named.key_id FROM relatum.keys named WHERE named.name = :names::text AND named.removed_at IS NULL)
    {_OF_KEY}""")

_MASK: Final = sql(f"UPDATE relatum.keys SET masked = :masked::boolean {_OF_KEY} RETURNING masked")

_REMOVE: Final = sql(f"UPDATE relatum.keys SET removed_at = now() {_OF_KEY} RETURNING masked")

_SECRET: Final = sql("SELECT secret FROM relatum.masking")

# Rows of forgotten generations may still exist, so a new generation follows the greatest existing one.
_ADD_STREAMS: Final = sql("""
    INSERT INTO relatum.streams (vhost, name, super_stream, generation)
    SELECT :vhost::text, new.name, new.super_stream, (
        SELECT coalesce(max(before.generation), 0) + 1 FROM relatum.streams before
        WHERE before.vhost = :vhost::text AND before.name = new.name)
    FROM unnest(:names::text[], :super_streams::text[]) AS new(name, super_stream)
    ORDER BY new.name
    ON CONFLICT (vhost, name) WHERE replaced_at IS NULL DO NOTHING""")

_SET_SUPER_STREAMS: Final = sql("""
    UPDATE relatum.streams s SET super_stream = new.super_stream
    FROM unnest(:names::text[], :super_streams::text[]) AS new(name, super_stream)
    WHERE s.vhost = :vhost::text AND s.name = new.name AND s.replaced_at IS NULL
        AND s.super_stream IS DISTINCT FROM new.super_stream AND new.super_stream IS NOT NULL""")


_STREAMS: Final = sql(f"""
    SELECT {STREAM_COLUMNS} FROM relatum.streams
    WHERE replaced_at IS NULL AND (:vhost::text IS NULL OR vhost = :vhost::text)
        AND (:names::text[] IS NULL OR name = ANY (:names::text[])
            OR :partitions::boolean AND super_stream = ANY (:names::text[]))
    ORDER BY name""")

_PRESENT: Final = sql(f"""
    SELECT {STREAM_COLUMNS} FROM relatum.streams
    WHERE stream_id = ANY (:stream_ids::integer[]) AND replaced_at IS NULL""")

_SET_RECORD_TIME: Final = sql("""
    UPDATE relatum.streams SET record_time = :on::boolean
    WHERE vhost = :vhost::text AND replaced_at IS NULL AND name = :name::text""")

_LOCK, _LOCK_KEY_SHARE = (
    sql(f"SELECT state, name FROM relatum.streams WHERE stream_id = :stream_id::integer FOR {lock}")
    for lock in ("UPDATE", "NO KEY UPDATE")
)


def definitions_of(rows: Iterable[Sequence[Any]]) -> list[KeyDefinition]:
    """Return the definitions in rows of `KEYS_IN_FORCE`."""
    return [
        KeyDefinition(name, tuple(sources), key_type, since, key_id, names=names, masked=masked)
        for key_id, name, sources, key_type, since, names, masked in rows
    ]


def key_definitions(connection: sa.Connection) -> list[KeyDefinition]:
    """Read the definitions in force, oldest first."""
    return definitions_of(connection.execute(KEYS_IN_FORCE).all())


def add_keys(engine: sa.Engine, wanted: Iterable[str | KeyDefinition]) -> list[KeyDefinition]:
    """Define keys. Recorders notice within two seconds; keys in older messages need a back-fill.

    `wanted`: Definitions, or names, each of which defines a text key from the header of that name.

    Returns:
        The stored definitions, in the order given. An equal definition in force stays. If it lacks `names` or `masked`,
        they are added, since no row depends on them.

    Raises:
        KeyDefinitionConflict: a key in force has another definition; nothing was written.
        InvalidKeyDefinition: a definition is invalid or names a key that is undefined or of another type, or there are
            too many keys; nothing was written.
    """
    definitions = as_definitions(wanted)
    missing: list[KeyDefinition] = []
    with transaction(engine) as connection:
        in_force = _in_force(connection, definitions)
        # Usually no key is new, so no lock is needed: hundreds of publishers may start at the same time.
        if not all(_is_satisfied(definition, in_force.get(definition.name)) for definition in definitions):
            # Processes that define the same key at the same time wait for each other here.
            connection.execute(sql("LOCK TABLE relatum.keys IN SHARE ROW EXCLUSIVE MODE"))
            missing = _write_keys(connection, definitions, _in_force(connection, definitions))
            in_force = _in_force(connection, definitions)
    for definition in missing:
        hint = f" ({definition.hint})" if definition.hint else ""
        logger.info("defined key %r (new): %s%s", definition.name, definition.meaning, hint)
    return [in_force[definition.name] for definition in definitions]


def backfill_command(names: Iterable[str]) -> str:
    """Return the command that back-fills keys: it records them in messages that are older than the keys."""
    return shlex.join(["relatum", "backfill", *(word for name in names for word in ("--keys", name))])


def _write_keys(
    connection: sa.Connection, definitions: Sequence[KeyDefinition], in_force: dict[str, KeyDefinition]
) -> list[KeyDefinition]:
    """Store new definitions, and missing `names` and masks of definitions in force; return the new definitions."""
    missing = [definition for definition in definitions if definition.name not in in_force]
    if len(in_force) + len(missing) > KEYS_MAX:
        raise InvalidKeyDefinition(f"at most {KEYS_MAX} keys can be in force: remove one first", key=missing[-1].name)
    _check_references(definitions, {key.name: key for key in missing} | in_force)
    changed = [key for key in definitions if not _is_satisfied(key, in_force.get(key.name))]
    rows = [
        {"name": key.name, "sources": list(key.sources), "type": str(key.type), "masked": key.masked} for key in missing
    ]
    for statement, parameters in (
        (_ADD_KEYS, rows),
        (_SET_NAMES, [{"key": key.name, "names": key.names} for key in changed if key.names]),
        (_MASK, [{"key": key.name, "masked": True} for key in changed if key.masked]),
        (_SCAN_AGAIN, [{} for key in missing if key.name == "message_group"]),
    ):
        if parameters:
            connection.execute(statement, parameters)
    return missing


def check_keys(engine: sa.Engine, wanted: Iterable[str | KeyDefinition]) -> None:
    """Raise `KeyDefinitionConflict` if one of these keys is in force with another definition."""
    definitions = as_definitions(wanted)
    with transaction(engine) as connection:
        _in_force(connection, definitions)


def _in_force(connection: sa.Connection, wanted: Iterable[KeyDefinition]) -> dict[str, KeyDefinition]:
    """Read the keys in force, by name; raise `KeyDefinitionConflict` if one of `wanted` has another definition."""
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for each in wanted:
        existing = in_force.get(each.name, each)
        names_other = None not in (each.names, existing.names) and each.names != existing.names
        if (each.sources, each.type) != (existing.sources, existing.type) or names_other:
            raise KeyDefinitionConflict(
                f"key {each.name!r} is already defined as {existing.meaning}, not as {each.meaning}: pass "
                f"{existing.code} to use it, choose another name, or remove it first (`relatum keys remove`)",
                key=each.name,
            )
    return in_force


def _is_satisfied(wanted: KeyDefinition, existing: KeyDefinition | None) -> bool:
    """Return whether a definition in force already has the `names` and the mask of the wanted definition."""
    return existing is not None and wanted.names in (None, existing.names) and wanted.masked <= existing.masked


def _check_references(wanted: Iterable[KeyDefinition], known: Mapping[str, KeyDefinition]) -> None:
    for key in wanted:
        if key.names is None:
            continue
        referenced = known.get(key.names)
        if referenced is None:
            raise InvalidKeyDefinition(
                f"key {key.name!r} names {key.names!r}, which is not a key{meant(key.names, known)}: define it first",
                key=key.name,
            )
        if (referenced.value_type, len(referenced.components)) != (key.value_type, len(key.components)):
            raise InvalidKeyDefinition(
                f"key {key.name!r} ({key.meaning}) cannot name {referenced.name!r} ({referenced.meaning}): "
                "both need the same type and the same number of components",
                key=key.name,
            )


def remove_key(engine: sa.Engine, name: str) -> None:
    """Remove a key: it is no longer recorded or looked up, and the next prune deletes its rows.

    Raises:
        KeyNotDefined: no key of that name is in force.
        KeyDefinitionConflict: the key is masked, and pages would then show its values; nothing was written.
    """
    checked_name("name", name)
    with transaction(engine) as connection:
        if _was_masked(connection.execute(_REMOVE, {"key": name}).scalar(), name):
            raise KeyDefinitionConflict(
                f"key {name!r} is masked, and removing it would show its values: if they may be shown, unmask it first "
                f"(`relatum keys mask {shlex.quote(name)} --off`)",
                key=name,
            )


def mask_key(engine: sa.Engine, name: str, *, on: bool) -> None:
    """Mask a key, so that pages show digests of its values, or unmask it. Pages follow within two seconds."""
    checked_name("name", name)
    with transaction(engine) as connection:
        _was_masked(connection.execute(_MASK, {"key": name, "masked": on}).scalar(), name)
    logger.info("key %r is %s", name, "masked" if on else "not masked any more")


def _was_masked(is_masked: bool | None, name: str) -> bool:
    """Return whether an updated key is masked; raise `KeyNotDefined` if no row was updated."""
    if is_masked is None:
        raise KeyNotDefined(f"no key {name!r} is defined", key=name)
    return is_masked


def mask_secret(connection: sa.Connection) -> bytes:
    """Read the secret for digests of masked values. Each user that may read values may read it: see ADR 0030."""
    return bytes(connection.execute(_SECRET).scalar_one())


_MAY_RECORD: Final = sql("SELECT has_table_privilege('relatum.relationships', 'INSERT'), current_user")


def check_may_record(connection: sa.Connection) -> None:
    """Check that the user may write a recorder's rows; raise `AccessRefused` if not."""
    may_record, user = connection.execute(_MAY_RECORD).one()
    if not may_record:
        raise AccessRefused(
            f"the PostgreSQL user {user!r} may not record: grant it the role relatum_recorder (GRANT relatum_recorder "
            "TO its_name), or use the URL of another user"
        )


def current_stream(connection: sa.Connection, vhost: str, name: str) -> StreamRow | None:
    """Read the stream's present generation; None if it was never recorded."""
    return next(iter(streams_named(connection, vhost, [name], partitions=False)), None)


def ensure_stream(connection: sa.Connection, vhost: str, name: str, super_stream: str | None = None) -> StreamRow:
    """Return the stream's present generation; create it if it is missing. Safe to call concurrently.

    Call this only for names that the broker has confirmed to be streams: only `forget` deletes the row.
    """
    found = ensure_streams(connection, vhost, {name: super_stream})
    if not found:
        raise CoverageConflict(f"the stream {name!r} is being forgotten; try again", stream=name)
    return found[0]


def ensure_streams(connection: sa.Connection, vhost: str, super_streams: Mapping[str, str | None]) -> list[StreamRow]:
    """Like `ensure_stream`, for many streams: names with their super streams. Forgotten streams are left out.

    All processes create rows in the order of names, so that they do not deadlock.
    """
    if not super_streams:
        return []
    names = sorted(super_streams)
    values = {"vhost": vhost, "names": names, "super_streams": [super_streams[name] for name in names]}
    found = streams_named(connection, vhost, names, partitions=False)
    if len(found) < len(names) or any(super_streams[row.name] not in (None, row.super_stream) for row in found):
        connection.execute(_ADD_STREAMS, values)
        connection.execute(_SET_SUPER_STREAMS, values)
        found = streams_named(connection, vhost, names, partitions=False)
    return found


def lock_stream(connection: sa.Connection, stream_id: int, *, key_share: bool = False) -> None:
    """Block back-fills, cuts, repairs and `forget` of this stream until the transaction ends. Live recording continues.

    `key_share`: Whether other transactions may insert rows that refer to the stream. Raises `CoverageConflict` if the
    stream was forgotten.
    """
    found = connection.execute(_LOCK_KEY_SHARE if key_share else _LOCK, {"stream_id": stream_id}).one_or_none()
    if found is None or found.state == FORGOTTEN:
        what = f"the stream {found.name!r}" if found else f"the stream with the id {stream_id}"
        raise CoverageConflict(f"{what} was forgotten; nothing was written", stream=found.name if found else "")


def streams_named(
    connection: sa.Connection, vhost: str | None, names: Sequence[str] | None, *, partitions: bool = True
) -> list[StreamRow]:
    """Read the present generations of named streams and of partitions of named super streams.

    `vhost`: None for all virtual hosts. `names`: None for all streams.
    `partitions`: If False, partitions of a named super stream are included only if they are named themselves.
    """
    parameters = {"vhost": vhost, "names": None if names is None else list(names), "partitions": partitions}
    return [StreamRow(*row) for row in connection.execute(_STREAMS, parameters)]


def present_streams(connection: sa.Connection, stream_ids: Iterable[int]) -> dict[int, StreamRow]:
    """Read streams by id, except those that were replaced or forgotten."""
    rows = connection.execute(_PRESENT, {"stream_ids": list(stream_ids)})
    return {row.stream_id: StreamRow(*row) for row in rows}


def check_recorded(connection: sa.Connection, vhost: str | None, names: Collection[str]) -> None:
    """Raise `StreamNotFound` unless each name is a recorded stream or super stream. `vhost`: None for any."""
    if not names:
        return
    known = streams_named(connection, vhost, None)
    recorded = {name for stream in known for name in (stream.name, stream.super_stream)}
    for name in names:
        if name not in recorded:
            raise StreamNotFound(
                f"no stream {name!r} is recorded{meant(name, recorded)}: if it exists, "
                f"`relatum record {shlex.quote(name)}` records it",
                stream=name,
            )


def set_record_time(engine: sa.Engine, vhost: str, name: str, *, on: bool) -> None:
    """Switch the recording of a stream's times on or off for new messages. Recorders notice within two seconds.

    `relatum.recording.set_record_time` also checks on the broker that the stream exists.

    Raises:
        StreamNotFound: no such stream is recorded.
    """
    checked_name("vhost", vhost)
    checked_name("name", name)
    with transaction(engine) as connection:
        if connection.execute(_SET_RECORD_TIME, {"vhost": vhost, "name": name, "on": on}).rowcount == 0:
            raise StreamNotFound(
                f"no stream {name!r} is recorded: `relatum record {shlex.quote(name)}` records it", stream=name
            )
