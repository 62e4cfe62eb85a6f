"""Who waits, and who needs a proof, at the same time: the index and the streams are asked once for all of them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.reading import Message
from relatum.store import Database
from relatum_consumer import Answer, AsyncRelations, Relations, Status
from relatum_consumer.lookups._waiting import watched
from tests.support import publish_plain, record, recording, wait_until
from tests.support.relations import FACES

WAITS = 40
LONG_S = 80.0

Ask = Callable[[Any, Message], Any]


class Asked:
    """The statements that were run."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def of(self, text: str) -> int:
        """How many of them have a word."""
        return sum(text in statement for statement in self.statements)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Notes what is asked of the database from now on."""
    noted, asked = Asked(), Database.asked

    def noting(self: Database, statement: Any, parameters: Any) -> Any:
        noted.statements.append(str(statement))
        return asked(self, statement, parameters)

    monkeypatch.setattr(Database, "asked", noting)
    return noted


@pytest.fixture
def messages(amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str) -> list[Message]:
    """Recorded messages, each with a value of its own."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": str(number)}) for number in range(WAITS)])
    record(amqp_url, engine, stream_name, keys=["order_id"])
    with Relations(amqp_url, database_url) as relations:
        return [relations.read(stream_name, number) for number in range(WAITS)]


@contextmanager
def all_at_once(face: str, amqp_url: str, database_url: str, ask: Ask, of: list[Message]) -> Iterator[Any]:
    """Something asked about each message at once; inside, the answers are to come."""
    with ThreadPoolExecutor(len(of)) as threads:
        if face == "blocking":
            with Relations(amqp_url, database_url) as relations:
                together = threading.Barrier(len(of))

                def run(message: Message) -> Answer:
                    together.wait(LONG_S)
                    return ask(relations, message)  # type: ignore[no-any-return]

                yield [threads.submit(run, message) for message in of]
            return

        async def run_all() -> list[Answer]:
            async with AsyncRelations(amqp_url, database_url) as relations:
                return await asyncio.gather(*(ask(relations, message) for message in of))

        whole = threads.submit(asyncio.run, run_all())
        yield [whole]


def answers_of(futures: Any) -> list[Answer]:
    """The answers, once they are there."""
    results = [future.result(LONG_S) for future in futures]
    return results[0] if isinstance(results[0], list) else results


@pytest.mark.parametrize("face", FACES)
def test_many_waits_share_their_questions(
    face: str,
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
    stream_name: str,
    messages: list[Message],
    asked: Asked,
) -> None:
    """Each asks by itself as it begins and once it was told that there is something, and one asks for all meanwhile."""
    together = watched()

    def ask(relations: Any, message: Message) -> Any:
        return relations.wait_related(message, timeout_s=LONG_S)

    with all_at_once(face, amqp_url, database_url, ask, messages) as futures:
        wait_until(lambda: asked.of(together) >= 3, what="waits under way")
        publish_plain(amqp_url, stream_name, [(b"", {"order_id": str(number)}) for number in range(WAITS)])
        with recording(amqp_url, engine, stream_name, keys=["order_id"]):
            answers = answers_of(futures)
    assert [answer.ids for answer in answers] == [((stream_name, WAITS + number),) for number in range(WAITS)]
    assert asked.of("LATERAL") - asked.of(together) <= 2 * WAITS


def test_an_absence_is_proven_by_what_began_after_it_was_asked(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, messages: list[Message]
) -> None:
    """Who asks while another's proof is under way does not take that one's word: more was published meanwhile."""
    began, go_on = threading.Event(), threading.Event()
    with Relations(amqp_url, database_url) as relations, ThreadPoolExecutor(2) as threads:

        def held(request: Any) -> Any:
            answer = Relations._carry_out(relations, request)
            if type(request).__name__ == "Bounds" and not began.is_set():
                began.set()
                assert go_on.wait(LONG_S)
            return answer

        relations._carry_out = held  # type: ignore[method-assign]
        first = threads.submit(relations.related, messages[0])
        assert began.wait(LONG_S)
        publish_plain(amqp_url, stream_name, [(b"", {"order_id": "0"})])
        second = threads.submit(relations.related, messages[1])
        wait_until(lambda: relations._together._next, what="the second one who asks")
        go_on.set()
        assert first.result(LONG_S).status is Status.ABSENT
        assert second.result(LONG_S).status is Status.NOT_RECORDED_YET


@pytest.mark.parametrize("face", FACES)
def test_a_message_that_cannot_be_read_does_not_make_a_wait_ask_all_the_time(
    face: str, amqp_url: str, database_url: str, engine: sa.Engine, messages: list[Message], asked: Asked
) -> None:
    """The index names a message of a stream that is gone: the pauses grow, and the wait ends with what is known."""
    with engine.begin() as connection:
        row = "SELECT stream_offset, time_us, 999, key_id, value FROM relatum.relationships WHERE stream_offset = 0"
        connection.execute(
            sa.text(
                "INSERT INTO relatum.streams (stream_id, vhost, name, record_time) OVERRIDING SYSTEM VALUE "
                "SELECT 999, vhost, 'gone', record_time FROM relatum.streams LIMIT 1"
            )
        )
        connection.execute(sa.text(f"INSERT INTO relatum.relationships {row}"))
    with all_at_once(
        face,
        amqp_url,
        database_url,
        lambda relations, message: relations.wait_related(message, timeout_s=15.0),
        messages[:1],
    ) as futures:
        [answer] = answers_of(futures)
    assert answer.status is Status.DELETED
    assert asked.of("LATERAL") < 120
