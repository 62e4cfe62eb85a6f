"""The durable store of a collector: each transaction, repeated and raced; fencing, taking over, forgetting."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.collecting import Bulk, Collected, Failure, FlushReason, OutcomeStatus, forget_finished
from relatum.collecting._collector_core import Advance, Entry, Result
from relatum.collecting._workers import JoinedRun
from relatum.errors import Conflict, DatabaseUnavailable
from relatum.reading import Message, Properties
from relatum.store import Database, Position
from tests.support.collectors import CollectorStore

LEASE_S = 60.0
BULK = 7
PLAIN = Properties(message_id="orders-0", type="order")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The database, which stores share."""
    shared = Database(database_url)
    yield shared
    shared.close()


@pytest.fixture
def engine(database: Database) -> sa.Engine:
    """Its engine."""
    return database.engine


@pytest.fixture
def store(database: Database) -> CollectorStore:
    """The store of one process."""
    return CollectorStore("billing", database)


@pytest.fixture
def other(database: Database) -> CollectorStore:
    """The store of another process with the same name."""
    return CollectorStore("billing", database)


@pytest.fixture
def member(store: CollectorStore) -> int:
    """A member of the first process."""
    return store.open(["order"], LEASE_S)


def entries(*offsets: int, stream: str = "orders", message_type: str = "order") -> list[Entry]:
    """Messages at these offsets, with ids of their own."""
    return [Entry(MessageId(stream, offset), f"{stream}-{offset}", message_type, 100) for offset in offsets]


def places(*offsets: int, stream: str = "orders") -> frozenset[MessageId]:
    """Places in a stream."""
    return frozenset(MessageId(stream, offset) for offset in offsets)


def results(status: OutcomeStatus, *offsets: int, reason: str | None = None, retry_in_s: float | None = None) -> list:
    """The same result for several messages; one that is none of success has a reason."""
    if status in (OutcomeStatus.FAILED, OutcomeStatus.DEAD):
        reason = reason or "it failed"
    return [Result(MessageId("orders", offset), status, reason, retry_in_s) for offset in offsets]


def lapse(engine: sa.Engine, member: int) -> None:
    """Let a member's lease run out."""
    with engine.begin() as connection:
        statement = sa.text("UPDATE relatum.collector_members SET lease_expires_at = now() WHERE member_id = :id")
        assert connection.execute(statement, {"id": member}).rowcount == 1


def statuses(store: CollectorStore, *offsets: int) -> list[str]:
    """The status of the messages at these offsets."""
    found = store.outcomes_of([f"orders-{offset}" for offset in offsets])
    return [found[f"orders-{offset}"].status.value for offset in offsets]


def consumed(store: CollectorStore, member: int, *offsets: int) -> None:
    """Collect messages and let them succeed."""
    store.add(member, entries(*offsets))
    store.forward(member, BULK, places(*offsets))
    store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, *offsets))


def test_a_message_goes_from_collected_to_succeeded(store: CollectorStore, member: int) -> None:
    """Each step is stored with its time, and its answer has the time that was stored."""
    added = store.add(member, entries(0, 1))
    assert added.places == places(0, 1)
    forwarded = store.forward(member, BULK, places(0, 1))
    assert forwarded.places == places(0, 1)
    finished = store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0))
    assert finished.places == places(0)
    outcome = store.outcomes_of(["orders-0"])["orders-0"]
    assert outcome.status is OutcomeStatus.SUCCEEDED
    assert (outcome.collector, outcome.type, outcome.stream, outcome.offset) == ("billing", "order", "orders", 0)
    assert (outcome.collected_at, outcome.forwarded_at, outcome.finished_at) == (added.at, forwarded.at, finished.at)
    assert (outcome.attempts, outcome.reason, outcome.others) == (1, None, ())
    assert statuses(store, 1, 2) == ["forwarded", "unknown"]


