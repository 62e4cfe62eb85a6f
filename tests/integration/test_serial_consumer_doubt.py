"""A member whose line to PostgreSQL froze for longer than its lease during a commit loses and repeats nothing."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import errors
from tests.support import LIMIT_S, wait_until
from tests.support.commits import bodies_written, commits_held, committing, end_committing, make_commits_wait, written
from tests.support.leases import let_lapse
from tests.support.proxy import Proxy
from tests.support.serial_consuming import Stage

pytestmark = pytest.mark.usefixtures("quick_rhythm")

PARTITIONS = 2


def let_frozen_lapse(engine: sa.Engine) -> None:
    """Have the member's lease run out. The line may have been frozen during its renewal, which holds the row."""
    query = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
        " AND state = 'idle in transaction' AND query LIKE '%relatum.serial_%'"
    )
    with engine.begin() as connection:
        connection.execute(sa.text(query))
    let_lapse(engine)


def freeze_amid_commit(engine: sa.Engine, proxy: Proxy, outcome: str, release: Callable[[], object]) -> None:
    """Freeze the member during a commit that is held up, until the commit has ended with this outcome."""
    wait_until(lambda: committing(engine), what="the commit is under way")
    proxy.mode = "frozen"
    if outcome.startswith("rolled back"):
        end_committing(engine)
    release()
    if outcome.endswith("lapsed"):
        let_frozen_lapse(engine)
    elif outcome.endswith("lost"):
        wait_until(lambda: bodies_written(engine), what="the commit came through")
        proxy.reset()
    proxy.mode = "pass"


def write_all(member: Any, engine: sa.Engine, count: int) -> list[str]:
    """Consume by joined transactions until so many rows are there, as an application does; what was said of each."""
    said = []
    until = time.monotonic() + LIMIT_S
    while len(bodies_written(engine)) < count:
        assert time.monotonic() < until, f"not delivered: {bodies_written(engine)} of {count}; {said}"
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
    """A batch whose commit was rolled back is delivered again, a committed one is not, and `transaction` says which."""
    make_commits_wait(stage.engine)
    stage.bed.publish(0, "a", "a1", "a2", "a3")
    with (
        Proxy.to(stage.database_url) as proxy,
        stage.consumer(database_url=proxy.url(stage.database_url), batch_messages=1) as member,
    ):
        with commits_held(stage.engine) as release:
            thread = threading.Thread(target=freeze_amid_commit, args=(stage.engine, proxy, outcome, release))
            thread.start()
            said = write_all(member, stage.engine, 1)
            thread.join()
        said += write_all(member, stage.engine, 3)
        assert member.next_batch(0.3) is None
    assert bodies_written(stage.engine) == ["a1", "a2", "a3"]
    assert (said[0] == "committed") == outcome.startswith("committed"), said


def test_a_hold_whose_commit_was_rolled_back_is_not_forgotten(stage: Stage) -> None:
    """The messages of a moved context are delivered though the member was suspended as it stored their hold."""
    bed, engine = stage.bed, stage.engine
    make_commits_wait(engine)
    stage.sql(
        "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON relatum.serial_holds DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION at_commit()"
    )
    with (
        Proxy.to(stage.database_url) as proxy,
        stage.consumer(database_url=proxy.url(stage.database_url)) as member,
    ):
        bed.publish(0, "a", "a1")
        first = member.next_batch(90.0)
        assert first is not None
        with commits_held(engine) as release:
            bed.move(["a"], 0, 1)
            bed.publish(1, "a", "a2")
            freeze_amid_commit(engine, proxy, "rolled back and lapsed", release)
        write_all(member, engine, 2)
    assert bodies_written(engine) == ["a1", "a2"]
