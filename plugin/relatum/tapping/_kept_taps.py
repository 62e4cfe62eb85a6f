"""What is tapped, as the database holds it: no broker tells an ordinary user which bindings there are."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.checks import checked_name
from relatum.store import AnyDatabase, as_engine, taps, translated_errors


@dataclass(frozen=True, slots=True)
class Tap:
    """One binding of a stream to an exchange.

    Attributes:
        exchange: The exchange's name.
        kind: Its type ("topic", …); None where this user may not know it.
        stream: Where the copies lie.
        binding_key: What is copied, by the rules of the exchange's type.
        arguments: Those of the binding that were asked for.
        made_stream: Whether the stream was declared for a tap.
        created_at: Since when; None where it is not written down yet.
    """

    exchange: str
    kind: str | None
    stream: str
    binding_key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    made_stream: bool = False
    created_at: datetime | None = field(default=None, compare=False)


_COLUMNS: Final = [
    taps.c[name]
    for name in ("exchange", "kind", "stream", "binding_key", "arguments", "made_stream", "created_at", "tap_id")
]


def defined_taps(database: AnyDatabase, *, vhost: str = "/") -> list[Tap]:
    """What is tapped in a virtual host, by exchange and stream.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays open.
        vhost: The virtual host.

    Raises:
        SchemaMissing, DatabaseUnavailable: it could not be asked.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine:
        return list(stored(engine, vhost).values())


def stored(engine: sa.Engine, vhost: str) -> dict[int, Tap]:
    """The same, by their numbers."""
    query = sa.select(*_COLUMNS).where(taps.c.vhost == vhost).order_by(taps.c.exchange, taps.c.stream, taps.c.tap_id)
    with translated_errors(), engine.connect() as connection:
        rows = connection.execute(query).all()
    return {
        number: Tap(exchange, kind, stream, key, json.loads(arguments), made_stream, created_at)
        for exchange, kind, stream, key, arguments, made_stream, created_at, number in rows
    }


def write_down(engine: sa.Engine, vhost: str, wanted: Iterable[Tap]) -> dict[int, Tap]:
    """Write taps down; those that are there stay.

    Returns:
        The new ones, by their numbers.
    """
    new = {}
    with translated_errors(), engine.begin() as connection:
        for each in wanted:
            row = {
                "vhost": vhost,
                "exchange": each.exchange,
                "kind": each.kind,
                "stream": each.stream,
                "binding_key": each.binding_key,
                "arguments": as_json(each.arguments),
                "made_stream": each.made_stream,
            }
            made = insert(taps).values(**row).on_conflict_do_nothing().returning(taps.c.tap_id)
            number = connection.execute(made).scalar()
            if number is not None:
                new[number] = each
    return new


def strike_out(engine: sa.Engine, numbers: Collection[int]) -> None:
    """Take taps out."""
    with translated_errors(), engine.begin() as connection:
        connection.execute(sa.delete(taps).where(taps.c.tap_id.in_(list(numbers))))


def as_json(arguments: Mapping[str, Any]) -> str:
    """A binding's arguments as they are written down."""
    return json.dumps(dict(arguments), sort_keys=True, ensure_ascii=False)