def test_every_call_may_be_repeated(store: CollectorStore, member: int) -> None:
    """A commit that nobody answered was made or not: the same call again changes nothing and answers the same."""
    store.follow(member, "orders", 0)
    advance = Advance("orders", 0, 3)
    first = store.add(member, entries(0, 2), advance)
    assert store.add(member, entries(0, 2), advance).places == first.places == places(0, 2)
    once = store.forward(member, BULK, places(0, 2))
    assert store.forward(member, BULK, places(0, 2)) == once
    failed = [*results(OutcomeStatus.FAILED, 0, reason="no"), *results(OutcomeStatus.COLLECTED, 2, retry_in_s=60.0)]
    done = store.finish(member, BULK, failed)
    assert store.finish(member, BULK, failed).places == done.places == places(0, 2)
    assert [outcome.attempts for outcome in store.outcomes_of(["orders-0", "orders-2"]).values()] == [1, 1]


def test_final_states_never_change(store: CollectorStore, member: int) -> None:
    """Another result of the same bulk, another bulk, and collecting again leave a final outcome as it is."""
    consumed(store, member, 0)
    before = store.outcomes_of(["orders-0"])
    assert store.finish(member, BULK, results(OutcomeStatus.DEAD, 0)).places == frozenset()
    assert store.forward(member, BULK + 1, places(0)).places == frozenset()
    assert store.add(member, entries(0)).places == frozenset()
    assert store.outcomes_of(["orders-0"]) == before


def test_a_retry_waits_until_it_is_due(store: CollectorStore, member: int, other: CollectorStore) -> None:
    """A message to be tried again is collected, with its attempts and the last reason; who takes it over knows when."""
    store.add(member, entries(0))
    store.forward(member, BULK, places(0))
    store.finish(member, BULK, results(OutcomeStatus.COLLECTED, 0, reason="busy", retry_in_s=600.0))
    outcome = store.outcomes_of(["orders-0"])["orders-0"]
    assert (outcome.status, outcome.attempts, outcome.reason) == (OutcomeStatus.COLLECTED, 1, "busy")
    assert outcome.finished_at is None
    store.close(member)
    (entry,) = other.take_over(other.open(["order"], LEASE_S), ["order"], 10)
    assert 500 < entry.due_in_s <= 600
    assert entry.attempts == 1


def test_who_has_all_types_follows(store: CollectorStore, member: int, other: CollectorStore) -> None:
    """A member without the types of another that lives passes none of them over, and follows nothing any more."""
    assert store.follow(member, "orders", 0) is not None
    passing = Advance("orders", 0, 2, passed_over=1, passed_over_types=frozenset({"mail"}))
    heir = other.open(["mail", "order"], LEASE_S)
    with pytest.raises(Conflict, match="executors"):
        store.add(member, entries(0), passing)
    assert statuses(store, 0) == ["unknown"]
    store.unfollow(member, "orders")
    assert store.follow(member, "orders", 0) is None
    assert store.held(member) == {"orders"}
    assert other.held(heir) == frozenset()
    assert other.follow(heir, "orders", 7).next_offset == 0
    other.close(heir)
    assert store.held(member) == frozenset()
    assert store.follow(member, "orders", 0) is not None
    assert store.add(member, entries(0), passing).places == places(0)


