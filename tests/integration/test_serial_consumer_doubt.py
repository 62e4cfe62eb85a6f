"""A member that stood still for longer than its lease while a commit was under way neither loses nor repeats anything.

What is frozen is the line to PostgreSQL: for the member that is the same as being stopped (SIGSTOP, a paused machine).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import errors
from tests.support import LIMIT_S, wait_until
from tests.support.commits import AT_COMMIT, committing, end_committing, written
from tests.support.leases import let_lapse
from tests.support.proxy import Proxy
from tests.support.serial_consuming import Stage
from tests.support.tables import serial_holds

pytestmark = pytest.mark.usefixtures("quick_rhythm", "held_commits")

PARTITIONS = 2
"""Of the fixture `stage`."""


@pytest.fixture
def held_commits(engine: sa.Engine) -> None:
    """An application's table whose commits can be held up."""
    written.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(AT_COMMIT))


def let_frozen_lapse(engine: sa.Engine) -> None:
    """Have the member's lease run out. The line may have been frozen amid its renewal, which holds the row."""
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                " AND state = 'idle in transaction' AND query LIKE '%relatum.serial_%'"
            )
        )
    let_lapse(engine)


@contextmanager
def frozen_while_committing(engine: sa.Engine, proxy: Proxy, outcome: str) -> Iterator[None]:
    """Freezes the member amid the first commit in this block, which ends meanwhile.

    `outcome`: what becomes of the commit, "committed" or "rolled back"; "and lapsed": its lease runs out as well; "and
    lost": its connection ends.
    """

    def freeze(gate: sa.Connection) -> None:
        wait_until(lambda: committing(engine), what="the commit is under way")
        proxy.mode = "frozen"
        if outcome.startswith("rolled back"):
            end_committing(engine)
        gate.execute(sa.text("SELECT pg_advisory_unlock(1)"))
        if outcome.endswith("lapsed"):
            let_frozen_lapse(engine)
        elif outcome.endswith("lost"):
            wait_until(lambda: rows(engine), what="the commit came through")
            proxy.reset()
        proxy.mode = "pass"

    with engine.connect() as gate:
        gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
        thread = threading.Thread(target=freeze, args=(gate,))
        thread.start()
        yield
        thread.join()


def rows(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(written.c.body).order_by(written.c.id)))


def write_all(member: Any, engine: sa.Engine, count: int) -> list[str]:
    """Consume by joined transactions until so many rows are there, as an application does; what was said of each."""
    said = []
    until = time.monotonic() + LIMIT_S
    while len(rows(engine)) < count:
        assert time.monotonic() < until, f"not delivered: {rows(engine)} of {count}; {said}"
        batch = member.next_batch(0.5)
        if batch is None:
            continue
        try:
            with batch.transaction() as connection:
                for message in batch:
                    connection.execute(sa.insert(written), {"body": message.body.decode()})
        except (errors.PartitionLost, errors.DatabaseUnavailable) as error:
            said.append(type(error).__name__)
            batch.give_back()
        else:
            said.append("committed")
    return said


@pytest.mark.parametrize(
    "outcome", ["committed and lapsed", "committed and lost", "rolled back and lapsed", "rolled back"]
)
def test_each_message_is_written_once_whatever_became_of_the_commit(stage: Stage, outcome: str) -> None:
    """What was rolled back is delivered again, what was committed is not, and `transaction` says which it was."""
    stage.bed.publish(0, "a", "a1", "a2", "a3")
    with (
        Proxy.to(stage.database_url) as proxy,
        stage.consumer(database_url=proxy.url(stage.database_url), batch_messages=1) as member,
    ):
        with frozen_while_committing(stage.engine, proxy, outcome):
            said = write_all(member, stage.engine, 1)
        said += write_all(member, stage.engine, 3)
        assert member.next_batch(0.3) is None
    assert rows(stage.engine) == ["a1", "a2", "a3"]
    assert (said[0] == "committed") == outcome.startswith("committed"), said


def test_a_hold_whose_commit_was_rolled_back_is_not_forgotten(stage: Stage) -> None:
    """The messages of a moved context are delivered though the member stood still as it stored their hold."""
    bed, engine = stage.bed, stage.engine
    hold_commits(engine)
    with (
        Proxy.to(stage.database_url) as proxy,
        stage.consumer(database_url=proxy.url(stage.database_url)) as member,
    ):
        bed.publish(0, "a", "a1")
        first = member.next_batch(90.0)
        assert first is not None
        with engine.connect() as gate:
            gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
            bed.move(["a"], 0, 1)
            bed.publish(1, "a", "a2")
            wait_until(lambda: committing(engine), what="the hold is being stored")
            proxy.mode = "frozen"
            end_committing(engine)
            gate.execute(sa.text("SELECT pg_advisory_unlock(1)"))
            let_frozen_lapse(engine)
            proxy.mode = "pass"
        write_all(member, engine, 2)
    assert rows(engine) == ["a1", "a2"]


def hold_commits(engine: sa.Engine) -> None:
    """Have commits that store a hold wait for the lock 1, too."""
    trigger = (
        f"CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON relatum.{serial_holds.name} DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION at_commit()"
    )
    with engine.begin() as connection:
        connection.execute(sa.text(trigger))
