"""Lookups in a web service: how many at once, what is refused, whether they are well, and when waits end."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from relatum import Broker
from relatum.common.waiting import within
from relatum.errors import (
    BrokerUnavailable,
    DatabaseUnavailable,
    InvalidInput,
    OffsetNotFound,
    ReadTimeout,
    UsedAfterClose,
)
from relatum.reading import Message, ReaderStatistics, StreamBounds, StreamReader
from relatum.store.database import Database
from relatum_consumer import Answer, AsyncRelations, Health, Relations, Status
from relatum_consumer.lookups import servers
from relatum_consumer.lookups.waiting import WATCHED
from tests.contract._faces import FACES as READERS
from tests.contract._faces import open_face
from tests.support import LIMIT_S, in_a_try, recording, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.relations import FACES, open_relations
from tests.support.standstill import in_time

AT_ONCE = 30
LONG_S = 80.0
NOBODY_LISTENS = "amqp://guest:guest@127.0.0.1:129/"
NO_DATABASE = "postgresql://127.0.0.1:9/nobody"
VALUES = 10
LOOKUPS = 200
LATE = 8


@pytest.fixture
def recorded(place: Place) -> str:
    """A stream with messages of ten values in turn, the first of them "a", and one without relata, that is recorded."""
    values = [chr(ord("a") + n % VALUES) for n in range(6 * VALUES)]
    place.put_recorded(*[(b"", {"order_id": value}) for value in (*values, "alone")], keys=["order_id"])
    return place.stream


def find(relations: Relations) -> Status:
    return relations.find("order_id", "a").status


def test_no_more_connections_than_allowed_and_each_is_kept(place: Place, recorded: str) -> None:
    """Thirty threads share the three sessions that they may open, and keep them to the end."""
    with (
        Proxy.to(place.database) as proxy,
        Relations(place.amqp, proxy.url(place.database), database_connections_max=3) as relations,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        together = threading.Barrier(AT_ONCE)

        def ask(_: int) -> list[Status]:
            together.wait(LONG_S)
            return [find(relations) for _ in range(5)]

        answers = list(threads.map(ask, range(AT_ONCE)))
    assert answers == [[Status.FOUND] * 5] * AT_ONCE
    assert proxy.opened <= 3


@pytest.mark.parametrize("face", FACES)
def test_each_of_many_at_once_has_its_own_answer_and_the_broker_few_connections(
    place: Place, recorded: str, face: str
) -> None:
    """With default settings 200 lookups at once are all answered, over 16 connections at most."""
    with Proxy.to(place.stream_url) as proxy:
        address = Broker(place.amqp, stream_url=proxy.url(place.stream_url))
        ask = _in_threads if face == "blocking" else lambda *urls: asyncio.run(_in_tasks(*urls))
        offsets, statistics = ask(address, place.database)
        assert offsets == [list(range(n % VALUES, 6 * VALUES, VALUES)) for n in range(LOOKUPS)]
        # When some are closed, the proxy may see them end a moment after others have begun.
        assert proxy.most <= statistics.limit + LATE
        assert statistics.limit == 16
        assert (statistics.in_use, statistics.waiting, statistics.following) == (0, 0, 0)
        assert 1 <= statistics.idle <= statistics.limit
        assert statistics.opened == proxy.opened


def _in_threads(address: Broker, database_url: str) -> tuple[list[list[int]], ReaderStatistics]:
    together = threading.Barrier(LOOKUPS)
    with Relations(address, database_url, timeout_s=240) as relations, ThreadPoolExecutor(LOOKUPS) as threads:
        assert relations.statistics().opened == 0

        def look(number: int) -> list[int]:
            together.wait(LONG_S)
            return [each.offset for each in relations.find("order_id", chr(ord("a") + number % VALUES))]

        return list(threads.map(look, range(LOOKUPS))), relations.statistics()


async def _in_tasks(address: Broker, database_url: str) -> tuple[list[list[int]], ReaderStatistics]:
    async with AsyncRelations(address, database_url, timeout_s=240) as relations:
        values = [chr(ord("a") + number % VALUES) for number in range(LOOKUPS)]
        answers = await asyncio.gather(*(relations.find("order_id", value) for value in values))
        return [[each.offset for each in answer] for answer in answers], relations.statistics()


def test_who_waits_for_a_message_takes_nobodys_place(place: Place, recorded: str) -> None:
    """A lookup that waits for a message holds no connection."""
    with (
        ThreadPoolExecutor(1) as threads,
        Relations(place.amqp, place.database, database_connections_max=1, timeout_s=LONG_S) as relations,
    ):
        message = relations.read(recorded, 6 * VALUES)
        wait = threads.submit(relations.wait_related, message, timeout_s=LONG_S)
        wait_until(lambda: relations.statistics().awaiting == 1, what="the wait")
        assert find(relations) is Status.FOUND
        assert not wait.done()
        relations.close()
        with pytest.raises(UsedAfterClose):
            wait.result(LONG_S)


async def test_one_connection_is_enough_for_many_at_once_that_ask_several_times(place: Place, recorded: str) -> None:
    """One connection serves many lookups at once that need several answers each."""
    async with AsyncRelations(place.amqp, place.database, database_connections_max=1, timeout_s=LONG_S) as relations:
        message = await relations.read(recorded, 0)
        asked = [
            *[relations.trace(("order_id", "a")) for _ in range(64)],
            *[relations.related(message, by="order_id", complete=True) for _ in range(16)],
            *[relations.around(message.time, recorded, after_s=60) for _ in range(16)],
        ]
        answers = await asyncio.gather(*asked)
    assert [len(answer) for answer in answers] == [6] * 64 + [5] * 16 + [6 * VALUES + 1] * 16


@pytest.mark.parametrize("face", FACES)
def test_health_names_what_does_not_answer(place: Place, face: str) -> None:
    """A health check names each server that does not answer, and raises nothing."""
    for broker, database, errors in (
        (place.amqp, place.database, ("", "")),
        (NOBODY_LISTENS, place.database, ("BrokerUnavailable", "")),
        (place.amqp, NO_DATABASE, ("", "DatabaseUnavailable")),
    ):
        with open_relations(face, broker, database) as relations:
            health = relations.health(timeout_s=LONG_S)
        assert (health.broker.partition(":")[0], health.database.partition(":")[0]) == errors
        assert health.is_well == (health == Health())


@pytest.mark.parametrize("face", FACES)
def test_a_database_that_does_not_answer_takes_half_of_a_health_check(place: Place, face: str, recorded: str) -> None:
    """A health check asks the broker although a locked table keeps the database from answering."""
    with open_relations(face, place.amqp, place.database) as relations, psycopg.connect(place.database) as connection:
        connection.execute("LOCK TABLE relatum.keys IN ACCESS EXCLUSIVE MODE")

        def is_told_apart() -> bool:
            health = relations.health(timeout_s=1.0)
            assert health.database != ""
            return health.broker == ""

        in_a_try(is_told_apart, what="the broker's answer")


def test_opening_shows_what_is_wrong_at_once(place: Place) -> None:
    """Opening lookups raises what is wrong with either server, or with the arguments."""
    with Relations.open(place.amqp, place.database, database_connections_max=2, timeout_s=LONG_S) as relations:
        assert relations.statistics().opened == 1
    with pytest.raises(BrokerUnavailable):
        Relations.open(NOBODY_LISTENS, place.database)
    with pytest.raises(DatabaseUnavailable):
        Relations.open(place.amqp, NO_DATABASE)
    with pytest.raises(InvalidInput, match="database_connections_max"):
        Relations.open(place.amqp, place.database, database_connections_max=0)


LARGE = 300_000
SLOW = 60_000
WAIT_S = 1.0
AT_MOST_S = 1.6
"""What is asked for, a quarter of a second for the last look, and some for a busy machine."""


@pytest.fixture(params=FACES)
def relations(place: Place, request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[Relations]:
    """Lookups by way of the proxy, through each face."""
    address = Broker(place.amqp, stream_url=proxy.url(place.stream_url))
    with open_relations(request.param, address, place.database) as relations:
        yield relations


@pytest.fixture
def message(place: Place, relations: Relations) -> Message:
    """A message without relata, in a stream of large bodies that is recorded."""
    for number in range(3):
        place.put((b"x" * LARGE, {"order_id": str(number)}))
    place.record(keys=["order_id"])
    return relations.read(place.stream, 0)


@pytest.mark.parametrize(
    ("fault", "is_there", "is_recorded"),
    [
        ("slow", False, False),  # the proof would take 15 s
        ("frozen", True, False),  # an unrecorded message is never denied
        ("slow", True, True),  # the index names it, its body does not arrive
    ],
)
def test_what_cannot_be_proven_or_read_in_time_is_no_error_and_no_absence(
    relations: Relations, message: Message, proxy: Proxy, place: Place, fault: str, is_there: bool, is_recorded: bool
) -> None:
    """A wait on a slow line or a silent broker ends in time, unproven, and names what it found and could not read."""
    if is_there:
        place.put((b"x" * LARGE, {"order_id": "0"}))
    if is_recorded:
        place.record(keys=["order_id"])
    if fault == "slow":
        proxy.bytes_per_s = SLOW
    else:
        proxy.mode = "frozen"

    def is_in_time() -> bool:
        began = time.monotonic()
        answer = relations.wait_related(message, timeout_s=WAIT_S)
        took_s = time.monotonic() - began
        assert (answer.status, answer.unread) == (Status.UNPROVEN, ((place.stream, 3),) if is_recorded else ())
        assert fault == "frozen" or answer.streams == (place.stream,)
        assert took_s >= WAIT_S
        return took_s < AT_MOST_S

    try:
        in_a_try(is_in_time, what="an answer in time")
    finally:
        proxy.mode = "pass"


@pytest.mark.parametrize("name", READERS)
def test_readers_keep_the_deadline_of_the_call_around_them(place: Place, name: str) -> None:
    """Each question to a silent broker ends in the time of its caller, and is not taken for a stream's end."""
    place.put(b"0")
    with Proxy.to(place.stream_url) as line:
        address = Broker(place.amqp, stream_url=line.url(place.stream_url))
        with open_face(name, address, timeout_s=LIMIT_S) as face:
            assert face.read(place.stream, 0).body == b"0"
            line.mode = "blackhole_replies"
            for ask in (lambda: face.read(place.stream, 1), lambda: face.iterate(place.stream)):
                with in_time(0.3), within(0.3), pytest.raises((ReadTimeout, BrokerUnavailable)):
                    ask()
            line.mode = "pass"
            with pytest.raises(OffsetNotFound):
                face.read(place.stream, 1)


