"""Every way to configure a TLS login to a broker, through every component that connects to one."""

import asyncio
import contextlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

import aio_pika
import kombu
import pika
import pytest
from celery import Celery
from pika.credentials import ExternalCredentials
from pyspark.sql.types import StructType
from typer.testing import CliRunner

import relatum
from pyspark_relatum import DefaultSource
from relatum import Broker
from relatum.collecting import AsyncMessageCollector, ExecutorOptions, MessageCollector
from relatum.contexts import AsyncSerialConsumer
from relatum.errors import AccessRefused, BrokerUnavailable, RelatumError, TlsRefused
from relatum.reading import AsyncStreamReader, StreamReader
from relatum.recording import Recorder
from relatum.store.database import as_engine
from relatum.superstreams import declare_super_stream, describe_super_stream
from relatum_cli.app import app
from relatum_consumer import AsyncRelations, Relations
from tests.support import declare_stream, publish_plain, record, unique_name, wait_until
from tests.support.databases import Databases
from tests.support.tls import KEY_PASSWORD, TlsBroker

STREAM, SUPER, LARGE = "tls-stream", "tls-super", "tls-large"
WAIT_S = 30.0
BY_STREAMS_SINCE = (3, 12, 1)
"""The first RabbitMQ that takes EXTERNAL over the stream protocol."""


@dataclass(frozen=True)
class World:
    """A broker with TLS, and a database in which its stream is recorded."""

    tls: TlsBroker
    database: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, _databases: Databases) -> Iterator[World]:
    database = _databases.take()
    with TlsBroker(tmp_path_factory.mktemp("tls")) as tls:
        plain = tls.server.broker_url
        declare_super_stream(plain, SUPER, 1)
        for stream in (STREAM, LARGE):
            declare_stream(plain, stream)
        publish_plain(plain, STREAM, [(b"first", {"order_id": "o-1"})])
        publish_plain(plain, LARGE, [b"x" * 100_000] * 20)
        publish_plain(plain, f"{SUPER}-0", [b"of the super stream"])
        with as_engine(database) as engine:
            record(plain, engine, STREAM, keys=["order_id"])
        yield World(tls, database)
    _databases.give_back(database)


@dataclass(frozen=True)
class Way:
    """One way to log in, by a URL for `TlsBroker.url` and options in code, and the error that it raises, if any."""

    url: str
    context: str | None = None
    """The client's certificate in a context given in code; "" for a context without one."""
    options: dict[str, Any] = field(default_factory=dict)
    raises: type[RelatumError] | tuple[type[RelatumError], ...] | None = None
    says: str = ""
    system_trust: bool = False
    """Whether SSL_CERT_FILE names the authority."""

    def prepare(self, tls: TlsBroker, patch: pytest.MonkeyPatch) -> str | Broker:
        if self.system_trust:
            patch.setenv("SSL_CERT_FILE", str(tls.file("authority.pem")))
        context = {} if self.context is None else {"ssl_context": tls.context(self.context or None)}
        options, url = context | self.options, tls.url(self.url)
        return Broker(url, **options) if options else url


BY_HANGING_UP = {"raises": (TlsRefused, BrokerUnavailable), "says": "client cert|Cannot connect|failed|was lost"}
"""With TLS 1.3 the broker's refusal of a client's certificate may be lost on its way; its log has it."""

