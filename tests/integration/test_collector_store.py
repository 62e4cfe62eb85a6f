"""The durable store of a collector: each transaction, repeated and raced; fencing, taking over, forgetting."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.collecting import Bulk, Collected, ExecutorOptions, Failure, FlushReason, OutcomeStatus, forget_finished
from relatum.collecting._collector_core import Advance, Followed, Result
from relatum.collecting._consuming import BulkConsumer
from relatum.errors import Conflict, DatabaseUnavailable
from relatum.otel import NO_SPAN
from relatum.reading import Message, Position, Properties
from relatum.store.database import Database
from tests.support import until_answered, wait_until
from tests.support.collectors import COLLECTED, DEAD, FAILED, SUCCEEDED, UNKNOWN, CollectorStore, StoreMember
from tests.support.commits import commits_held, committing, make_commits_wait
from tests.support.place import Place

BULK = 7
PLAIN = Properties(message_id="orders-0", type="order")


@pytest.fixture
def member(database: Database) -> StoreMember:
    """A member of the first process."""
    return StoreMember(database)


def entries(*offsets: int, stream: str = "orders", message_type: str = "order") -> list[Collected]:
    """Messages at these offsets, with ids of their own."""
    return [Collected(MessageId(stream, offset), f"{stream}-{offset}", message_type, 100, None) for offset in offsets]


def places(*offsets: int, stream: str = "orders") -> frozenset[MessageId]:
    return frozenset(MessageId(stream, offset) for offset in offsets)


def results(status: OutcomeStatus, *offsets: int, reason: str | None = None, retry_in_s: float | None = None) -> list:
    """The same result for several messages; one that is none of success has a reason."""
    if status in (FAILED, DEAD):
        reason = reason or "it failed"
    return [Result(MessageId("orders", offset), status, reason, retry_in_s) for offset in offsets]


def change(database: Database, statement: str, **parameters: Any) -> int:
    with database.engine.begin() as connection:
        return connection.execute(sa.text(statement), parameters).rowcount


def lapse(database: Database, member: StoreMember) -> None:
    statement = "UPDATE relatum.collector_members SET lease_expires_at = now() WHERE member_id = :id"
    assert change(database, statement, id=member.member) == 1


def taken_over(member: StoreMember, *types: str) -> list[int]:
    """The offsets of the messages that a member takes over, of type "order" or of others."""
    return [message.place.offset for message, _ in member.take_over(types or ["order"], 10)]


def statuses(member: StoreMember, *offsets: int) -> list[str]:
    found = member.store.outcomes_of([f"orders-{offset}" for offset in offsets])
    return [found[f"orders-{offset}"].status.value for offset in offsets]


def finish(member: StoreMember, *offsets: int) -> None:
    member.forward(BULK, places(*offsets))
    member.finish(BULK, results(SUCCEEDED, *offsets))


def consumed(member: StoreMember, *offsets: int) -> None:
    member.add(entries(*offsets))
    finish(member, *offsets)


def test_a_message_goes_from_collected_to_succeeded(member: StoreMember) -> None:
    """Each step stores its time and returns it; no other result, bulk or collecting changes a final outcome."""
    added, forwarded = member.add(entries(0, 1)), member.forward(BULK, places(0, 1))
    finished = member.finish(BULK, results(SUCCEEDED, 0))
    assert (added.places, forwarded.places, finished.places) == (places(0, 1), places(0, 1), places(0))
    outcome = member.outcome("orders-0")
    assert outcome.status is SUCCEEDED
    assert (outcome.collector, outcome.type, outcome.stream, outcome.offset) == ("billing", "order", "orders", 0)
    assert (outcome.collected_at, outcome.forwarded_at, outcome.finished_at) == (added.at, forwarded.at, finished.at)
    assert (outcome.attempts, outcome.reason, outcome.others) == (1, None, ())
    assert statuses(member, 1, 2) == ["forwarded", "unknown"]
    before = member.store.outcomes_of(["orders-0"])
    for late in (member.finish(BULK, results(DEAD, 0)), member.forward(BULK + 1, places(0)), member.add(entries(0))):
        assert late.places == frozenset()
    assert member.store.outcomes_of(["orders-0"]) == before


def test_a_retry_waits_until_it_is_due(member: StoreMember, database: Database) -> None:
    """A message to be tried again is collected, with its attempts and reason; whoever takes it over knows when."""
    member.add(entries(0))
    member.forward(BULK, places(0))
    member.finish(BULK, results(COLLECTED, 0, reason="busy", retry_in_s=600.0))
    outcome = member.outcome("orders-0")
    assert (outcome.status, outcome.attempts, outcome.reason) == (COLLECTED, 1, "busy")
    assert outcome.finished_at is None
    member.close()
    ((message, due_in_s),) = StoreMember(database).take_over(["order"], 10)
    assert 500 < due_in_s <= 600
    assert message.attempts == 1


def test_a_stream_is_begun_with_its_known_message(member: StoreMember, database: Database) -> None:
    """Who follows it next, as after a kill, recognises a stream that is declared again before its next message."""
    known = Position(4, 99, None)
    assert member.follow("orders", 5, known) == Followed(5, known, is_new=True)
    member.close()
    heir = StoreMember(database)
    assert heir.follow("orders", 7, Position(6, 1, None)) == Followed(5, known)
    heir.rewind("orders", 3, is_new=False, known=Position(2, 8, 1))
    assert heir.follow("orders", 7) == Followed(3, Position(2, 8, 1))


def test_nobody_follows_where_none_has_all_types(
    member: StoreMember, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and with whose end it is over; what others merely have more of is not a warning."""
    heir = StoreMember(database, types=["mail"])
    with caplog.at_level("INFO", "relatum.collector"):
        assert [member.follow(stream, 0) for stream in ("orders", "mails", "orders")] == [None] * 3
        assert heir.follow("orders", 0) is None
        assert member.held() == {"orders", "mails"}
        assert [(each.levelname, each.getMessage().count("no member follows")) for each in caplog.records] == [
            ("WARNING", 1),
            ("WARNING", 1),
        ]
        heir.close()
        assert member.follow("orders", 0) is not None
        caplog.clear()
        StoreMember(database, types=["mail", "order"])
        assert [member.follow(stream, 0) for stream in ("mails", "parcels")] == [None] * 2
        assert [each.levelname for each in caplog.records] == ["INFO"]