def test_nobody_follows_where_none_has_all_types(
    store: CollectorStore, member: int, other: CollectorStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and with whose end it is over; what others merely have more of is no warning."""
    heir = other.open(["mail"], LEASE_S)
    with caplog.at_level("INFO", "relatum.collector"):
        assert [store.follow(member, stream, 0) for stream in ("orders", "mails", "orders")] == [None] * 3
        assert other.follow(heir, "orders", 0) is None
        assert [(each.levelname, each.getMessage().count("nobody follows")) for each in caplog.records] == [
            ("WARNING", 1),
            ("WARNING", 1),
        ]
        other.close(heir)
        assert store.follow(member, "orders", 0) is not None
        caplog.clear()
        other.open(["mail", "order"], LEASE_S)
        assert [store.follow(member, stream, 0) for stream in ("mails", "parcels")] == [None] * 2
        assert [each.levelname for each in caplog.records] == ["INFO"]


def test_messages_of_nobody_are_taken_over(
    store: CollectorStore, member: int, engine: sa.Engine, database: Database
) -> None:
    """Release 0.4.0 stored what others had executors of so; only whoever has one takes them, of this collector's."""
    mine, others = store.open(["mail"], LEASE_S), CollectorStore("audit", database)
    store.add(member, [*entries(0), *entries(1, message_type="mail")])
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.collected_messages SET member_id = NULL"))
    assert others.take_over(others.open(["mail"], LEASE_S), ["mail"], 10) == []
    assert [entry.place.offset for entry in store.take_over(mine, ["mail"], 10)] == [1]
    assert store.take_over(mine, ["mail"], 10) == []


def test_the_position_moves_with_the_rows_or_not_at_all(store: CollectorStore, member: int) -> None:
    """A position that is not where it was left writes nothing; messages of other types are counted."""
    assert store.follow(member, "orders", 5).next_offset == 5
    with pytest.raises(Conflict):
        store.add(member, entries(3), Advance("orders", 3, 4))
    assert statuses(store, 3) == ["unknown"]
    known = Position(8, 42, None)
    store.add(member, entries(5, 7), Advance("orders", 5, 9, known, passed_over=2))
    followed = store.follow(member, "orders", 0)
    assert (followed.next_offset, followed.known_by) == (9, known)
    store.add(member, [], Advance("orders", 9, 12))
    assert store.follow(member, "orders", 0).known_by == known


def test_what_was_handed_in_before_is_left_as_it_is(store: CollectorStore, member: int) -> None:
    """A message that was collected by hand is not collected again when its stream is followed."""
    consumed(store, member, 1)
    store.add(member, entries(2))
    store.follow(member, "orders", 0)
    assert store.add(member, entries(0, 1, 2, 3), Advance("orders", 0, 4)).places == places(0, 2, 3)
    assert statuses(store, 0, 1, 2, 3) == ["collected", "succeeded", "collected", "collected"]


def test_one_member_follows_a_stream(
    store: CollectorStore, member: int, other: CollectorStore, engine: sa.Engine
) -> None:
    """The others stand by until its lease has lapsed; the one that was away too long is told so."""
    standby = other.open(["order"], LEASE_S)
    assert store.follow(member, "orders", 0) is not None
    assert other.follow(standby, "orders", 0) is None
    store.add(member, entries(0), Advance("orders", 0, 1))
    lapse(engine, member)
    assert other.follow(standby, "orders", 0).next_offset == 1
    with pytest.raises(Conflict):
        store.add(member, entries(1), Advance("orders", 1, 2))
    assert store.follow(member, "orders", 0) is None
    other.unfollow(standby, "orders")
    assert store.renew(member)
    assert store.follow(member, "orders", 0).next_offset == 1


def test_two_members_that_race_collect_each_message_once(engine: sa.Engine, database: Database) -> None:
    """Both believe to follow the stream and read the same messages: each is one member's, and the position is right."""
    stores = [CollectorStore("billing", database) for _ in range(2)]
    members = [each.open(["order"], LEASE_S) for each in stores]
    taken: list[MessageId] = []

    def collect(which: int, start: int) -> None:
        with suppress(Conflict):
            stored = stores[which].add(members[which], entries(start, start + 1), Advance("orders", start, start + 2))
            taken.extend(stored.places)

    def follow_and_collect(which: int) -> None:
        collect(which, stores[which].follow(members[which], "orders", 0).next_offset)
        stores[which].unfollow(members[which], "orders")

    with ThreadPoolExecutor(2) as pool:
        for step in range(60):
            stale, heir = step % 2, 1 - step % 2
            start = stores[stale].follow(members[stale], "orders", 0).next_offset
            lapse(engine, members[stale])
            both = [pool.submit(collect, stale, start), pool.submit(follow_and_collect, heir)]
            for each in both:
                each.result(90)
            assert stores[stale].renew(members[stale])
    assert len(taken) >= 120
    assert len(taken) == len(set(taken))
    with engine.connect() as connection:
        rows = "SELECT s.position, count(*) FROM relatum.collector_sources s, relatum.collected_messages GROUP BY 1"
        assert [tuple(row) for row in connection.execute(sa.text(rows))] == [(len(taken), len(taken))]


def test_messages_of_a_dead_member_are_taken_over(
    store: CollectorStore, member: int, other: CollectorStore, engine: sa.Engine
) -> None:
    """Once its lease has lapsed and not before, oldest first, as many as asked for, and only of known types."""
    store.add(member, entries(0))
    store.add(member, entries(1, 2))
    store.add(member, entries(3, message_type="invoice"))
    store.forward(member, BULK, places(0))
    heir = other.open(["order"], LEASE_S)
    assert other.take_over(heir, ["order"], 10) == []
    lapse(engine, member)
    first = other.take_over(heir, ["order"], 2)
    assert [entry.place.offset for entry in first] == [0, 1]
    assert [entry.attempts for entry in first] == [1, 0]
    assert (first[1].message_id, first[1].type, first[1].bytes) == ("orders-1", "order", 100)
    assert [entry.place.offset for entry in other.take_over(heir, ["order"], 10)] == [2]
    assert other.take_over(heir, ["order"], 10) == []
    assert statuses(store, 0, 1, 2, 3) == ["collected"] * 4
    assert other.forward(heir, BULK + 1, places(0, 1, 2)).places == places(0, 1, 2)
    assert [entry.type for entry in other.take_over(heir, ["invoice"], 10)] == ["invoice"]


def test_a_stale_member_cannot_store_results(
    store: CollectorStore, member: int, other: CollectorStore, engine: sa.Engine
) -> None:
    """What was taken over is fenced row by row: results, forwards and transactions of the old member find nothing."""
    store.add(member, entries(0, 1))
    store.forward(member, BULK, places(0, 1))
    lapse(engine, member)
    heir = other.open(["order"], LEASE_S)
    assert len(other.take_over(heir, ["order"], 1)) == 1
    assert store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0, 1)).places == places(1)
    assert store.forward(member, BULK + 1, places(0)).places == frozenset()
    assert statuses(store, 0, 1) == ["collected", "succeeded"]
    # Nothing is left, so the member is gone, and says so.
    assert other.take_over(heir, ["order"], 1) == []
    assert not store.renew(member)
    for call in (lambda: store.add(member, entries(9)), lambda: store.follow(member, "orders", 0)):
        with pytest.raises(Conflict, match="gone"):
            call()