WAYS: dict[str, Way] = {
    "plain": Way("amqp://{login}{plain}"),
    "system": Way("amqps://{login}{secure}", system_trust=True),
    "ca-url": Way("amqps://{login}{secure}?{ca}"),
    "ca-url-of-streams": Way("rabbitmq-stream+tls://{login}{secure_streams}?{ca}"),
    "ca-context": Way("amqps://{login}{secure}", ""),
    "client-url": Way("amqps://{login}{secure}?{ca}&{relatum}"),
    "client-locked-url": Way("amqps://{login}{secure}?{ca}&{client_locked}"),
    "client-context": Way("amqps://{login}{secure}", "relatum"),
    "external-url": Way("amqps://{secure}?{ca}&{relatum}&auth_mechanism=external"),
    "external-context": Way("amqps://{secure}", "relatum", {"auth_mechanism": "EXTERNAL"}),
    "unverified": Way("amqps://{login}{elsewhere}?verify=verify_none"),
    "other-name": Way("amqps://{login}{elsewhere}?{ca}&server_name_indication=broker.example"),
    "asked-for-client": Way("amqps://{login}{asking}?{ca}&{relatum}"),
    "wrong-ca": Way(
        "amqps://{login}{secure}?{strange_ca}", raises=TlsRefused, says="is not trusted.*certificate authority"
    ),
    "no-ca": Way("amqps://{login}{secure}", raises=TlsRefused, says="is not trusted.*cacertfile"),
    "no-ca-of-streams": Way("rabbitmq-stream+tls://{login}{secure_streams}", raises=TlsRefused, says="is not trusted"),
    "wrong-host": Way("amqps://{login}{elsewhere}?{ca}", raises=TlsRefused, says="not valid for 'localhost'"),
    "wrong-host-of-streams": Way(
        "rabbitmq-stream+tls://{login}{elsewhere_streams}?{ca}", raises=TlsRefused, says="not valid for 'localhost'"
    ),
    "expired": Way("amqps://{login}{expired}?{ca}", raises=TlsRefused, says="has expired"),
    "missing-client": Way("amqps://{login}{asking}?{ca}", **BY_HANGING_UP),
    "strange-client": Way("amqps://{login}{secure}?{ca}&{client_strange}", **BY_HANGING_UP),
    "expired-client": Way("amqps://{login}{secure}?{ca}&{client_expired}", **BY_HANGING_UP),
    "external-unknown": Way(
        "amqps://{secure}?{ca}&{client_locked}&auth_mechanism=external",
        raises=AccessRefused,
        says="client certificate's user",
    ),
    "tls-at-plain-port": Way("amqps://{login}{plain}?{ca}", raises=TlsRefused, says="does not speak TLS"),
    "tls-at-plain-port-of-streams": Way(
        "rabbitmq-stream+tls://{login}{plain_streams}?{ca}", raises=(TlsRefused, BrokerUnavailable)
    ),
    "plain-at-tls-port": Way("amqp://{login}{secure}", raises=BrokerUnavailable, says="by AMQP 0.9.1"),
}


def _reader(_world: World, broker: Any) -> None:
    with StreamReader.open(broker) as reader:
        assert reader.read(STREAM, 0).body == b"first"
        assert sum(len(each.body or b"") for each in reader.iterate(LARGE)) == 2_000_000


async def _async_reader(_world: World, broker: Any) -> None:
    async with await AsyncStreamReader.open(broker) as reader:
        assert (await reader.read(STREAM, 0)).body == b"first"
        assert sum([len(each.body or b"") async for each in reader.iterate(LARGE)]) == 2_000_000


async def _relations(world: World, broker: Any) -> None:
    async with AsyncRelations(broker, world.database) as relations:
        assert [message.body for message in (await relations.find("order_id", "o-1")).messages] == [b"first"]


def _recorder(world: World, broker: Any) -> None:
    stop, recorder = threading.Event(), Recorder(broker, world.database, [STREAM])
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(recorder.run, stop)
        try:
            wait_until(lambda: running.done() or recorder.statistics().streams[STREAM].is_recording, WAIT_S)
        finally:
            stop.set()
    running.result()


def _collecting(world: World, broker: Any) -> dict[str, Any]:
    return {
        "name": unique_name("tls"),
        "database": world.database,
        "broker": broker,
        "streams": [STREAM],
        "type_of": lambda _: "any",
    }


def _collector(world: World, broker: Any) -> None:
    seen, collector = threading.Event(), MessageCollector(**_collecting(world, broker))
    collector.register_executor("any", lambda _bulk: seen.set(), ExecutorOptions(bulk_messages=1))
    with collector:
        assert seen.wait(WAIT_S)


