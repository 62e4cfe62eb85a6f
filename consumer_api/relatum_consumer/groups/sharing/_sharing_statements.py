"""The statements of consumers that share groups. Each is one round trip and commits by itself.

What must happen together is one statement: a window of a stream counts as scanned in the statement that writes down
the groups it touched, and only if nobody else scanned it first. So a member that dies between two statements leaves
nothing half done.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert

from relatum.store import (
    NOW,
    arrays,
    compiled,
    coverage,
    group_consumers,
    group_scans,
    group_states,
    holds,
    lapsed,
    leased,
    unleased,
)

_CONSUMER: Final = sa.bindparam("consumer_id", type_=sa.Integer)
_HOLDER: Final = sa.bindparam("holder", type_=sa.Text)
_FOR: Final = sa.bindparam("lease_s", type_=sa.Double)
_LEASED: Final = leased(_FOR, _HOLDER)
_LIMIT: Final = sa.bindparam("limit", type_=sa.BigInteger)

_CLAIMABLE: Final[Any] = sa.text("relatum.group_states.state IN ('ready', 'claimed')")
"""As the index `group_states_next` says it, letter by letter: else the planner cannot know that it may be used."""

_NULL: Final = sa.null()

_STATES: Final = group_states.c
_MINE: Final = (_STATES.consumer_id == _CONSUMER, _STATES.holder == _HOLDER)


def _word(state: str) -> Any:
    return sa.literal_column(f"'{state}'")


def _named(ids: str) -> Any:
    return _STATES.group_id == sa.any_(sa.bindparam(ids, type_=postgresql.ARRAY(sa.Text)))


# --- the consumer -----------------------------------------------------------------------------------------

_CONSUMER_COLUMNS: Final = ("consumer_id", "streams", "ordering", "start_offset", "start_us", "start_stream_id")
_BY_NAME: Final = (
    group_consumers.c.vhost == sa.bindparam("vhost", type_=sa.Text),
    group_consumers.c.name == sa.bindparam("name", type_=sa.Text),
)


@lru_cache
def consumer() -> str:
    """A consumer by its name: id, names of streams, order, start as offset, as time, and of which stream."""
    return compiled(sa.select(*(group_consumers.c[name] for name in _CONSUMER_COLUMNS)).where(*_BY_NAME))


@lru_cache
def consumer_names() -> str:
    """The names of a virtual host's consumers, in order."""
    named = sa.select(group_consumers.c.name).where(group_consumers.c.vhost == sa.bindparam("vhost", type_=sa.Text))
    return compiled(named.order_by(group_consumers.c.name))


@lru_cache
def add_consumer() -> str:
    """Make a consumer, unless there is one of that name."""
    statement = insert(group_consumers).values(
        vhost=sa.bindparam("vhost", type_=sa.Text),
        name=sa.bindparam("name", type_=sa.Text),
        streams=sa.bindparam("streams", type_=postgresql.ARRAY(sa.Text)),
        ordering=sa.bindparam("ordering", type_=sa.Text),
        start_offset=sa.bindparam("start_offset", type_=sa.BigInteger),
        start_us=sa.bindparam("start_us", type_=sa.BigInteger),
        start_stream_id=sa.bindparam("start_stream_id", type_=sa.Integer),
    )
    return compiled(statement.on_conflict_do_nothing().returning(group_consumers.c.consumer_id))


# --- finding groups ---------------------------------------------------------------------------------------


@lru_cache
def scans() -> str:
    """What a consumer has scanned of the streams `stream_ids`: stream, from, to; by stream and offset."""
    scanned = group_scans.c
    ids = sa.bindparam("stream_ids", type_=postgresql.ARRAY(sa.Integer))
    statement = sa.select(scanned.stream_id, scanned.from_offset, scanned.to_offset).where(
        scanned.consumer_id == _CONSUMER, scanned.stream_id == sa.any_(ids)
    )
    return compiled(statement.order_by(scanned.stream_id, scanned.from_offset))


