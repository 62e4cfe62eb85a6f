"""Defining expectations in the database, as keys are: everybody who asks sees the same."""

from collections.abc import Iterable
from dataclasses import astuple
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.checks import checked_name, meant
from relatum.errors import InvalidInput, KeyNotDefined, NotFound
from relatum.store.catalog import key_definitions
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.tables import expectations
from relatum.store.translation import translated_errors
from relatum_consumer.expectations._expectation import Expectation

_COLUMNS: Final = ("name", "of_stream", "by_key", "follows", "within_s", "grace_s")
"""In the order of an expectation's fields."""

DEFINED: Final = sql(
    f"""
    SELECT {", ".join(_COLUMNS)}
    FROM relatum.expectations
    WHERE vhost = :vhost::text
    ORDER BY name
    """
)
"""The expectations of a virtual host, in the order of their names."""


def add_expectations(
    database: AnyDatabase, wanted: Expectation | Iterable[Expectation], *, vhost: str = "/"
) -> list[Expectation]:
    """Define expectations. Messages that lie in the streams already are looked at, too.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays open.
        wanted: One, or several. One that is defined already and says the same is kept.
        vhost: The virtual host of their streams.

    Returns:
        Them, in the order given.

    Raises:
        KeyNotDefined: no key of the name of one is in force; nothing was written.
        InvalidInput: one of that name says something else; nothing was written.
    """
    checked_name("vhost", vhost)
    given = [wanted] if isinstance(wanted, Expectation) else list(wanted)
    if not all(isinstance(each, Expectation) for each in given):
        raise InvalidInput("expectations are given as `Expectation`s")
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        names = {key.name for key in key_definitions(connection)}
        for each in given:
            if each.by not in names:
                raise KeyNotDefined(f"no key {each.by!r} is defined{meant(each.by, names)}", key=each.by)
            row = dict(zip(_COLUMNS, astuple(each), strict=True)) | {"vhost": vhost}
            connection.execute(insert(expectations).values(**row).on_conflict_do_nothing())
        stored = {each.name: each for each in _stored(connection, vhost)}
        for each in given:
            if stored[each.name] != each:
                raise InvalidInput(
                    f"expectation {each.name!r} is defined already: {stored[each.name].meaning}. Use another name, or "
                    "remove it first (`relatum expect remove`)"
                )
    return given


def defined_expectations(database: AnyDatabase, *, vhost: str = "/") -> list[Expectation]:
    """The expectations of a virtual host, in the order of their names.

    Args:
        database: As for `add_expectations`.
        vhost: As for `add_expectations`.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return _stored(connection, vhost)


def remove_expectation(database: AnyDatabase, name: str, *, vhost: str = "/") -> None:
    """Take an expectation back; the messages and their rows stay as they are.

    Args:
        database: As for `add_expectations`.
        name: Its name.
        vhost: As for `add_expectations`.

    Raises:
        NotFound: none of that name is defined.
    """
    checked_name("name", name)
    checked_name("vhost", vhost)
    is_it = (expectations.c.vhost == vhost) & (expectations.c.name == name)
    with as_engine(database) as engine, translated_errors(), engine.begin() as connection:
        if connection.execute(sa.delete(expectations).where(is_it)).rowcount == 0:
            raise not_defined(name, vhost)


def not_defined(name: str, vhost: str, hint: str = "") -> NotFound:
    """The error for a name that no expectation has; `hint`: what may be meant."""
    return NotFound(
        f"no expectation {name!r} is defined for the virtual host {vhost!r}{hint}; see `relatum expect list`"
    )


def _stored(connection: sa.Connection, vhost: str) -> list[Expectation]:
    return [Expectation(*row) for row in connection.execute(DEFINED, {"vhost": vhost})]