async def _async_collector(world: World, broker: Any) -> None:
    seen, collector = asyncio.Event(), AsyncMessageCollector(**_collecting(world, broker))

    async def execute(_bulk: object) -> None:
        seen.set()

    collector.register_executor("any", execute, ExecutorOptions(bulk_messages=1))
    async with collector:
        await asyncio.wait_for(seen.wait(), WAIT_S)


async def _serial(world: World, broker: Any) -> None:
    consumer = AsyncSerialConsumer(SUPER, unique_name("tls"), database=world.database, broker=broker)
    async with consumer, contextlib.aclosing(consumer.messages(WAIT_S)) as messages:  # type: ignore[type-var]
        assert (await anext(aiter(messages))).body == b"of the super stream"


def _super_streams(_world: World, broker: Any) -> None:
    assert len(describe_super_stream(broker, SUPER)) == 1


def _spark_source(_world: World, broker: Any) -> None:
    source = DefaultSource({"broker": broker, "stream": STREAM})
    reader = source.reader(source.schema())
    rows: Any = reader.read(reader.partitions()[0])
    assert next(rows)["value"][0].as_py() == b"first"


def _spark_sink(_world: World, broker: Any) -> None:
    DefaultSource({"broker": broker, "stream": STREAM}).writer(StructType().add("value", "binary"), False)


def _command(_world: World, broker: Any) -> None:
    ended = CliRunner().invoke(app, ["read", STREAM, "0", "--broker", broker])
    if ended.exit_code:
        # The class, and the words that a terminal shows.
        kind = AccessRefused if "client certificate's user" in ended.output else TlsRefused
        raise kind(" ".join(ended.output.split()))


COMPONENTS: dict[str, Callable[[World, Any], Any]] = {
    "reader": _reader,
    "async-reader": _async_reader,
    "relations": _relations,
    "recorder": _recorder,
    "collector": _collector,
    "async-collector": _async_collector,
    "serial": _serial,
    "super-streams": _super_streams,
    "spark-source": _spark_source,
    "spark-sink": _spark_sink,
    "command": _command,
}
BY_URL_ALONE = {"spark-source", "spark-sink", "command"}
READERS = ("reader", "async-reader")
"""They log in in each of the ways; all others only have to hand on what they are given. Twins that are made: once."""

HANDED_ON = ("ca-context", "wrong-ca", "external-context")
"""What works and what logs in by certificate, by options in code; and what is refused, by URL."""


def _cases() -> Iterator[Any]:
    for component in COMPONENTS:
        handed_on = [name.replace("context", "url") if component in BY_URL_ALONE else name for name in HANDED_ON]
        for name in WAYS if component in READERS else handed_on:
            yield pytest.param(component, name, id=f"{component}-{name}")


def _needs_external(broker_version: tuple[int, ...]) -> None:
    if broker_version < BY_STREAMS_SINCE:
        pytest.skip("this RabbitMQ cannot take EXTERNAL over the stream protocol")


