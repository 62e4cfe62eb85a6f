"""Keys: definitions that conflict, values in bodies and in tables of headers, and the values that a key has."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aio_pika
import pika
import pytest
import sqlalchemy as sa
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

import relatum
from relatum.errors import InvalidInput, InvalidKeyDefinition, KeyDefinitionConflict, KeyNotDefined
from relatum.keys import AGREE_S, KeyDefinition
from relatum.recording import Recorder
from relatum.recording.embedded import PublishersKeys
from relatum.store.catalog import add_keys, check_keys, key_definitions, mask_key, remove_key
from relatum_consumer import Relations
from tests.support import broker_connection, unique_name, wait_until
from tests.support.callbacks import open_channel, running
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

MINE = KeyDefinition("order", source="header:order_id")
TAKEN = KeyDefinition("order", source="property:correlation_id")


@pytest.fixture
def taken(engine: sa.Engine) -> sa.Engine:
    """A database in which the key is already defined, otherwise."""
    add_keys(engine, [TAKEN])
    return engine


def bodies(place: Place) -> list[bytes]:
    return [message.body for message in place.messages()]


def is_refused(publish: Callable[..., object], *arguments: Any) -> bool:
    """Whether a publish ends with the conflict."""
    try:
        publish(*arguments)
    except KeyDefinitionConflict:
        return True
    return False


def defined(engine: sa.Engine) -> dict[str, KeyDefinition]:
    with engine.connect() as connection:
        return {key.name: key for key in key_definitions(connection)}


@pytest.mark.parametrize("recorder", ["embedded", "external"])
def test_intercept_raises_over_a_blocking_connection(
    place: Place, taken: sa.Engine, connection: BlockingConnection, recorder: str
) -> None:
    """A connection with other key definitions stays bare, and is intercepted with the same ones."""
    options: dict[str, Any] = {"database": place.database, "recorder": recorder}
    with pytest.raises(KeyDefinitionConflict, match="'order' is already defined") as caught:
        relatum.intercept(connection, keys=[MINE], **options)
    assert caught.value.key == "order"
    connection.channel().basic_publish("", place.stream, b"plain")
    relatum.intercept(connection, keys=[TAKEN], **options)
    connection.channel().basic_publish("", place.stream, b"stamped")
    relatum.release(connection)
    # Two channels: the broker may take the second's message first.
    wait_until(lambda: sorted(bodies(place)) == [b"plain", b"stamped"], what="both are there")


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
async def test_the_first_publish_raises_through_aio_pika(place: Place, taken: sa.Engine, connect: object) -> None:
    """Through aio-pika the first publishes, with a receipt or without one, are refused before anything is sent."""
    connection = await connect(place.amqp)  # type: ignore[operator]
    async with connection:
        relatum.intercept(connection, database=place.database, keys=[MINE])
        channel = await connection.channel()
        message = aio_pika.Message(b"x")
        publishes = [channel.default_exchange.publish(message, place.stream) for _ in range(5)]
        for ended in await asyncio.gather(*publishes, return_exceptions=True):
            assert isinstance(ended, KeyDefinitionConflict)
            assert "nothing was sent" in str(ended)
        with pytest.raises(KeyDefinitionConflict, match="nothing was sent"):
            await relatum.publish_async(channel, message, place.stream)
        await asyncio.to_thread(relatum.release, connection)
    assert bodies(place) == []


async def test_publishes_through_aio_pika_keep_their_order_while_they_wait(place: Place) -> None:
    """Messages published concurrently right after `intercept` arrive in the order they were published in."""
    async with await aio_pika.connect(place.amqp) as connection:
        relatum.intercept(connection, database=place.database, keys=[MINE])
        channel = await connection.channel()
        messages = [aio_pika.Message(b"%d" % n) for n in range(200)]
        await asyncio.gather(*(channel.default_exchange.publish(each, place.stream) for each in messages))
        await asyncio.to_thread(relatum.release, connection)
    assert bodies(place) == [b"%d" % n for n in range(200)]


def test_a_callback_connection_raises_as_soon_as_it_is_known(place: Place, taken: sa.Engine) -> None:
    """On a callback connection publishes, with a receipt or without one, are refused once the database has answered."""
    with running(place.amqp, database=place.database, keys=[MINE]) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        early = (on_thread, channel.basic_publish, "", place.stream, b"early")
        wait_until(lambda: is_refused(*early), what="the refusal")
        with pytest.raises(KeyDefinitionConflict):
            on_thread(relatum.publish, channel, "", place.stream, b"receipt")
    assert set(bodies(place)) <= {b"early"}


@pytest.mark.parametrize("how", ["refused", "frozen"])
def test_with_the_database_away_publishing_goes_on_until_it_is_known(
    place: Place, taken: sa.Engine, channel: BlockingChannel, how: str
) -> None:
    """Publishing continues without PostgreSQL, is refused once the conflict is known, and continues after it."""
    with Proxy.to(place.database) as proxy:
        proxy.accepts, proxy.mode = how != "refused", "frozen" if how == "frozen" else "pass"
        with in_time(AGREE_S):
            relatum.intercept(channel.connection, database=proxy.url(place.database), keys=[MINE])
        properties = BasicProperties(headers={"order_id": "o1"})
        channel.basic_publish("", place.stream, b"while away", properties)
        proxy.accepts, proxy.mode = True, "pass"
        later = (relatum.publish, channel, "", place.stream, b"later", properties)
        wait_until(lambda: is_refused(*later), what="the refusal")
        before = bodies(place)
        with pytest.raises(KeyDefinitionConflict, match="nothing was sent"):
            channel.basic_publish("", place.stream, b"refused", properties)
        assert bodies(place) == before
        assert place.recorded_to() == 0
        remove_key(taken, "order")
        after = (channel.basic_publish, "", place.stream, b"after", properties)
        wait_until(lambda: not is_refused(*after), what="publishing goes on")
        wait_until(lambda: place.recorded_to() > len(before), what="it is recorded")
        relatum.release(channel.connection)


def test_a_publisher_that_is_never_to_be_stopped_is_not(
    place: Place, taken: sa.Engine, channel: BlockingChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_invalid="skip"` a conflict is logged, messages are published, and only receipts are refused."""
    relatum.intercept(channel.connection, database=place.database, keys=[MINE], on_invalid="skip")
    wait_until(lambda: "define the keys differently" in caplog.text, what="the line")
    channel.basic_publish("", place.stream, b"published")
    with pytest.raises(KeyDefinitionConflict, match="nothing was sent"):
        relatum.publish(channel, "", place.stream, b"receipt")
    relatum.release(channel.connection)
    assert bodies(place) == [b"published"]
    assert place.recorded_to() == 0


