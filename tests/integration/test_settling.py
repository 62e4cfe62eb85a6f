"""A commit in doubt is settled by the token of that very step, whatever happened to the rows since."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from uuid import UUID

import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.store.database import make_engine
from relatum.store.settling import CommitInDoubt, Tokens, forget_settlements, joined, settle
from tests.support import wait_until
from tests.support.commits import AT_COMMIT, committing, end_committing, written
from tests.support.proxy import Proxy
from tests.support.standstill import in_time
from tests.support.tables import settlements


@pytest.fixture
def lost_line(database_url: str) -> Iterator[tuple[Proxy, sa.Engine]]:
    """A line to PostgreSQL that can be cut, and an engine by way of it."""
    with Proxy.to(database_url) as proxy:
        engine = make_engine(proxy.url(database_url))
        yield proxy, engine
        engine.dispose()


def rows(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(written)) or 0)


def tokens_left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(settlements)) or 0)


@pytest.mark.parametrize("comes_through", [True, False])
def test_a_step_under_way_is_waited_for(engine: sa.Engine, comes_through: bool) -> None:
    """Whoever settles is told how the commit ended, not how it stood when the question was asked."""
    written.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(AT_COMMIT))
    tokens, answers = Tokens(), []
    token = tokens.new()
    with engine.connect() as gate:
        gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
        worker = threading.Thread(target=_write_one, args=(engine, tokens, token))
        worker.start()
        wait_until(lambda: committing(engine), what="the commit is under way")
        asker = threading.Thread(target=lambda: answers.append(settle(engine, token)))
        asker.start()
        asking = sa.text("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wait_until(lambda: connection.execute(asking).first(), what="the question waits")
        assert answers == []
        if not comes_through:
            end_committing(engine)
        gate.execute(sa.text("SELECT pg_advisory_unlock(1)"))
    worker.join()
    asker.join()
    assert answers == [comes_through]
    assert rows(engine) == comes_through


def _write_one(engine: sa.Engine, tokens: Tokens, token: UUID) -> None:
    with suppress(CommitInDoubt), joined(engine, token, lambda c: tokens.write(c, token)) as connection:
        connection.execute(sa.insert(written), {"body": "a"})


def test_only_the_end_of_a_transaction_that_others_write_in_may_not_stand_still(database_url: str) -> None:
    """They may take as long as they like; what is fenced there would hold up other members."""
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
    """A step that stood still on its way is refused when it arrives; and who asks again is told the same."""
    written.create(engine)
    tokens = Tokens()
    token = tokens.new()
    assert not settle(engine, token)
    assert not settle(engine, token)
    with pytest.raises(sa.exc.IntegrityError), joined(engine, token, lambda c: tokens.write(c, token)) as connection:
        connection.execute(sa.insert(written), {"body": "a"})
    assert rows(engine) == 0


def test_a_transaction_ends_as_it_says(engine: sa.Engine, lost_line: tuple[Proxy, sa.Engine]) -> None:
    """A commit whose answer was lost counts; and each token is removed by the step after it."""
    written.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(AT_COMMIT))
    (proxy, far), tokens = lost_line, Tokens()

    def lose_the_answer() -> None:
        wait_until(lambda: committing(engine), what="the commit is under way")
        proxy.mode = "blackhole_replies"
        gate.execute(sa.text("SELECT pg_advisory_unlock(1)"))
        wait_until(lambda: rows(engine))
        proxy.mode = "pass"
        proxy.reset()

    with engine.connect() as gate:
        gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
        loser = threading.Thread(target=lose_the_answer)
        loser.start()
        with tokens.transaction(far) as connection:
            connection.execute(sa.insert(written), {"body": "a"})
        loser.join()
    assert rows(engine) == 1
    for _ in range(5):
        with tokens.transaction(far):
            pass
    assert tokens_left(engine) == 1


def test_a_transaction_that_was_rolled_back_says_so(engine: sa.Engine) -> None:
    """Where the server ends the session during the commit, nothing was written, and that is what is raised."""
    written.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(AT_COMMIT))
    tokens = Tokens()

    def write() -> None:
        with tokens.transaction(engine) as connection:
            connection.execute(sa.insert(written), {"body": "a"})

    with engine.connect() as gate:
        gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
        ender = threading.Thread(target=end_committing, args=(engine,))
        ender.start()
        with pytest.raises(errors.DatabaseUnavailable, match="nothing was committed"):
            write()
        ender.join()
    assert rows(engine) == 0


def test_what_the_server_refuses_is_not_in_doubt(engine: sa.Engine) -> None:
    """A commit that fails by the application's own constraint is told as that."""
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ones (one int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    tokens = Tokens()

    def write() -> None:
        with tokens.transaction(engine) as connection:
            connection.execute(sa.text("INSERT INTO ones VALUES (1), (1)"))

    with pytest.raises(sa.exc.IntegrityError):
        write()
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


def test_what_was_left_behind_is_removed_by_age(engine: sa.Engine) -> None:
    """Tokens of those that died stay for a day, and no longer than somebody looks."""
    old, new = Tokens.new(), Tokens.new()
    with engine.begin() as connection:
        day_ago = sa.func.now() - sa.text("interval '25 hours'")
        connection.execute(sa.insert(settlements).values(token=old, written_at=day_ago))
        connection.execute(sa.insert(settlements).values(token=new))
        forget_settlements(connection)
        assert list(connection.scalars(sa.select(settlements.c.token))) == [new]