def test_a_clock_that_was_ahead_delays_no_retry_for_longer_than_an_hour(
    member: StoreMember, database: Database
) -> None:
    """A retry is due by the server's clock, which may have been set back since."""
    member.add(entries(0))
    assert change(database, "UPDATE relatum.collected_messages SET next_attempt_at = now() + interval '9 days'") == 1
    lapse(database, member)
    [(_, due_in_s)] = StoreMember(database).take_over(["order"], 10)
    assert due_in_s == 3600.0


def test_messages_of_nobody_are_taken_over(member: StoreMember, database: Database) -> None:
    """A member takes over the messages without a member that are of its collector and types, as release 0.4.0 left."""
    mine, others = StoreMember(database, types=["mail"]), StoreMember(database, "audit", types=["mail"])
    member.add([*entries(0), *entries(1, message_type="mail")])
    change(database, "UPDATE relatum.collected_messages SET member_id = NULL")
    assert [taken_over(each, "mail") for each in (others, mine, mine)] == [[], [1], []]


def test_the_position_moves_with_the_rows_or_not_at_all(member: StoreMember) -> None:
    """A position that is not where it was left writes nothing; messages of other types are counted."""
    assert member.follow("orders", 5).next_offset == 5
    with pytest.raises(Conflict):
        member.add(entries(3), Advance("orders", 3, 4))
    assert statuses(member, 3) == ["unknown"]
    known = Position(8, 42, None)
    member.add(entries(5, 7), Advance("orders", 5, 9, known, passed_over=2))
    assert member.follow("orders", 0) == Followed(9, known)


def test_one_member_follows_a_stream(member: StoreMember, database: Database) -> None:
    """Other members stand by until the lease has lapsed; the stale member cannot store messages after that."""
    standby = StoreMember(database)
    for stream in ("orders", "mails"):
        assert member.follow(stream, 0) is not None
    assert standby.follow("orders", 0) is None
    assert standby.follow("parcels", 0) is not None
    member.unfollow("mails")
    assert (standby.held(), member.held()) == ({"orders"}, {"parcels"})
    member.add(entries(0), Advance("orders", 0, 1))
    lapse(database, member)
    assert standby.held() == frozenset()
    assert standby.follow("orders", 0).next_offset == 1
    with pytest.raises(Conflict):
        member.add(entries(1), Advance("orders", 1, 2))
    assert member.follow("orders", 0) is None
    standby.unfollow("orders")
    assert member.renew()
    assert member.follow("orders", 0).next_offset == 1