@pytest.mark.parametrize(("component", "name"), list(_cases()))
def test_a_way_to_log_in(
    world: World, component: str, name: str, broker_version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each component logs in in each way, or raises one error that names the cause and no password."""
    way = WAYS[name]
    if name.startswith("external") and component != "super-streams":
        _needs_external(broker_version)
    broker = way.prepare(world.tls, monkeypatch)
    with contextlib.nullcontext() if way.raises is None else pytest.raises(way.raises) as caught:
        asked = COMPONENTS[component](world, broker)
        if isawaitable(asked):
            asyncio.run(asked)  # type: ignore[arg-type]
    if caught is not None:
        assert re.search(way.says, str(caught.value)), str(caught.value)
        assert KEY_PASSWORD not in str(caught.value)


def _by_pika(tls: TlsBroker, way: str, value: str, options: dict[str, Any]) -> None:
    port = tls.elsewhere if way == "other-name" else tls.secure
    parameters = pika.ConnectionParameters(
        "localhost",
        port.amqp,
        credentials=ExternalCredentials() if way == "external" else pika.PlainCredentials(*tls.credentials.split(":")),
        ssl_options=pika.SSLOptions(
            tls.context("relatum" if way == "external" else None),
            "broker.example" if way == "other-name" else "localhost",
        ),
    )
    with contextlib.closing(pika.BlockingConnection(parameters)) as connection:
        relatum.intercept(connection, **options)
        properties = pika.BasicProperties(headers={"order_id": value})
        receipt = relatum.publish(connection.channel(), "", STREAM, b"by pika", properties)
        assert [place.stream for place in receipt.wait(WAIT_S)] == [STREAM]
        assert receipt.settle(WAIT_S) == receipt.wait(WAIT_S)
        relatum.release(connection)


async def _by_aio_pika(tls: TlsBroker, way: str, value: str, options: dict[str, Any]) -> None:
    is_external, in_url = way.startswith("external"), way.endswith("url")
    login, auth = ("", "auth=external&") if is_external else ("{login}", "")
    url = tls.url(f"amqps://{login}{{secure}}?{auth}" + "cafile={ca_file}&{relatum}" * in_url)
    context = None if in_url else tls.context("relatum" if is_external else None)
    async with await aio_pika.connect(url, ssl_context=context) as connection:
        relatum.intercept(connection, **options)
        channel, message = await connection.channel(), aio_pika.Message(b"by aio-pika", headers={"order_id": value})
        receipt = await relatum.publish_async(channel.default_exchange, message, STREAM)
        assert [place.stream for place in await receipt.wait(WAIT_S)] == [STREAM]
        await asyncio.to_thread(relatum.release, connection)


def _by_celery(tls: TlsBroker, way: str, value: str, options: dict[str, Any]) -> None:
    port = tls.elsewhere if way == "other-name" else tls.secure
    secure: dict[str, Any] = {"ca_certs": str(tls.file("authority.pem")), "cert_reqs": ssl.CERT_REQUIRED}
    secure["server_hostname"] = "broker.example" if way == "other-name" else "localhost"
    if way in ("client", "external"):
        secure |= {"certfile": str(tls.file("relatum.pem")), "keyfile": str(tls.file("relatum.key"))}
    user, password = tls.credentials.split(":")
    login = {"login_method": "EXTERNAL"} if way == "external" else {"userid": user, "password": password}
    with kombu.Connection("localhost", port=port.amqp, ssl=secure, **login) as connection:
        app = relatum.intercept(Celery(set_as_current=False), **options)
        with app.producer_or_acquire(kombu.Producer(connection)) as producer:
            producer.publish("by Celery", routing_key=STREAM, headers={"order_id": value})
        _wait_found(tls, value, options["database"])
        relatum.release(app)


def _wait_found(tls: TlsBroker, value: str, database: str) -> None:
    with Relations(tls.server.broker_url, database) as relations:
        wait_until(lambda: relations.find("order_id", value).messages, WAIT_S)


CLIENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    _by_pika: ("ca", "external", "other-name"),
    _by_aio_pika: ("ca", "external", "ca-url", "external-url"),
    _by_celery: ("ca", "client", "external", "other-name"),
}
"""The ways of each."""


@pytest.mark.parametrize(("client", "way"), [(client, way) for client, ways in CLIENTS.items() for way in ways])
def test_what_a_client_publishes_is_recorded(
    world: World, client: Callable[..., Any], way: str, broker_version: tuple[int, ...]
) -> None:
    """The embedded recorder logs in with the TLS options of the client's own connection."""
    if way.startswith("external"):
        _needs_external(broker_version)
    value = f"{client.__name__} {way}"
    published = client(world.tls, way, value, {"database": world.database, "keys": ["order_id"]})
    if isawaitable(published):
        asyncio.run(published)  # type: ignore[arg-type]
    _wait_found(world.tls, value, world.database)