def test_a_member_that_was_late_goes_on(store: CollectorStore, member: int, engine: sa.Engine) -> None:
    """A lease that lapsed while nobody minded is renewed, and results count."""
    store.add(member, entries(0))
    store.forward(member, BULK, places(0))
    lapse(engine, member)
    assert store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0)).places == places(0)
    assert store.renew(member)


def test_leaving_hands_everything_over_at_once(store: CollectorStore, member: int, other: CollectorStore) -> None:
    """No lease is waited for after an orderly stop."""
    store.follow(member, "orders", 0)
    store.add(member, entries(0), Advance("orders", 0, 1))
    store.close(member)
    heir = other.open(["order"], LEASE_S)
    assert other.follow(heir, "orders", 0).next_offset == 1
    assert [entry.place.offset for entry in other.take_over(heir, ["order"], 10)] == [0]


def test_a_result_and_a_take_over_exclude_each_other(
    store: CollectorStore, member: int, other: CollectorStore, engine: sa.Engine
) -> None:
    """While a joined transaction is about to commit a result, the message is not taken over; then it is done."""
    store.add(member, entries(0, 1))
    store.forward(member, BULK, places(0, 1))
    heir = other.open(["order"], LEASE_S)
    lapse(engine, member)
    with store.transaction() as connection:
        assert store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0), connection=connection).places == places(
            0
        )
        assert [entry.place.offset for entry in other.take_over(heir, ["order"], 10)] == [1]
    assert statuses(store, 0, 1) == ["succeeded", "collected"]
    assert other.take_over(heir, ["order"], 10) == []


