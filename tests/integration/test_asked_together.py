"""Concurrent waits and proofs: the index and the streams are asked once for all of them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from relatum.reading import Message, StreamBounds, StreamReader
from relatum.store.database import Database
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.lookups import servers
from relatum_consumer.lookups.waiting import WATCHED
from tests.support import in_a_try, recording, wait_until
from tests.support.place import Place

WAITS = 40
LONG_S = 80.0

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