@lru_cache
def write_down() -> str:
    """Count a window as scanned and write down its groups: one row, the number of windows counted, 1 or 0.

    Nothing is written where another member has scanned from `expected` on, or where the range of the coverage
    `coverage_id` that the window was read from is not there any more, as after a stream has lost its tail.
    """
    moved = _moved()
    wanted = _wanted()
    is_moved = sa.exists(sa.select(moved.c.to_offset))
    noted = _upsert(sa.select(*wanted.c, _CONSUMER).where(is_moved).order_by(wanted.c.group_id)).cte("noted")
    gone = (
        sa.delete(group_states)
        .where(_STATES.consumer_id == _CONSUMER, _named("outside"), _STATES.state == _word("open"), is_moved)
        .returning(_STATES.group_id)
        .cte("gone")
    )
    return compiled(sa.select(sa.func.count()).select_from(moved).add_cte(noted, gone))


@lru_cache
def write_down_again() -> str:
    """Write down groups outside any window; their ids."""
    wanted = _wanted()
    return compiled(_upsert(sa.select(*wanted.c, _CONSUMER).order_by(wanted.c.group_id)))


def _moved() -> Any:
    """The scanned range that grew: a new one, or the one that ended where the window begins."""
    to_offset = sa.bindparam("to_offset", type_=sa.BigInteger)
    window = sa.select(
        sa.bindparam("from_offset", type_=sa.BigInteger),
        to_offset,
        _CONSUMER,
        sa.bindparam("stream_id", type_=sa.Integer),
    ).where(
        sa.exists().where(
            coverage.c.coverage_id == sa.bindparam("coverage_id", type_=sa.BigInteger),
            coverage.c.to_offset >= to_offset,
        ),
        sa.exists().where(group_consumers.c.consumer_id == _CONSUMER),
    )
    statement = insert(group_scans).from_select(["from_offset", "to_offset", "consumer_id", "stream_id"], window)
    return (
        statement.on_conflict_do_update(
            index_elements=["consumer_id", "stream_id", "from_offset"],
            set_={"to_offset": statement.excluded.to_offset},
            where=group_scans.c.to_offset == sa.bindparam("expected", type_=sa.BigInteger),
        )
        .returning(group_scans.c.to_offset)
        .cte("moved")
    )


WRITTEN_DOWN: Final[tuple[tuple[str, Any], ...]] = (
    ("rank", sa.BigInteger),
    ("first_offset", sa.BigInteger),
    ("stream_id", sa.Integer),
    ("state", sa.Text),
    ("group_id", sa.Text),
)