def test_a_joined_transaction_keeps_results_and_writes_together(
    store: CollectorStore, member: int, engine: sa.Engine
) -> None:
    """What raises inside passes as it is and takes both back; else both are there, and the times are of the end."""
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE paid (number integer)"))
    store.add(member, entries(0))
    store.forward(member, BULK, places(0))
    with pytest.raises(ZeroDivisionError), store.transaction() as connection:  # noqa: PT012 - what a caller does
        connection.execute(sa.text("INSERT INTO paid VALUES (0)"))
        store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0), connection=connection)
        raise ZeroDivisionError
    assert statuses(store, 0) == ["forwarded"]
    with pytest.raises(sa.exc.DataError), store.transaction() as connection:
        connection.execute(sa.text("SELECT 1 / 0"))
    with store.transaction() as connection:
        connection.execute(sa.text("INSERT INTO paid VALUES (0)"))
        store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0), connection=connection)
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM paid")).scalar_one() == 1
    assert statuses(store, 0) == ["succeeded"]


class _CutAtCommit:
    """Ends the server's process of a connection when it commits for the nth time: before it does, or after it did."""

    def __init__(self, engine: sa.Engine, *, after: bool) -> None:
        self.engine = engine
        self.after = after
        self.cuts = 0

    def __enter__(self) -> "_CutAtCommit":
        sa.event.listen(self.engine, "commit", self._on_commit)
        return self

    def __exit__(self, *error: object) -> None:
        sa.event.remove(self.engine, "commit", self._on_commit)

    def _on_commit(self, connection: sa.Connection) -> None:
        if self.cuts:
            return
        self.cuts += 1
        driver = connection.connection.driver_connection
        assert driver is not None
        if self.after:
            driver.commit()
        with psycopg.connect(self.engine.url.set(drivername="postgresql").render_as_string(False)) as killer:
            killer.execute("SELECT pg_terminate_backend(%s, 5000)", [driver.info.backend_pid])
        # psycopg asks nobody where nothing is left to commit: let it notice.
        with suppress(psycopg.OperationalError):
            driver.execute("SELECT 1")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_commit_whose_outcome_is_unknown_is_settled_by_repeating(
    store: CollectorStore, member: int, other: CollectorStore, engine: sa.Engine, after: bool
) -> None:
    """The connection is lost just before or just after each commit: repeated, each call answers as if nothing was."""

    def repeated(call: Callable[[], object]) -> object:
        with _CutAtCommit(engine, after=after) as cut:
            with pytest.raises(DatabaseUnavailable):
                call()
            assert cut.cuts == 1
            return call()

    store.follow(member, "orders", 0)
    assert repeated(lambda: store.add(member, entries(0, 1), Advance("orders", 0, 2))).places == places(0, 1)
    assert repeated(lambda: store.add(member, entries(5))).places == places(5)
    assert repeated(lambda: store.forward(member, BULK, places(0, 1))).places == places(0, 1)
    done = results(OutcomeStatus.SUCCEEDED, 0)
    assert repeated(lambda: store.finish(member, BULK, done)).places == places(0)
    lapse(engine, member)
    heir = other.open(["order"], LEASE_S)
    found = repeated(lambda: other.take_over(heir, ["order"], 10))
    assert [entry.place.offset for entry in found] == [1, 5]
    assert [entry.attempts for entry in found] == [1, 0]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_is_told_of_a_joined_commit_in_doubt_is_what_was_committed(
    store: CollectorStore, member: int, engine: sa.Engine, after: bool
) -> None:
    """An executor that would decide otherwise the second time is asked again only where nothing was committed."""
    place = MessageId("orders", 0)
    message = Collected(place, "orders-0", "order", 1, Message("orders", 0, None, None, lambda: ({}, PLAIN, b"", True)))
    bulk = Bulk(BULK, "order", (message,), FlushReason.AGE)
    store.add(member, entries(0))
    store.forward(member, BULK, places(0))
    answers: list[list[Any]] = [[Failure("not yet")], [None]]

    def judge(answered: Any) -> list[Result]:
        return [Result(place, OutcomeStatus.SUCCEEDED if answered[0] == [None] else OutcomeStatus.COLLECTED)]

    run = JoinedRun(store, member, bulk, judge, lambda bulk: answers.pop(0), lambda letters: {})
    with _CutAtCommit(engine, after=after):
        with pytest.raises(DatabaseUnavailable):
            run.run()
        results, stored = run.run()
    told = OutcomeStatus.COLLECTED if after else OutcomeStatus.SUCCEEDED
    assert [result.status for result in results] == [told]
    assert statuses(store, 0) == [told.value]
    assert stored is not None
    assert stored.places == places(0)