def test_of_two_that_define_it_at_the_same_moment_one_is_refused(amqp_url: str, engine: sa.Engine) -> None:
    """Of two publishers that define one key at once, one is refused, and the other's definition is stored whole."""
    wanted = [KeyDefinition("order", source=f"header:{name}") for name in ("one", "other")]
    at_once = threading.Barrier(2)

    def refusal(definition: KeyDefinition) -> KeyDefinitionConflict | None:
        with broker_connection(amqp_url) as connection:
            at_once.wait(90)
            try:
                relatum.intercept(connection, database=engine.url, keys=[definition, unique_name()])
            except KeyDefinitionConflict as error:
                return error
            relatum.release(connection)
        return None

    with ThreadPoolExecutor(2) as pool:
        refusals = list(pool.map(refusal, wanted))
    (first,) = [wanted[n] for n, each in enumerate(refusals) if each is None]
    assert [each.key for each in refusals if each is not None] == ["order"]
    assert len(defined(engine)) == 2
    assert defined(engine)["order"].sources == first.sources


def test_a_key_that_others_define_anew_is_noticed(engine: sa.Engine) -> None:
    """A key removed while a publisher runs stays removed, and one defined otherwise is a conflict until removed."""
    keys = PublishersKeys(engine, [MINE], defines=True)
    keys.look()
    for _ in range(2):
        remove_key(engine, "order")
        keys.look()
        keys.agreement.check()
        assert not defined(engine)
        add_keys(engine, [KeyDefinition("order", type="integer")])
        keys.look()
        with pytest.raises(KeyDefinitionConflict):
            keys.agreement.check()


def test_a_recorder_with_other_definitions_ends(place: Place, taken: sa.Engine) -> None:
    """A recorder with other definitions raises before it records anything."""
    with pytest.raises(KeyDefinitionConflict):
        Recorder(place.amqp, taken.url, [place.stream], keys=[MINE]).run(threading.Event())
    assert place.sql("SELECT FROM relatum.streams") == []


def names_of(engine: sa.Engine) -> dict[str, str | None]:
    return {name: key.names for name, key in defined(engine).items()}


