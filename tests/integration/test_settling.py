"""A commit in doubt is settled by the token of that very step, whatever happened to the rows since."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.store.database import make_engine
from relatum.store.settling import CommitInDoubt, Tokens, forget_settlements, joined, settle
from tests.support import LIMIT_S, wait_until
from tests.support.commits import bodies_written, commits_held, committing, end_committing, make_commits_wait, written
from tests.support.leases import let_lapse
from tests.support.proxy import Proxy
from tests.support.serial_consuming import Stage
from tests.support.standstill import in_time
from tests.support.threads import beside


@pytest.fixture
def lost_line(database_url: str) -> Iterator[tuple[Proxy, sa.Engine]]:
    """A line to PostgreSQL that can be cut, and an engine by way of it."""
    with Proxy.to(database_url) as proxy:
        engine = make_engine(proxy.url(database_url))
        yield proxy, engine
        engine.dispose()


def tokens_left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.text("SELECT count(*) FROM relatum.settlements")))


@pytest.mark.parametrize("comes_through", [True, False])
def test_a_step_under_way_is_waited_for(engine: sa.Engine, comes_through: bool) -> None:
    """Settling gives how the commit ended, not how far it was when the question was asked."""
    make_commits_wait(engine)
    tokens = Tokens()
    token = tokens.new()
    with commits_held(engine) as release, beside(_write_one, engine, tokens, token):
        wait_until(lambda: committing(engine), what="the commit is under way")
        with beside(settle, engine, token) as answer:
            asking = sa.text("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'")
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                wait_until(lambda: connection.execute(asking).first(), what="the question waits")
            assert not answer.done()
            if not comes_through:
                end_committing(engine)
            release()
    assert answer.result() is comes_through
    assert bodies_written(engine) == ["a"] * comes_through


def _write_one(engine: sa.Engine, tokens: Tokens, token: UUID) -> None:
    with suppress(CommitInDoubt), joined(engine, token, lambda c: tokens.write(c, token)) as connection:
        connection.execute(sa.insert(written), {"body": "a"})


@pytest.mark.parametrize("default", ["0", "1s"])
def test_only_the_end_of_a_transaction_that_others_write_in_may_not_stand_still(
    engine: sa.Engine, database_url: str, default: str
) -> None:
    """A transaction of the application has no limit of idle time until its last step, which locks out others."""
    with engine.begin() as connection:
        altered = f'ALTER DATABASE "{engine.url.database}" SET idle_in_transaction_session_timeout = "{default}"'
        connection.execute(sa.text(altered))
    limit = sa.text("SELECT current_setting('idle_in_transaction_session_timeout')")
    engine, tokens, seen = make_engine(database_url, idle_s=2.0), Tokens(), []

    def store(connection: sa.Connection, token: UUID) -> None:
        seen.append(connection.scalar(limit))
        tokens.write(connection, token)

    with tokens.transaction(engine, store) as connection:
        seen.append(connection.scalar(limit))
    assert seen == ["0", "2s"]
    with engine.begin() as connection:
        assert connection.scalar(limit) == "2s", "as any other"
    engine.dispose()


def test_what_was_settled_as_rolled_back_comes_through_no_more(engine: sa.Engine) -> None:
    """A step that was settled as rolled back is refused when it arrives, and settles the same again."""
    written.create(engine)
    tokens = Tokens()
    token = tokens.new()
    assert not settle(engine, token)
    assert not settle(engine, token)
    with pytest.raises(sa.exc.IntegrityError), joined(engine, token, lambda c: tokens.write(c, token)) as connection:
        connection.execute(sa.insert(written), {"body": "a"})
    assert bodies_written(engine) == []


def test_a_transaction_ends_as_it_says(engine: sa.Engine, lost_line: tuple[Proxy, sa.Engine]) -> None:
    """A commit whose answer was lost counts, and each token is removed by the step after it."""
    make_commits_wait(engine)
    (proxy, far), tokens = lost_line, Tokens()

    def lose_the_answer() -> None:
        wait_until(lambda: committing(engine), what="the commit is under way")
        proxy.mode = "blackhole_replies"
        release()
        wait_until(lambda: bodies_written(engine))
        proxy.mode = "pass"
        proxy.reset()

    with commits_held(engine) as release, beside(lose_the_answer), tokens.transaction(far) as connection:
        connection.execute(sa.insert(written), {"body": "a"})
    assert bodies_written(engine) == ["a"]
    for _ in range(5):
        with tokens.transaction(far):
            pass
    assert tokens_left(engine) == 1


def test_a_transaction_that_was_rolled_back_says_so(engine: sa.Engine) -> None:
    """A commit whose session the server ends writes nothing, and raises that."""
    make_commits_wait(engine)
    with (
        commits_held(engine),
        beside(end_committing, engine),
        pytest.raises(errors.DatabaseUnavailable, match="nothing was committed"),
        Tokens().transaction(engine) as connection,
    ):
        connection.execute(sa.insert(written), {"body": "a"})
    assert bodies_written(engine) == []


def test_what_the_server_refuses_is_not_in_doubt(engine: sa.Engine) -> None:
    """A commit that fails by the application's own constraint raises that error."""
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ones (one int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with pytest.raises(sa.exc.IntegrityError), Tokens().transaction(engine) as connection:
        connection.execute(sa.text("INSERT INTO ones VALUES (1), (1)"))
    assert tokens_left(engine) == 0


def test_a_server_that_stands_still_is_not_waited_for_without_end(lost_line: tuple[Proxy, sa.Engine]) -> None:
    """Settling ends in its time where the server takes connections and answers nothing."""
    proxy, far = lost_line
    token = Tokens.new()
    assert not settle(far, token)
    proxy.mode = "blackhole_replies"
    with in_time(1.0), pytest.raises(errors.DatabaseUnavailable):
        settle(far, token, within_s=1.0)
    proxy.mode = "pass"
    assert not settle(far, token)


def test_a_login_that_is_refused_for_a_moment_leaves_no_commit_in_doubt(engine: sa.Engine, database_url: str) -> None:
    """A server that refuses the login after a commit without an answer, as after a failover, is asked again."""
    make_commits_wait(engine)
    role = f"settler_{secrets.token_hex(4)}"
    change = partial(_execute, engine)
    change(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'secret'")
    far = make_engine(sa.make_url(database_url).set(username=role, password="secret"))

    def refuse() -> None:
        wait_until(lambda: committing(engine), what="the commit is under way")
        change(f"ALTER ROLE {role} NOLOGIN")
        end_committing(engine)

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            change(f"ALTER ROLE {role} LOGIN")
            return super().wait(timeout)

    refused = pytest.raises(errors.DatabaseUnavailable, match="nothing was")
    with commits_held(engine), beside(refuse), refused, Tokens().transaction(far, stop=Pause()) as connection:
        connection.execute(sa.insert(written), {"body": "a"})
    far.dispose()
    change(f"DROP ROLE {role}")


def _execute(engine: sa.Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)


def test_what_was_left_behind_is_removed_by_age(engine: sa.Engine) -> None:
    """Tokens of those that died stay for a day, and no longer than somebody looks."""
    old, new = Tokens.new(), Tokens.new()
    with engine.begin() as connection:
        write = (
            "INSERT INTO relatum.settlements (token, written_at) VALUES (:token, now() - make_interval(hours => :age))"
        )
        connection.execute(sa.text(write), [{"token": old, "age": 25}, {"token": new, "age": 0}])
        forget_settlements(connection)
        assert list(connection.scalars(sa.text("SELECT token FROM relatum.settlements"))) == [new]


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


@pytest.mark.usefixtures("quick_rhythm")
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
        with commits_held(stage.engine) as release, beside(freeze_amid_commit, stage.engine, proxy, outcome, release):
            said = write_all(member, stage.engine, 1)
        said += write_all(member, stage.engine, 3)
        assert member.next_batch(0.3) is None
    assert bodies_written(stage.engine) == ["a1", "a2", "a3"]
    assert (said[0] == "committed") == outcome.startswith("committed"), said


@pytest.mark.usefixtures("quick_rhythm")
def test_a_hold_whose_commit_was_rolled_back_is_not_forgotten(stage: Stage) -> None:
    """The messages of a moved context are delivered though the member was suspended as it stored their hold."""
    bed, engine = stage.bed, stage.engine
    make_commits_wait(engine)
    make_commits_wait(engine, "INSERT ON relatum.serial_holds")
    with Proxy.to(stage.database_url) as proxy, stage.consumer(database_url=proxy.url(stage.database_url)) as member:
        bed.publish(0, "a", "a1")
        first = member.next_batch(90.0)
        assert first is not None
        with commits_held(engine) as release:
            bed.move(["a"], 0, 1)
            bed.publish(1, "a", "a2")
            freeze_amid_commit(engine, proxy, "rolled back and lapsed", release)
        write_all(member, engine, 2)
    assert bodies_written(engine) == ["a1", "a2"]