WAITS = 40

Ask = Callable[[Any, Message], Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that were run on the database."""
    noted: list[str] = []
    rows = Database.rows

    def noting(self: Database, statement: Any, parameters: Any, **options: Any) -> Any:
        noted.append(str(statement))
        return rows(self, statement, parameters, **options)

    monkeypatch.setattr(Database, "rows", noting)
    return noted


def count(asked: list[str], text: str) -> int:
    return sum(text in statement for statement in asked)


@pytest.fixture
def messages(place: Place) -> list[Message]:
    """Recorded messages, each with a value of its own."""
    place.put_recorded(*((b"", {"order_id": str(number)}) for number in range(WAITS)), keys=["order_id"])
    return place.messages()


@contextmanager
def all_at_once(place: Place, ask: Ask, of: list[Message]) -> Iterator[Callable[[], list[Answer]]]:
    """Something asked about each message at once, in threads; inside, the answers are to come."""
    together = threading.Barrier(len(of))
    with Relations(place.amqp, place.database) as relations, ThreadPoolExecutor(len(of)) as threads:

        def run(message: Message) -> Answer:
            together.wait(LONG_S)
            return ask(relations, message)  # type: ignore[no-any-return]

        asking = [threads.submit(run, message) for message in of]
        yield lambda: [future.result(LONG_S) for future in asking]


def test_many_waits_share_their_questions(place: Place, messages: list[Message], asked: list[str]) -> None:
    """Waits share their queries: each runs its own at its beginning and its end alone."""
    together = str(WATCHED)

    def ask(relations: Any, message: Message) -> Any:
        return relations.wait_related(message, timeout_s=LONG_S)

    with all_at_once(place, ask, messages) as answers_of:
        wait_until(lambda: count(asked, together) >= 3, what="waits under way")
        place.put(*((b"", {"order_id": str(number)}) for number in range(WAITS)))
        with recording(place.amqp, place.engine, place.stream, keys=["order_id"]):
            answers = answers_of()
    assert [answer.ids for answer in answers] == [((place.stream, WAITS + number),) for number in range(WAITS)]
    assert count(asked, "LATERAL") - count(asked, together) <= 2 * WAITS


def test_an_absence_is_proven_by_what_began_after_it_was_asked(
    place: Place, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that has already begun is not used for a later lookup: more was published since."""
    began, waits, go_on = threading.Event(), threading.Event(), threading.Event()
    bounds, wait_for = StreamReader.bounds, servers.wait_for

    def waiting(turn: Any, until: float) -> None:
        waits.set()
        wait_for(turn, until)

    def held(reader: StreamReader, stream: str) -> StreamBounds:
        answer = bounds(reader, stream)
        if not began.is_set():
            began.set()
            assert go_on.wait(LONG_S)
        return answer

    monkeypatch.setattr(StreamReader, "bounds", held)
    monkeypatch.setattr(servers, "wait_for", waiting)
    with Relations(place.amqp, place.database) as relations, ThreadPoolExecutor(2) as threads:
        first = threads.submit(relations.related, messages[0])
        assert began.wait(LONG_S)
        place.put((b"", {"order_id": "0"}))
        second = threads.submit(relations.related, messages[1])
        assert waits.wait(LONG_S)
        go_on.set()
        assert first.result(LONG_S).status is Status.ABSENT
        assert second.result(LONG_S).status is Status.NOT_RECORDED_YET


def test_a_message_that_cannot_be_read_does_not_make_a_wait_ask_all_the_time(
    place: Place, messages: list[Message], asked: list[str]
) -> None:
    """A wait for a message of a deleted stream asks with growing pauses, and ends with the status DELETED."""
    place.sql(
        "INSERT INTO relatum.streams (stream_id, vhost, name, record_time) OVERRIDING SYSTEM VALUE "
        "SELECT 999, vhost, 'gone', record_time FROM relatum.streams LIMIT 1"
    )
    row = "SELECT stream_offset, time_us, 999, key_id, value FROM relatum.relationships WHERE stream_offset = 0"
    place.sql(f"INSERT INTO relatum.relationships {row}")

    def ask(relations: Any, message: Message) -> Any:
        return relations.wait_related(message, timeout_s=15.0)

    def is_known() -> bool:
        asked.clear()
        with all_at_once(place, ask, messages[:1]) as answers_of:
            [answer] = answers_of()
        assert count(asked, "LATERAL") < 120
        return answer.status is Status.DELETED  # on a busy machine, the time may be too short for the last look

    in_a_try(is_known, what="the message said to be deleted")
