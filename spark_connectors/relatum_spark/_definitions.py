"""The definitions of keys, by their names."""

from collections.abc import Collection

import sqlalchemy as sa

from relatum.errors import KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.store import as_engine, key_definitions, translated_errors


def definitions_of(database: str, names: Collection[str]) -> list[KeyDefinition]:
    """The definitions of keys, in the order of the names; the database is only asked where there are any.

    Raises:
        KeyNotDefined: no key of that name is in force.
    """
    if not names:
        return []
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return definitions_in(connection, names)


def definitions_in(connection: sa.Connection, names: Collection[str] | None) -> list[KeyDefinition]:
    """The definitions of keys, in the order of the names; None for all in force, oldest first.

    Raises:
        KeyNotDefined: no key of that name is in force.
    """
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for name in names or ():
        if name not in in_force:
            raise KeyNotDefined(f"no key {name!r} is defined; see `relatum keys list`", key=name)
    return list(in_force.values()) if names is None else [in_force[name] for name in names]