def test_a_key_may_name_another_that_is_defined_with_it_or_before(engine: sa.Engine) -> None:
    """A key may name one that is defined now or later, but no second one, nor an unknown or unlike one."""
    add_keys(engine, [KeyDefinition("cause", names="id"), "id", "reply", "other"])
    assert names_of(engine) == {"cause": "id", "id": None, "reply": None, "other": None}
    (told,) = add_keys(engine, [KeyDefinition("reply", names="id")])
    assert told.names == "id"
    # A publisher that does not set it, like the previous release, agrees.
    assert [key.names for key in add_keys(engine, ["cause", "reply"])] == ["id", "id"]
    check_keys(engine, ["cause", "id"])
    check_keys(engine, [KeyDefinition("cause", names="id")])
    for ask in (add_keys, check_keys):
        with pytest.raises(KeyDefinitionConflict, match="names='id'"):
            ask(engine, [KeyDefinition("cause", names="other")])
    remove_key(engine, "id")
    assert names_of(engine) == {"cause": "id", "reply": "id", "other": None}
    add_keys(engine, ["id"])
    add_keys(engine, [KeyDefinition("cause", names="id")])
    assert names_of(engine)["cause"] == "id"
    add_keys(engine, [KeyDefinition("number", type="integer"), KeyDefinition("pair", source=("a", "b"))])
    for named, what in {"idd": "is not a key", "number": "the same type", "pair": "number of components"}.items():
        with pytest.raises(InvalidKeyDefinition, match=what):
            add_keys(engine, [KeyDefinition("effect", names=named)])
    assert set(names_of(engine)) == {"cause", "id", "reply", "other", "number", "pair"}


def test_a_key_is_masked_by_who_says_so_and_shown_again_by_name_alone(engine: sa.Engine) -> None:
    """A mask stays when a definition leaves it out, and it must be taken off before the key can be removed."""

    def masked() -> list[str]:
        return [name for name, key in defined(engine).items() if key.masked]

    add_keys(engine, [KeyDefinition("card", masked=True), "order"])
    assert masked() == ["card"]
    add_keys(engine, ["card", KeyDefinition("order", masked=True)])
    check_keys(engine, ["card", "order"])
    assert masked() == ["card", "order"]
    with pytest.raises(KeyDefinitionConflict, match="relatum keys mask card --off"):
        remove_key(engine, "card")
    mask_key(engine, "card", on=False)
    remove_key(engine, "card")
    assert masked() == ["order"]
    with pytest.raises(KeyNotDefined):
        mask_key(engine, "card", on=True)
    with pytest.raises(InvalidKeyDefinition, match="masked="):
        KeyDefinition("card", masked="no")  # type: ignore[arg-type]


PLACES = [
    KeyDefinition("order", source="body:$.order.id or header:order_id"),
    KeyDefinition("sku", source="body:$.items[*].sku"),
    KeyDefinition("cause", source="body:$.cause", names="order"),
    KeyDefinition("both", source=("body:$.order.id", "property:correlation_id")),
    KeyDefinition("deep", source="header:$.x-table.a[1]"),
]


def json_message(body: Any, **properties: Any) -> tuple[bytes, Any]:
    return json.dumps(body).encode(), pika.BasicProperties(content_type="application/json", **properties)


MESSAGES = [
    json_message({"order": {"id": "o1"}, "items": [{"sku": "a"}, {"sku": "b"}]}, correlation_id="c"),
    json_message({"order": {"id": 2}, "items": [{"sku": "b"}, {"sku": "c"}, {"sku": 1.5}], "cause": "o1"}),
    (b"no JSON", pika.BasicProperties(headers={"order_id": "o1", "x-table": {"a": ["p", "q"]}})),
    json_message({"order": {}, "items": [{"sku": "a"}]}),
    (b'{"order": {"id": broken', pika.BasicProperties(content_type="application/json")),
    (b"\x00\xff", pika.BasicProperties()),
]
ROWS = {
    ("order", "o1", 0),
    ("order", "2", 1),
    ("order", "o1", 2),
    ("both", "o1|c", 0),
    ("sku", "a", 0),
    ("sku", "b", 0),
    ("sku", "b", 1),
    ("sku", "c", 1),
    ("sku", "a", 3),
    ("cause", "o1", 1),
}


def expected(broker_version: tuple[int, ...]) -> set[tuple[str, str, int]]:
    """The rows there must be: RabbitMQ drops tables in headers up to 3.12, and keeps those named `x-…` later."""
    return ROWS | ({("deep", "q", 2)} if broker_version >= (3, 13) else set())


def test_rows_are_those_of_what_lies_at_the_path(place: Place, broker_version: tuple[int, ...]) -> None:
    """A recorder makes a row of each value at a key's path, and count what cannot be a value."""
    place.put_recorded(*MESSAGES, keys=PLACES)
    assert sorted(place.rows()) == sorted(expected(broker_version))
    assert place.status().skipped == {"sku": {"float": 1}, "order": {"not_json": 1}, "both": {"not_json": 1}}
    assert place.verify().ok
    with place.engine.connect() as connection:
        stored = [(key.name, key.sources) for key in key_definitions(connection)]
    assert stored == [(key.name, key.sources) for key in PLACES]


