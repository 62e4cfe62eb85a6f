"""Engines for PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import URL, ExceptionContext

from relatum.errors import UsedAfterClose
from relatum.processes import after_fork, leave_to_parent
from relatum.store._address import POOL, POOL_SIZE, STATEMENT, parse_database
from relatum.store._sessions import look_at_sessions
from relatum.store._translation import translated_errors
from relatum.store._waiting import ComponentEngine, TimedPool, bound_waits
from relatum.waiting import Deadline

_LIBPQ_OPTIONS: dict[str, Any] = {
    "fallback_application_name": "relatum",
    # A database in SQL_ASCII would hand out bytes otherwise, which SQLAlchemy cannot read its own catalog by.
    "client_encoding": "utf8",
    "connect_timeout": 5,
    # A half-open link is noticed in about ten seconds, whether bytes wait to be acknowledged or the line is idle.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

STATEMENT_S: Final = 30.0
"""Seconds one statement may take, by default. Those who go on by themselves repeat what did not come through."""

ONCE_STATEMENT_S: Final = 600.0
"""Seconds for a statement of what is done once, by default: it may go through much of a table."""

_POOL_S: Final = 30.0
"""Seconds to wait for a connection of a pool that opens more when all are busy."""

_POOL_BOUNDED_S: Final = 600.0
"""Seconds to wait for one of a pool that does not: work waits in turn there, and should not fail for it."""


def make_engine(
    database: str | URL,
    *,
    pool_size: int = 5,
    is_bounded: bool = True,
    connections_max: int | None = None,
    is_kept: bool = False,
    statement_s: float | None = STATEMENT_S,
) -> sa.Engine:
    """An engine for a PostgreSQL URL, through psycopg 3.

    Args:
        database: `postgresql://user:password@host:port/name`, with several hosts and any option, as libpq reads it.
        pool_size: Connections kept; as many again may be opened under load.
        is_bounded: False where more may be opened, one for each thread that asks: nobody waits for another then.
        connections_max: Connections at most; who needs one while all are busy waits for it, ten minutes if need be.
            None for twice `pool_size`, and half a minute.
        is_kept: True keeps all connections that were opened, for whoever has as much to ask soon again.
        statement_s: Seconds for one statement; None for no limit but the deadline of a call (`relatum.waiting`).

    What the URL says of `statement_timeout_s`, `pool_size` and `pool_timeout_s` comes before these.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL.
    """
    address = parse_database(database)
    limits = address.limits
    statement_s = limits.get(STATEMENT, statement_s) or None
    pool_s = limits.get(POOL, _POOL_S if connections_max is None else _POOL_BOUNDED_S)
    pool_size = int(limits.get(POOL_SIZE, pool_size)) if connections_max is None else pool_size
    overflow = pool_size if is_bounded else -1
    if connections_max is not None:
        pool_size, overflow = min(pool_size, connections_max), max(0, connections_max - pool_size)
    if is_kept:
        pool_size, overflow = pool_size + overflow, 0
    engine = sa.create_engine(
        address.shown(),
        poolclass=TimedPool,
        pool_size=pool_size,
        max_overflow=overflow,
        pool_timeout=pool_s,
        pool_use_lifo=True,
        connect_args={**_LIBPQ_OPTIONS, **address.parameters},
        hide_parameters=True,
    )
    look_at_sessions(engine, address.prepare_threshold)
    sa.event.listen(engine, "handle_error", _leave_read_only)
    after_fork(engine, _forget_connections)
    bound_waits(engine, statement_s)
    return engine


def _leave_read_only(context: ExceptionContext) -> None:
    """Give up all connections to a server that takes no writes: a new one may reach another, by name or list."""
    if isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
        context.is_disconnect = True


def component_engine(engine: sa.Engine, ending: Deadline) -> sa.Engine:
    """The same engine for one component, which lets go of the database as `ending` is brought forward.

    `engine`: Of `make_engine`. Disposing of either disposes of both.
    """
    return ComponentEngine(engine, None, ending)


def _forget_connections(engine: sa.Engine) -> None:
    leave_to_parent(engine.pool)
    engine.dispose(close=False)


def close_engine(engine: sa.Engine, refusing: str | None = None) -> None:
    """Dispose of an engine of Relatum's own whose threads may still be at work.

    What they have, or open from now on, is closed when they are done: no connection outlives its component.

    `refusing`: What `UsedAfterClose` says to who connects from now on: what was closed, and what to do. None: whoever
    still has to say something to the database may.
    """

    def refuse(*_: Any) -> None:
        raise UsedAfterClose(refusing or "")

    engine.dispose()
    pool: Any = engine.pool
    pool.dispose()  # the new one, which closes what comes back: see `TimedPool`
    if refusing is not None:
        # The pool's own, and no event: others connect by those.
        pool.connect = refuse


@contextmanager
def at_one_moment(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction whose statements all see the database as it is at the first of them; committed at the end."""
    with translated_errors(), engine.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection
