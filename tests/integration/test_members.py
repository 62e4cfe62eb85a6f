"""Members that share things: one lease each, even shares, takeovers; and their plans."""

from collections.abc import Collection
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.store.catalog import ensure_stream
from relatum.store.members import RECORDERS, Member, Share
from tests.support.leases import let_lapse
from tests.support.plans import nodes_of, plan_of_statement
from tests.support.tables import streams

FILL = """
INSERT INTO relatum.streams (name, lease_holder) SELECT 's' || n, 'm' || n % 2000 FROM generate_series(1, 50000) n;
INSERT INTO relatum.recorder_members (name, holder, lease_expires_at)
  SELECT 'n' || n % 500, 'm' || n, now() + interval '1 hour' FROM generate_series(1, 10000) n;
"""
"""Many recorders and streams."""


@pytest.fixture
def ids(engine: sa.Engine) -> list[int]:
    with engine.begin() as connection:
        return [ensure_stream(connection, "/", f"s-{n}").stream_id for n in range(10)]


def beat(engine: sa.Engine, member: Member, wanted: Collection[int]) -> Share:
    with engine.begin() as connection:
        return member.beat(connection, wanted)


def recorder(name: str = "one", holder: str | None = None) -> Member:
    """A member whose lease does not run out by itself while a test runs."""
    return Member(RECORDERS, name, lease_s=600.0, holder=holder)


def test_a_lease_that_ran_out_while_nobody_minded_is_taken_anew(engine: sa.Engine, ids: list[int]) -> None:
    """A member whose lease lapsed unnoticed becomes another member and takes the streams that are still free."""
    member = recorder()
    beat(engine, member, ids)
    before = member.holder
    let_lapse(engine)
    share = beat(engine, member, ids)
    assert (share.holder != before, share.held) == (True, frozenset(ids))


def test_a_name_that_was_given_is_kept(engine: sa.Engine, ids: list[int]) -> None:
    """A process that is started again under its name takes its streams back at once."""
    beat(engine, recorder(holder="me"), ids)
    again = recorder(holder="me")
    assert beat(engine, again, ids).held == frozenset(ids)
    let_lapse(engine)
    assert beat(engine, again, ids).holder == "me"


def test_who_takes_at_the_same_time_waits_for_nobody(engine: sa.Engine, ids: list[int]) -> None:
    """Of two members that see the same streams free, one takes them and the other takes none without a wait."""
    first, second = recorder(), recorder()
    with engine.connect() as one, engine.connect() as other:
        assert first.beat(one, ids).held == frozenset(ids)
        assert second.beat(other, ids).held == frozenset()
        one.commit()
        other.commit()
    look = beat(engine, second, ids)
    assert (look.held, set(look.others.values())) == (frozenset(), {first.holder})


def test_what_was_seen_free_is_not_taken_from_who_was_quicker(engine: sa.Engine, ids: list[int]) -> None:
    """Taking is a compare-and-set on the holder that was seen, so a stream that was taken since is left."""
    first, second = recorder(), recorder()
    with engine.connect() as later:
        later.execution_options(isolation_level="REPEATABLE READ")
        seen = {"keys": ids, "holders": [None] * len(ids), "at_most": 10, "within": "one", "holder": second.holder}
        later.commit()
        beat(engine, first, ids)
        assert later.scalars(RECORDERS.take, seen).all() == []
        later.rollback()


def test_streams_that_are_gone_are_named(engine: sa.Engine, ids: list[int]) -> None:
    """A stream that is unknown or was replaced is missing, and is not held."""
    with engine.begin() as connection:
        connection.execute(sa.update(streams).where(streams.c.stream_id == ids[0]).values(replaced_at=sa.func.now()))
    share = beat(engine, recorder(), [*ids, 10**6])
    assert (share.held, share.missing) == (frozenset(ids[1:]), {ids[0], 10**6})


def test_two_thousand_streams_are_held_by_one_row(engine: sa.Engine) -> None:
    """A beat that holds two thousand streams writes one row in four statements."""
    with engine.begin() as connection:
        named = "INSERT INTO relatum.streams (name) SELECT 's' || n FROM generate_series(1, 2000) n RETURNING stream_id"
        ids = connection.scalars(sa.text(named)).all()
    member = recorder()
    written: list[tuple[str, int]] = []
    assert len(beat(engine, member, ids).held) == 2000

    def count(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        written.append((statement, cursor.rowcount))

    sa.event.listen(engine, "after_cursor_execute", count)
    assert len(beat(engine, member, ids).held) == 2000
    assert [rows for statement, rows in written if statement.startswith(("UPDATE", "INSERT", "DELETE"))] == [1, 0]
    assert len(written) == 4


ME = {"within": "n7", "holder": "m7"}
KEYS = list(range(100, 300))
STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "renew": (RECORDERS.renew, {**ME, "lease_s": 4.0}),
    "bury": (RECORDERS.bury, ME),
    "alive": (RECORDERS.alive, ME),
    "look": (RECORDERS.look, {**ME, "keys": KEYS}),
    "take": (RECORDERS.take, {**ME, "keys": KEYS, "holders": [f"m{n}" for n in KEYS], "at_most": 50}),
    "release": (RECORDERS.release, {**ME, "keys": KEYS}),
    "holders": (RECORDERS.holders, {"keys": KEYS}),
    "leave": (RECORDERS.leave, ME),
}


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_finds_its_rows_by_an_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """Each statement of members finds its rows by an index and scans no large table."""
    plan = plan_of_statement(filled, mode, *STATEMENTS[name])
    of_tables = [node for node in nodes_of(plan) if node.get("Relation Name") in ("streams", "recorder_members")]
    assert of_tables, plan
    assert not [node for node in of_tables if node["Node Type"] == "Seq Scan"], plan
    # Otherwise each row would be compared with each key.
    assert not [node for node in of_tables if "ANY" in node.get("Filter", "")], plan