def written_down(rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """The parameters for groups that are written down, each a row of `WRITTEN_DOWN`."""
    return {f"{name}s": [row[at] for row in rows] for at, (name, _) in enumerate(WRITTEN_DOWN)}


def _wanted() -> Any:
    return arrays("wanted", **dict(WRITTEN_DOWN))


def _upsert(rows: Any) -> Any:
    """Groups only ever go forward: who read before another cannot take back what that one found.

    What became of a group whose first message lay in a stream that was declared again, and so is none of `present`,
    says nothing of a group in the new one.
    """
    statement = insert(group_states).from_select([*(name for name, _ in WRITTEN_DOWN), "consumer_id"], rows)
    new = statement.excluded
    present = sa.bindparam("present", type_=postgresql.ARRAY(sa.Integer))
    return statement.on_conflict_do_update(
        index_elements=["consumer_id", "group_id"],
        set_={name: new[name] for name, _ in WRITTEN_DOWN if name != "group_id"}
        | {"touched_at": NOW, "done_at": _NULL}
        | unleased()
        | {"given": sa.literal_column("0")},
        where=(_STATES.state == _word("open")) | ~(_STATES.stream_id == sa.any_(present)),
    ).returning(_STATES.group_id)


# --- claims -----------------------------------------------------------------------------------------------


@lru_cache
def claim() -> str:
    """Claim the first `limit` groups that are ready.

    Its rows, in no order: group, claim's number, how often it was given, rank, stream id, first offset.

    Ready is also a group whose holder did not renew its lease; and, of the holder's own, what it does not know of
    (`held` are those it does): claimed by a process of that name before, or by a statement whose answer was lost.
    """
    unknown = (_STATES.holder == _HOLDER) & ~_named("held")
    free = (_STATES.state == _word("ready")) | lapsed(_STATES.lease_expires_at) | unknown
    chosen = (
        sa.select(_STATES.group_id)
        .where(_STATES.consumer_id == _CONSUMER, _CLAIMABLE, free)
        .order_by(_STATES.rank, _STATES.stream_id, _STATES.first_offset)
        .limit(_LIMIT)
        .with_for_update(skip_locked=True)
        .cte("chosen")
    )
    return compiled(_take(chosen, state=_word("claimed")))


_CLAIM_COLUMNS: Final = ("group_id", "deliveries", "given", "rank", "stream_id", "first_offset")


def _take(chosen: Any, **values: Any) -> Any:
    return (
        sa.update(group_states)
        .where(_STATES.consumer_id == _CONSUMER, _STATES.group_id == chosen.c.group_id)
        .values(**_LEASED, deliveries=_STATES.deliveries + _ONE, **values)
        .returning(*(_STATES[name] for name in _CLAIM_COLUMNS))
    )


_ONE: Final[Any] = sa.literal_column("1")


@lru_cache
def renew() -> str:
    """Renew the leases of the groups `group_ids` where they are the holder's: group, claim's number."""
    statement = (
        sa.update(group_states)
        .where(*_MINE, _named("group_ids"), _STATES.state == _word("claimed"))
        .values(**leased(_FOR))
    )
    return compiled(statement.returning(_STATES.group_id, _STATES.deliveries))


@lru_cache
def count_given() -> str:
    """Write down how often the group has been given, with this time. Its id; nothing where the claim was lost."""
    statement = sa.update(group_states).where(*_this_claim(), _STATES.state == _word("claimed"))
    counted = statement.values(given=sa.bindparam("given", type_=sa.Integer))
    return compiled(counted.returning(_STATES.group_id))


@lru_cache
def finish(state: str) -> str:
    """End a claim: the group is "done" or "dead". Its id; nothing where it was lost."""
    return _end_claim({"state": _word(state), "done_at": NOW})


@lru_cache
def give_back(state: str) -> str:
    """End a claim so that the group is "ready" for any member, or "open" as if it had not been seen complete."""
    return _end_claim({"state": _word(state)} | unleased())


def _end_claim(values: dict[str, Any]) -> str:
    statement = sa.update(group_states).where(*_this_claim(), _STATES.state == _word("claimed")).values(**values)
    return compiled(statement.returning(_STATES.group_id))


@lru_cache
def state_of() -> str:
    """What a group is now: state, holder, claim's number."""
    one = _STATES.group_id == sa.bindparam("group_id", type_=sa.Text)
    return compiled(
        sa.select(_STATES.state, _STATES.holder, _STATES.deliveries).where(_STATES.consumer_id == _CONSUMER, one)
    )


def _this_claim() -> tuple[Any, ...]:
    return (
        *_MINE,
        _STATES.group_id == sa.bindparam("group_id", type_=sa.Text),
        _STATES.deliveries == sa.bindparam("number", type_=sa.Integer),
    )


# --- what is known of a consumer --------------------------------------------------------------------------


@lru_cache
def counts() -> str:
    """How many groups a consumer has in each state, and since when the oldest is known: state, number, moment."""
    statement = sa.select(_STATES.state, sa.func.count(), sa.func.min(_STATES.opened_at))
    return compiled(statement.where(_STATES.consumer_id == _CONSUMER).group_by(_STATES.state))


@lru_cache
def holders() -> str:
    """Who has claimed groups: holder, number, the first lease that ends, whether it is still good; by holder."""
    first = sa.func.min(_STATES.lease_expires_at)
    statement = sa.select(_STATES.holder, sa.func.count(), first, holds(first)).where(
        _STATES.consumer_id == _CONSUMER, _CLAIMABLE, _STATES.holder.is_not(None)
    )
    return compiled(statement.group_by(_STATES.holder).order_by(_STATES.holder))