def test_two_members_that_race_collect_each_message_once(database: Database) -> None:
    """Each message that two members read at the same time is stored by one of them, and the position is right."""
    stale, heir = StoreMember(database), StoreMember(database)
    taken: list[MessageId] = []

    def collect(member: StoreMember, start: int) -> None:
        with suppress(Conflict):
            stored = member.add(entries(start, start + 1), Advance("orders", start, start + 2))
            taken.extend(stored.places)

    def follow_and_collect(member: StoreMember) -> None:
        collect(member, member.follow("orders", 0).next_offset)
        member.unfollow("orders")

    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            start = stale.follow("orders", 0).next_offset
            lapse(database, stale)
            for each in [pool.submit(collect, stale, start), pool.submit(follow_and_collect, heir)]:
                each.result(90)
            assert stale.renew()
            stale, heir = heir, stale
    assert len(taken) >= 60
    assert len(taken) == len(set(taken))
    with database.engine.connect() as connection:
        rows = "SELECT s.position, count(*) FROM relatum.collector_sources s, relatum.collected_messages GROUP BY 1"
        assert [tuple(row) for row in connection.execute(sa.text(rows))] == [(len(taken), len(taken))]


def test_a_stale_member_cannot_store_results(member: StoreMember, database: Database) -> None:
    """A stale member can neither finish nor forward a message that was taken over; once removed it gets an error."""
    member.add(entries(0, 1))
    member.forward(BULK, places(0, 1))
    lapse(database, member)
    heir = StoreMember(database)
    assert len(heir.take_over(["order"], 1)) == 1
    assert member.finish(BULK, results(SUCCEEDED, 0, 1)).places == places(1)
    assert member.forward(BULK + 1, places(0)).places == frozenset()
    assert statuses(member, 0, 1) == ["collected", "succeeded"]
    # Nothing is left, so the member is gone; the call reports that.
    assert heir.take_over(["order"], 1) == []
    assert not member.renew()
    for call in (lambda: member.add(entries(9)), lambda: member.follow("orders", 0)):
        with pytest.raises(Conflict, match="was removed"):
            call()


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "at its executor"])
def test_a_joined_result_and_a_take_over_exclude_each_other(
    member: StoreMember, database: Database, is_stored: bool
) -> None:
    """A message whose joined result is stored is not taken over; a result of a message that was taken over is void."""
    member.add(entries(0, 1, 2))
    member.forward(BULK, places(0, 1))
    heir = StoreMember(database)
    lapse(database, member)
    with member.store.transaction() as connection:
        finish = partial(member.finish, BULK, results(SUCCEEDED, 0), connection=connection)
        if is_stored:
            assert finish().places == places(0)
        assert taken_over(heir) == ([1, 2] if is_stored else [0, 1, 2])
        if not is_stored:
            assert finish().places == frozenset()
    assert statuses(member, 0, 1, 2) == ["succeeded" if is_stored else "collected", "collected", "collected"]
    assert taken_over(heir) == []


def test_what_an_heir_that_dies_took_over_is_taken_over_from_it(member: StoreMember, database: Database) -> None:
    """A message whose members die one after the other at its executor gets the result of the last one alone."""
    member.add(entries(0))
    heirs = [member, *(StoreMember(database) for _ in range(2))]
    for number, (dead, heir) in enumerate(pairwise(heirs)):
        dead.forward(BULK + number, places(0))
        lapse(database, dead)
        assert taken_over(heir) == [0]
    last = heirs[-1]
    last.forward(BULK + 9, places(0))
    for number, dead in enumerate(heirs[:-1]):
        assert dead.finish(BULK + number, results(FAILED, 0)).places == frozenset()
    assert last.finish(BULK + 9, results(SUCCEEDED, 0)).places == places(0)
    assert (last.outcome("orders-0").status, last.outcome("orders-0").attempts) == (SUCCEEDED, 3)


def test_a_place_that_is_held_is_left_to_others(member: StoreMember, database: Database) -> None:
    """What a member holds there may be of a stream before that was declared again; it learns what it no longer has."""
    member.add(entries(0, 1))
    assert member.unfinished(places(0, 1, 2)) == places(0, 1)
    member.close()
    heir, other = StoreMember(database), StoreMember(database)
    found, lost = heir.store.take_over(heir.member, ["order"], 10, held=places(0))
    assert ([message.place.offset for message, _ in found], lost) == ([1], list(places(0)))
    assert (member.unfinished(places(0, 1)), heir.unfinished(places(0, 1))) == (frozenset(), places(1))
    assert taken_over(other) == [0]