def test_others_streams_are_told_in_one_answer(store: CollectorStore, member: int, engine: sa.Engine) -> None:
    """Those of members whose lease holds: neither one's own, nor what was left, nor what died with its member."""
    another = store.open(["order"], LEASE_S)
    for stream in ("orders", "mails"):
        assert store.follow(member, stream, 0) is not None
    assert store.follow(another, "parcels", 0) is not None
    store.unfollow(member, "mails")
    assert (store.held(another), store.held(member)) == ({"orders"}, {"parcels"})
    lapse(engine, another)
    assert store.held(member) == frozenset()


def test_a_stream_declared_again_begins_anew(store: CollectorStore, member: int) -> None:
    """Offsets restart, so the old generation's unfinished messages failed, and its rows answer for nothing new."""
    store.follow(member, "orders", 0)
    store.add(member, entries(0, 1, 2), Advance("orders", 0, 3, Position(2, 7, 1)))
    store.forward(member, BULK, places(0, 1))
    store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0))
    store.begin_anew(member, "orders", 0)
    followed = store.follow(member, "orders", 5)
    assert followed is not None
    assert (followed.next_offset, followed.known_by) == (0, None)
    assert statuses(store, 0, 1, 2) == ["succeeded", "failed", "failed"]
    assert store.outcomes_of(["orders-1"])["orders-1"].reason.startswith("the stream was deleted and declared again")
    anew = [Entry(MessageId("orders", 0), "another", "order", 1)]
    assert store.add(member, anew, Advance("orders", 0, 1)).places == places(0)
    assert store.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 1)).places == frozenset()
    assert store.outcomes_of(["another"])["another"].status is OutcomeStatus.COLLECTED


def test_one_id_at_several_places_gives_the_least_advanced(store: CollectorStore, member: int) -> None:
    """A publisher that repeated itself has several messages: none may hide behind another's success."""
    consumed(store, member, 0)
    store.add(member, [Entry(MessageId("orders", 1), "orders-0", "order", 1)])
    outcome = store.outcomes_of(["orders-0"])["orders-0"]
    assert (outcome.status, outcome.offset) == (OutcomeStatus.COLLECTED, 1)
    assert [(each.status, each.offset) for each in outcome.others] == [(OutcomeStatus.SUCCEEDED, 0)]


def test_one_id_at_several_places_has_succeeded_only_where_all_have(store: CollectorStore, member: int) -> None:
    """One that failed may not hide behind another's success either, whichever came first."""
    consumed(store, member, 0)
    store.add(member, [Entry(MessageId("orders", 1), "orders-0", "order", 1)])
    store.forward(member, BULK, places(1))
    store.finish(member, BULK, results(OutcomeStatus.FAILED, 1))
    outcome = store.outcomes_of(["orders-0"])["orders-0"]
    assert (outcome.status, outcome.offset) == (OutcomeStatus.FAILED, 1)
    assert [(each.status, each.offset) for each in outcome.others] == [(OutcomeStatus.SUCCEEDED, 0)]


def test_ids_and_types_may_be_any_text(store: CollectorStore, member: int) -> None:
    """COPY's own special characters, quotes and other alphabets come back as they were."""
    ids = ["a\tb", "a\\nb", "new\nline", "'", "ж漢\U0001f600", "x" * 255, "\\."]
    rows = [Entry(MessageId("orders", offset), text, text, 0) for offset, text in enumerate(ids)]
    store.add(member, rows)
    found = store.outcomes_of(ids)
    assert [(text, found[text].type, found[text].status) for text in ids] == [
        (text, text, OutcomeStatus.COLLECTED) for text in ids
    ]


def test_nothing_to_do_is_no_error(store: CollectorStore, member: int) -> None:
    """Empty calls answer with nothing."""
    assert store.add(member, []).places == frozenset()
    assert store.forward(member, BULK, []).places == frozenset()
    assert store.finish(member, BULK, []).places == frozenset()
    assert store.outcomes_of([]) == {}
    assert store.take_over(member, [], 10) == []


