"""The five roles, and what each may do at the newest revision.

Roles belong to the whole server: another database may have made them, or this user may not make any. So each migration
to the newest revision, one that finds nothing else to do as well, makes those that lack, where it may, and grants each
that is there all that it needs. A revision that adds a table adds it here too.
"""

from typing import Final

from sqlalchemy import Connection

__all__ = ["ROLES", "grant_roles", "missing_roles"]

_RECORDED: Final = (
    "streams, recorder_members, keys, coverage, relationships, table_parts, part_streams, part_keys, time_blocks, "
    "checkpoints, receipts, skips, events, expectations, taps, brokers"
)
_READ: Final = _RECORDED.replace(" receipts,", "")
_GROUPS: Final = "group_consumers, group_scans, group_states"
_COLLECTED: Final = "collectors, collector_members, collector_sources, collected_messages"
_SUPER_STREAMS: Final = "super_streams, super_stream_partitions"
_PLACED: Final = "placements, context_moves, moved_contexts"
_CONSUMED: Final = "serial_consumers, serial_members, serial_positions, serial_holds"

_ALL: Final = "SELECT, INSERT, UPDATE, DELETE"

_FUNCTIONS: Final = (
    "make_part(), analyze_part(integer), close_part(integer), finish_part(integer), empty_part(integer), "
    "drop_part(integer)"
)

# Identity columns ask for no right on their sequences.
_GRANTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "relatum_recorder": (
        (_ALL, f"{_RECORDED}, relations, {_GROUPS}, settlements"),
        ("SELECT", f"alembic_version, {_SUPER_STREAMS}, {_CONSUMED}, publisher_sessions"),
        ("SELECT, DELETE", f"{_COLLECTED}, {_PLACED}"),
        ("UPDATE (floor)", "super_streams"),
        ("EXECUTE", _FUNCTIONS),
    ),
    "relatum_consumer": (
        (_ALL, f"{_GROUPS}, {_CONSUMED}, settlements, serial_checkpoints"),
        (
            "SELECT",
            f"alembic_version, relations, {_RECORDED}, {_COLLECTED}, {_SUPER_STREAMS}, {_PLACED}, publisher_sessions, "
            "masking",
        ),
    ),
    "relatum_reader": (
        (
            "SELECT",
            f"alembic_version, relations, {_READ}, {_GROUPS}, {_COLLECTED}, {_SUPER_STREAMS}, {_PLACED}, {_CONSUMED}, "
            "serial_checkpoints, publisher_sessions, masking",
        ),
    ),
    "relatum_collector": ((_ALL, f"{_COLLECTED}, settlements"),),
    "relatum_router": (
        (_ALL, f"{_SUPER_STREAMS}, {_PLACED}, {_CONSUMED}, settlements, serial_checkpoints, publisher_sessions"),
        ("USAGE", "placement_epochs"),
    ),
}

_KINDS: Final = {"USAGE": "SEQUENCE", "EXECUTE": "FUNCTION"}

ROLES: Final = tuple(_GRANTS)
"""Their names."""


def grant_roles(connection: Connection) -> None:
    """Make the roles that lack, where this user may, and grant each what it needs; safe to repeat.

    Locks: none on the tables' rows or their use.
    """
    for role in missing_roles(connection):
        connection.exec_driver_sql(_MADE.format(role=role))
    lacking = missing_roles(connection)
    for role, grants in _GRANTS.items():
        if role in lacking:
            continue
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA relatum TO {role}")
        for rights, names in grants:
            kind = _KINDS.get(rights, "TABLE")
            objects = ", ".join(f"relatum.{name}" for name in names.split(", "))
            connection.exec_driver_sql(f"GRANT {rights} ON {kind} {objects} TO {role}")
    # Rows are written into parts of the table, which have its rights.
    connection.exec_driver_sql("SELECT relatum.grant_part(part) FROM relatum.table_parts")


def missing_roles(connection: Connection) -> list[str]:
    """The roles that the server does not have, in the order of `ROLES`."""
    there = set(connection.exec_driver_sql("SELECT rolname FROM pg_roles").scalars())
    return [role for role in ROLES if role not in there]


# In a block of its own: one that is refused, or that another database's migration makes just then, is no error.
_MADE: Final = """
DO $$
BEGIN
  CREATE ROLE {role} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
  NULL;
END $$
"""