def test_a_take_over_whose_commit_is_slow_is_waited_for(member: StoreMember, database: Database, place: Place) -> None:
    """A repeated take-over gives the messages that one without an answer has taken."""
    member.add(entries(0, 1))
    lapse(database, member)
    with closing(Database(f"{place.database}?statement_timeout_s=1")) as impatient:
        heir = StoreMember(impatient)
        make_commits_wait(database.engine, "UPDATE ON relatum.collected_messages")
        with commits_held(database.engine):
            for _ in range(2):
                with pytest.raises(DatabaseUnavailable):
                    heir.take_over(["order"], 10)
        assert until_answered(lambda: taken_over(heir)) == [0, 1]


def test_what_was_forgotten_is_not_collected_again(member: StoreMember, database: Database) -> None:
    """A member that takes over a stream begins behind the messages that were forgotten, even if earlier ones wait."""
    member.follow("orders", 0)
    member.add([*entries(0, message_type="slow"), *entries(1, 2)], Advance("orders", 0, 3))
    finish(member, 1, 2)
    age = "UPDATE relatum.collected_messages SET finished_at = now() - interval '8 days' WHERE stream_offset > 0"
    assert change(database, age) == 2
    assert forget_finished(database.engine) == 2
    lapse(database, member)
    heir = StoreMember(database, types=["order", "slow"])
    assert heir.follow("orders", 0).next_offset == 3
    assert taken_over(heir, "order", "slow") == [0]


@contextmanager
def cut_at_commit(engine: sa.Engine, *, after: bool) -> Iterator[list[int]]:
    """End the server's process of the first connection that commits, before or after that; gives the process."""
    cuts: list[int] = []

    def on_commit(connection: sa.Connection) -> None:
        if cuts or connection.engine.url != engine.url:
            return
        driver: Any = connection.connection.driver_connection
        cuts.append(driver.info.backend_pid)
        if after:
            driver.commit()
        with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False)) as killer:
            killer.execute("SELECT pg_terminate_backend(%s, 5000)", cuts)
        # psycopg sends nothing if there is nothing to commit: make it notice.
        with suppress(psycopg.OperationalError):
            driver.execute("SELECT 1")

    sa.event.listen(sa.Engine, "commit", on_commit)
    try:
        yield cuts
    finally:
        sa.event.remove(sa.Engine, "commit", on_commit)