def test_collectors_do_not_see_each_other(store: CollectorStore, member: int, database: Database) -> None:
    """Two names, or two virtual hosts, follow the same stream each on its own."""
    others = [CollectorStore("audit", database), CollectorStore("billing", database, vhost="other")]
    consumed(store, member, 0)
    store.close(member)
    for each in others:
        its = each.open(["order"], LEASE_S)
        assert each.outcomes_of(["orders-0"])["orders-0"].status is OutcomeStatus.UNKNOWN
        assert each.take_over(its, ["order"], 10) == []
        assert each.follow(its, "orders", 0).next_offset == 0
        assert each.add(its, entries(0), Advance("orders", 0, 1)).places == places(0)


def test_finished_messages_are_forgotten_after_a_time(engine: sa.Engine, database: Database) -> None:
    """Only finished ones, only those of a collector that forgets, and only after as long as it keeps them."""
    short, long = CollectorStore("short", database, keep_s=3600), CollectorStore("long", database, keep_s=None)
    members = [each.open(["order"], LEASE_S) for each in (short, long)]
    for each, its in zip((short, long), members, strict=True):
        consumed(each, its, *range(5))
        each.add(its, entries(10))
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "UPDATE relatum.collected_messages SET finished_at = now() - interval '2 hours' "
                "WHERE finished_at IS NOT NULL AND stream_offset < 4"
            )
        )
    assert forget_finished(engine, batch_rows=3, seconds=None) == 4
    assert statuses(short, 0, 3, 4, 10) == ["unknown", "unknown", "succeeded", "collected"]
    assert statuses(long, 0, 3, 4, 10) == ["succeeded", "succeeded", "succeeded", "collected"]
    CollectorStore("long", database, keep_s=60).open(["order"], LEASE_S)
    assert long.renew(members[1])
    assert statuses(long, 0, 3, 4, 10) == ["unknown", "unknown", "succeeded", "collected"]


def test_a_database_that_is_away_is_named(store: CollectorStore, member: int) -> None:
    """Every call says so, so that it is repeated."""
    gone = CollectorStore("billing", "postgresql://nobody@127.0.0.1:1/nothing")
    calls: list[Callable[[], object]] = [
        lambda: gone.open(["order"], LEASE_S),
        lambda: gone.renew(member),
        lambda: gone.add(member, entries(0)),
        lambda: gone.forward(member, BULK, places(0)),
        lambda: gone.finish(member, BULK, results(OutcomeStatus.SUCCEEDED, 0)),
        lambda: gone.take_over(member, ["order"], 1),
        lambda: gone.outcomes_of(["x"]),
        lambda: gone.transaction().__enter__(),
    ]
    for call in calls:
        with pytest.raises(DatabaseUnavailable):
            call()
    gone.dispose()


@pytest.fixture
def as_role(engine: sa.Engine) -> Iterator[Callable[[str], Database]]:
    """Databases whose connections act in a role."""
    made: list[Database] = []

    def acting(role: str) -> Database:
        made.append(Database(engine.url.update_query_dict({"options": f"-c role={role}"})))
        return made[-1]

    yield acting
    for each in made:
        each.close()


def test_the_collectors_role_is_enough(as_role: Callable[[str], Database]) -> None:
    """A user with `relatum_collector` does all that a collector does; a consumer may ask, a recorder prune."""
    store = CollectorStore("billing", as_role("relatum_collector"))
    member = store.open(["order"], LEASE_S)
    store.follow(member, "orders", 0)
    consumed(store, member, 0)
    store.begin_anew(member, "orders", 0)
    store.take_over(member, ["order"], 10)
    assert store.renew(member)
    store.close(member)
    consumer = as_role("relatum_consumer")
    assert statuses(CollectorStore("billing", consumer), 0) == ["succeeded"]
    with pytest.raises(sa.exc.ProgrammingError), consumer.engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM relatum.collected_messages"))
    assert forget_finished(as_role("relatum_recorder").engine) == 0