def test_a_back_fill_reads_bodies_too(place: Place, broker_version: tuple[int, ...]) -> None:
    """A back-fill makes the rows of keys from bodies that were defined after the messages were recorded."""
    place.put_recorded(*MESSAGES, keys=["order_id"])
    add_keys(place.engine, PLACES)
    place.backfill()
    assert set(place.rows()) - {("order_id", "o1", 2)} == expected(broker_version)


def test_answers_follow_each_value(place: Place, relations: Relations) -> None:
    """A message is found by each value of a key, from its row or, in a complete answer, from its unrecorded body."""
    place.put_recorded(*MESSAGES[:1], keys=PLACES)
    place.put(*MESSAGES[1:])
    assert [each.offset for each in relations.find("sku", "b").messages] == [0]
    assert [each.offset for each in relations.find("sku", "b", complete=True).messages] == [0, 1]
    place.record(keys=PLACES)
    assert [each.offset for each in relations.find("sku", "b").messages] == [0, 1]
    assert [each.offset for each in relations.find("order", 2).messages] == [1]
    first, second = relations.read(place.stream, 0), relations.read(place.stream, 1)
    answer = relations.related(first, by="sku")
    assert [each.offset for each in answer.messages] == [1, 3]
    assert [hit.keys for hit in answer.hits] == [("sku",), ("sku",)]
    found = relations.related(second, by="cause", complete=True)
    assert found.status == "absent"
    trace = relations.trace(second, by=["cause", "order"])
    assert {each.offset for each in trace.messages} == {0, 1, 2}
    assert [(edge.cause and edge.cause.offset, edge.effect.offset) for edge in trace.edges] == [(0, 1), (2, 1)]
    assert relations.find("sku", "z", complete=True).status == "absent"
    with pytest.raises(InvalidInput, match="2 values of the key 'sku'"):
        relations.after(first, place.stream, by="sku")


def test_a_publisher_records_what_its_bodies_say(place: Place, relations: Relations, channel: BlockingChannel) -> None:
    """A publisher sends bodies as they are and records their values, but no row for a value that is not a key."""
    relatum.intercept(channel.connection, database=place.database, keys=PLACES[:2])
    body, properties = MESSAGES[0]
    receipt = relatum.publish(channel, "", place.stream, body, properties)
    assert receipt.wait(60)[0].offset == 0
    channel.basic_publish("", place.stream, b'{"order": {"id": 1.5}}')
    relatum.release(channel.connection)
    assert set(place.rows()) == {("order", "o1", 0), ("sku", "a", 0), ("sku", "b", 0)}
    assert relations.read(place.stream, 0).body == body
    assert relations.read(place.stream, 0).headers.keys() <= {"relatum_receipt", "relatum_time"}


VALUES = [KeyDefinition("order_id"), KeyDefinition("number", type="integer"), KeyDefinition("at", source=("a", "b"))]
ORDERS = ["a", "a", "ab", "ab%", "ab_", "abc", "aé", "a\U0001f600", "b", "東", "ab", "B"]


def test_values_begin_with_the_prefix(place: Place, relations: Relations, other_stream: str) -> None:
    """Each once, in order of bytes; no pattern; none of other virtual hosts or of streams that were replaced."""
    for name in (place.stream, other_stream):
        place.put(*[(b"", {"order_id": each, "number": n}) for n, each in enumerate(ORDERS)], to=name)
    place.record(place.stream, other_stream, keys=VALUES)
    whole = sorted(set(ORDERS), key=str.encode)
    for prefix in ("", "a", "ab", "ab%", "ab_", "b", "東", "a\U0001f600", "c", "abcd", "'", "A", "B"):
        expected = tuple(each for each in whole if each.startswith(prefix))
        assert relations.values("order_id", prefix) == expected, prefix
        for limit in (1, 2, 1_000):
            assert relations.values("order_id", prefix, limit=limit) == expected[:limit]
    assert relations.values("number", "1") == ("1", "10", "11")
    # A key that does not exist, or has several parts.
    for key, error in (("nope", KeyNotDefined), ("at", InvalidInput)):
        with pytest.raises(error):
            relations.values(key)
    place.sql("UPDATE relatum.streams SET vhost = 'other' WHERE name = :name", name=place.stream)
    assert relations.values("order_id") == tuple(whole)
    place.sql("UPDATE relatum.streams SET replaced_at = now() WHERE name = :name", name=other_stream)
    assert relations.values("order_id") == ()