@contextmanager
def cut_at_statement(database: Database, *, after: bool) -> Iterator[list[int]]:
    """End the server's process of the first statement that commits by itself, before that or before its answer."""
    cuts: list[int] = []
    execute = psycopg.Cursor.execute

    def cut(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
        driver = cursor.connection
        if not cuts and driver.autocommit and b"collected_messages" in query:
            cuts.append(driver.info.backend_pid)
            if after:
                execute(cursor, query, *args, **options)
            with psycopg.connect(database.engine.url.set(drivername="postgresql").render_as_string(False)) as killer:
                execute(killer.cursor(), "SELECT pg_terminate_backend(%s, 5000)", cuts)
        return execute(cursor, query, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", cut)
        yield cuts


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_commit_whose_outcome_is_unknown_is_settled_by_repeating(
    member: StoreMember, database: Database, after: bool
) -> None:
    """A call repeated after its commit was lost, or after its answer, gives the same right answer."""

    def repeated(call: Callable[[], Any]) -> Any:
        # On a connection that served before, the statement is repeated by itself.
        with cut_at_statement(database, after=after) as cuts, suppress(DatabaseUnavailable):
            call()
        assert len(cuts) == 1
        return call()

    member.follow("orders", 0)
    assert repeated(lambda: member.add(entries(0, 1), Advance("orders", 0, 2))).places == places(0, 1)
    assert repeated(lambda: member.add(entries(5))).places == places(5)
    assert repeated(lambda: member.forward(BULK, places(0, 1))).places == places(0, 1)
    once = member.forward(BULK, places(0, 1))
    assert member.forward(BULK, places(0, 1)) == once
    done = [*results(FAILED, 0), *results(COLLECTED, 1, reason="no", retry_in_s=0.0)]
    for _ in range(2):
        assert repeated(lambda: member.finish(BULK, done)).places == places(0, 1)
        assert [member.outcome(f"orders-{offset}").attempts for offset in (0, 1)] == [1, 1]
    member.close()
    heir = StoreMember(database)
    assert heir.follow("orders", 0).next_offset == 2
    with cut_at_commit(database.engine, after=after) as cuts, pytest.raises(DatabaseUnavailable):
        heir.take_over(["order"], 10)
    assert len(cuts) == 1
    found = heir.take_over(["order"], 10)
    assert [(message.place.offset, message.attempts) for message, _ in found] == [(1, 1), (5, 0)]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_is_told_of_a_joined_commit_in_doubt_is_what_was_committed(
    member: StoreMember, database: Database, after: bool
) -> None:
    """A joined executor is called again only if nothing of its first call was committed."""
    place = MessageId("orders", 0)
    message = Collected(place, "orders-0", "order", 1, Message("orders", 0, None, None, lambda: ({}, PLAIN, b"", True)))
    bulk = Bulk(BULK, "order", (message,), FlushReason.AGE)
    member.add(entries(0))
    member.forward(BULK, places(0))
    answers: list[list[Any]] = [[Failure("not yet")], [None]]
    shared: Any = SimpleNamespace(store=member.store, member=member.member, abandoned=threading.Event())
    consumer = BulkConsumer(shared, "order", ExecutorOptions(), lambda bulk: answers.pop(0))
    with cut_at_commit(database.engine, after=after):
        if not after:
            with pytest.raises(DatabaseUnavailable):
                consumer.execute_joined(bulk, NO_SPAN)
        results, stored = consumer.execute_joined(bulk, NO_SPAN)
    told = COLLECTED if after else SUCCEEDED
    assert [result.status for result in results] == [told]
    assert statuses(member, 0) == [told.value]
    assert stored is not None
    assert stored.places == places(0)


def test_a_stream_declared_again_begins_anew(member: StoreMember) -> None:
    """Offsets restart, so the old generation's unfinished messages failed, and its rows answer for nothing new."""
    member.follow("orders", 0)
    member.add(entries(0, 1, 2), Advance("orders", 0, 3, Position(2, 7, 1)))
    member.forward(BULK, places(0, 1))
    member.finish(BULK, results(SUCCEEDED, 0))
    member.rewind("orders", 0, is_new=True)
    assert member.follow("orders", 5) == Followed(0, None)
    assert statuses(member, 0, 1, 2) == ["succeeded", "failed", "failed"]
    assert member.outcome("orders-1").reason.startswith("the stream was deleted and declared again")
    anew = [Collected(MessageId("orders", 0), "another", "order", 1, None)]
    assert member.add(anew, Advance("orders", 0, 1)).places == places(0)
    assert member.finish(BULK, results(SUCCEEDED, 1)).places == frozenset()
    assert member.outcome("another").status is COLLECTED


def waiting(place: Place, *events: str) -> int:
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = ANY (:events)"
    return len(place.sql(query, events=list(events)))


def test_what_is_collected_while_its_stream_begins_anew_is_of_the_new_stream(
    member: StoreMember, database: Database, place: Place
) -> None:
    """`collect` waits for the end of the old generation, which would fail the message, or leave it for ever."""
    member.follow("orders", 0)
    member.add(entries(0), Advance("orders", 0, 1))
    make_commits_wait(database.engine, "UPDATE ON relatum.collector_sources")
    with commits_held(database.engine) as release, ThreadPoolExecutor(3) as threads:
        ending = threads.submit(member.rewind, "orders", 0, is_new=True)
        wait_until(lambda: committing(database.engine), what="the old generation ends")
        collecting = threads.submit(member.add, entries(5))
        following = threads.submit(member.follow, "orders", 0)
        wait_until(lambda: waiting(place, "transactionid", "tuple") == 2, what="collecting and following wait")
        release()
        ending.result()
    assert collecting.result().places == places(5)
    assert following.result().next_offset == 0
    assert member.forward(BULK, places(5)).places == places(5)


def test_what_is_stored_while_its_member_leaves_is_taken_over(
    member: StoreMember, database: Database, place: Place
) -> None:
    """A member whose last transaction the server has not ended when it leaves is not removed before others look."""
    make_commits_wait(database.engine, "INSERT ON relatum.collected_messages")
    with commits_held(database.engine) as release, ThreadPoolExecutor(2) as threads:
        adding = threads.submit(member.add, entries(0))
        wait_until(lambda: waiting(place, "advisory"), what="a transaction that ends late")
        leaving = threads.submit(member.close)
        wait_until(lambda: leaving.done() or waiting(place, "transactionid"), what="leaving")
        release()
        assert adding.result().places == places(0)
        leaving.result()
    assert taken_over(StoreMember(database)) == [0]


@pytest.mark.parametrize("status", [COLLECTED, FAILED])
def test_one_id_at_several_places_has_succeeded_only_where_all_have(member: StoreMember, status: OutcomeStatus) -> None:
    """A publisher that repeated itself has several messages: none may hide behind another's success."""
    consumed(member, 0)
    member.add([Collected(MessageId("orders", 1), "orders-0", "order", 1, None)])
    if status is FAILED:
        member.forward(BULK, places(1))
        member.finish(BULK, results(status, 1))
    outcome = member.outcome("orders-0")
    assert (outcome.status, outcome.offset) == (status, 1)
    assert [(each.status, each.offset) for each in outcome.others] == [(SUCCEEDED, 0)]


def test_ids_and_types_may_be_any_text(member: StoreMember) -> None:
    """Special characters of COPY, quotes and other alphabets stay as they are; empty calls answer with nothing."""
    ids = ["a\tb", "a\\nb", "new\nline", "'", "ж漢\U0001f600", "x" * 255, "\\."]
    member.add([Collected(MessageId("orders", offset), text, text, 0, None) for offset, text in enumerate(ids)])
    found = member.store.outcomes_of(ids)
    assert [(text, found[text].type, found[text].status) for text in ids] == [(text, text, COLLECTED) for text in ids]
    for stored in (member.add([]), member.forward(BULK, []), member.finish(BULK, [])):
        assert stored.places == frozenset()
    assert (member.store.outcomes_of([]), member.take_over([], 10)) == ({}, [])


def test_collectors_do_not_see_each_other(member: StoreMember, database: Database) -> None:
    """Two names, or two virtual hosts, follow the same stream each on its own."""
    consumed(member, 0)
    member.close()
    for other in (StoreMember(database, "audit"), StoreMember(database, vhost="other")):
        assert other.outcome("orders-0").status is UNKNOWN
        assert taken_over(other) == []
        assert other.follow("orders", 0).next_offset == 0
        assert other.add(entries(0), Advance("orders", 0, 1)).places == places(0)


def test_finished_messages_are_forgotten_after_a_time(database: Database) -> None:
    """Only finished messages are forgotten, once they are older than their collector's limit, if it has one."""
    short, long = (StoreMember(database, name, keep_s=keep_s) for name, keep_s in (("short", 3600), ("long", None)))
    for each in (short, long):
        consumed(each, *range(5))
        each.add(entries(10))
    age = "UPDATE relatum.collected_messages SET finished_at = now() - interval '2 hours'"
    change(database, f"{age} WHERE finished_at IS NOT NULL AND stream_offset < 4")
    assert forget_finished(database.engine, batch_rows=3, seconds=None) == 4
    assert statuses(short, 0, 3, 4, 10) == ["unknown", "unknown", "succeeded", "collected"]
    assert statuses(long, 0, 3, 4, 10) == ["succeeded", "succeeded", "succeeded", "collected"]
    StoreMember(database, "long", keep_s=60)
    long.store.forget()
    assert statuses(long, 0, 3, 4, 10) == ["unknown", "unknown", "succeeded", "collected"]


def test_the_collectors_role_is_enough(database: Database) -> None:
    """The role `relatum_collector` may do all that a collector does, `relatum_consumer` read, and a recorder prune."""

    def acting(role: str) -> Database:
        url = database.engine.url.update_query_dict({"options": f"-c role={role}"})
        return stack.enter_context(closing(Database(url)))

    with ExitStack() as stack:
        member = StoreMember(acting("relatum_collector"))
        member.follow("orders", 0)
        consumed(member, 0)
        member.rewind("orders", 0, is_new=True)
        member.take_over(["order"], 10)
        assert member.renew()
        member.store.forget()
        member.close()
        consumer = acting("relatum_consumer")
        found = CollectorStore("billing", consumer).outcomes_of(["orders-0"])
        assert found["orders-0"].status is SUCCEEDED
        with pytest.raises(sa.exc.ProgrammingError):
            change(consumer, "DELETE FROM relatum.collected_messages")
        assert forget_finished(acting("relatum_recorder").engine) == 0
