"""Every way to tell how to log in to a broker with TLS, through every component that connects to one.

One RabbitMQ with TLS, one database, one stream with a message that is recorded: each case only connects and asks.
"""

import asyncio
import contextlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aio_pika
import kombu
import pika
import psycopg
import pytest
from celery import Celery
from pika.credentials import ExternalCredentials
from psycopg import sql
from typer.testing import CliRunner

import relatum
from relatum.collecting import AsyncMessageCollector, ExecutorOptions, MessageCollector
from relatum.command import complete_app
from relatum.contexts import AsyncSerialConsumer, SerialConsumer
from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, RelatumError, TlsRefused
from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from relatum.recording import Recorder
from relatum.store import make_engine
from relatum.superstreams import declare_super_stream, describe_super_stream
from relatum_consumer import AsyncRelations, Relations
from relatum_spark import Broker as SparkBroker
from relatum_spark.sink._publisher import connect
from tests.support import declare_stream, publish_plain, record, unique_name, wait_until
from tests.support.tls import KEY_PASSWORD, TlsBroker

STREAM, SUPER = "tls-stream", "tls-super"
WAIT_S = 30.0
BY_STREAMS_SINCE = (3, 12, 1)
"""The first RabbitMQ that takes EXTERNAL by the stream protocol."""


@dataclass(frozen=True)
class World:
    """The broker, and a database in which its stream is recorded."""

    tls: TlsBroker
    database: str


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory, database_server_url: str, _migrated_template: str
) -> Iterator[World]:
    """All cases share it."""
    name = unique_name("relatum_tls").replace("-", "_")

    def administer(statement: str, *names: str) -> None:
        with psycopg.connect(database_server_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    administer("CREATE DATABASE {} TEMPLATE {}", name, _migrated_template)
    database = database_server_url.rpartition("/")[0] + f"/{name}"
    with TlsBroker(tmp_path_factory.mktemp("tls")) as tls:
        plain = tls.server.broker_url
        declare_stream(plain, STREAM)
        declare_super_stream(plain, SUPER, 1)
        publish_plain(plain, STREAM, [(b"first", {"order_id": "o-1"})])
        publish_plain(plain, f"{SUPER}-0", [b"of the super stream"])
        engine = make_engine(database)
        record(plain, engine, STREAM, keys=["order_id"])
        engine.dispose()
        yield World(tls, database)
    administer("DROP DATABASE {} WITH (FORCE)", name)


@dataclass(frozen=True)
class Way:
    """One way to tell how to log in.

    Attributes:
        url: The broker's URL.
        options: What is given in code beside it.
        raises: The error, and what it must say; None where it works.
        system_trust: Whether SSL_CERT_FILE names the authority.
    """

    url: Callable[[TlsBroker], str]
    options: Callable[[TlsBroker], dict[str, Any]] = field(default=lambda _tls: {})
    raises: tuple[type[RelatumError] | tuple[type[RelatumError], ...], str] | None = None
    system_trust: bool = False
    is_external: bool = False

    def prepare(self, tls: TlsBroker, patch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
        """The URL and the options."""
        if self.system_trust:
            patch.setenv("SSL_CERT_FILE", str(tls.file("authority.pem")))
        return self.url(tls), self.options(tls)


def _ca(tls: TlsBroker, name: str = "cacertfile") -> str:
    return f"{name}={tls.file('authority.pem')}"


def _client(tls: TlsBroker, name: str) -> str:
    return f"certfile={tls.file(f'{name}.pem')}&keyfile={tls.file(f'{name}.key')}"


def _secure(*parts: Callable[[TlsBroker], str], login: bool = True) -> Callable[[TlsBroker], str]:
    return lambda tls: tls.amqp_url(tls.secure, "&".join(part(tls) for part in parts), login=login)


def _with(name: str) -> Callable[[TlsBroker], str]:
    return lambda tls: _client(tls, name)


BY_HANGING_UP = TlsRefused, BrokerUnavailable
"""With TLS 1.3 the broker's refusal of a client's certificate may be lost on its way; its log has it."""

WAYS: dict[str, Way] = {
    "plain": Way(lambda tls: tls.amqp_url(tls.plain, is_tls=False)),
    "system": Way(_secure(), system_trust=True),
    "ca-url": Way(_secure(_ca)),
    "ca-url-of-aiormq": Way(_secure(lambda tls: _ca(tls, "cafile"))),
    "ca-context": Way(_secure(), lambda tls: {"ssl_context": tls.context()}),
    "client-url": Way(_secure(_ca, _with("relatum"))),
    "client-locked-url": Way(_secure(_ca, _with("client-locked"), lambda _: f"password={KEY_PASSWORD}")),
    "client-context": Way(_secure(), lambda tls: {"ssl_context": tls.context("relatum")}),
    "external-url": Way(
        _secure(_ca, _with("relatum"), lambda _: "auth_mechanism=external", login=False), is_external=True
    ),
    "external-context": Way(
        _secure(login=False),
        lambda tls: {"ssl_context": tls.context("relatum"), "auth_mechanism": "EXTERNAL"},
        is_external=True,
    ),
    "unverified": Way(lambda tls: tls.amqp_url(tls.elsewhere, "verify=verify_none")),
    "other-name": Way(lambda tls: tls.amqp_url(tls.elsewhere, f"{_ca(tls)}&server_name_indication=broker.example")),
    "asked-for-client": Way(lambda tls: tls.amqp_url(tls.asking, f"{_ca(tls)}&{_client(tls, 'relatum')}")),
    "wrong-ca": Way(
        _secure(lambda tls: f"cacertfile={tls.file('stranger.pem')}"), raises=(TlsRefused, "is not trusted.*vouches")
    ),
    "no-ca": Way(_secure(), raises=(TlsRefused, "is not trusted.*cacertfile")),
    "wrong-host": Way(
        lambda tls: tls.amqp_url(tls.elsewhere, _ca(tls)), raises=(TlsRefused, "not valid for 'localhost'")
    ),
    "expired": Way(lambda tls: tls.amqp_url(tls.expired, _ca(tls)), raises=(TlsRefused, "has expired")),
    "missing-client": Way(
        lambda tls: tls.amqp_url(tls.asking, _ca(tls)),
        raises=(BY_HANGING_UP, "client cert|No AMQP|failed|was lost"),
    ),
    "strange-client": Way(
        _secure(_ca, _with("client-strange")), raises=(BY_HANGING_UP, "client cert|No AMQP|failed|was lost")
    ),
    "expired-client": Way(
        _secure(_ca, _with("client-expired")), raises=(BY_HANGING_UP, "client cert|No AMQP|failed|was lost")
    ),
    "external-unknown": Way(
        _secure(
            *(_ca, _with("client-locked"), lambda _: f"password={KEY_PASSWORD}&auth_mechanism=external"), login=False
        ),
        raises=(AccessRefused, "client certificate's user"),
        is_external=True,
    ),
    "tls-at-plain-port": Way(lambda tls: tls.amqp_url(tls.plain, _ca(tls)), raises=(TlsRefused, "does not speak TLS")),
    "plain-at-tls-port": Way(
        lambda tls: tls.amqp_url(tls.secure, is_tls=False), raises=(BrokerUnavailable, "No AMQP 0.9.1 at")
    ),
}


def _address(url: str, options: dict[str, Any]) -> BrokerAddress:
    return BrokerAddress.of(url, **options)


def _reader(_world: World, url: str, options: dict[str, Any]) -> None:
    with StreamReader.open(url, **options) as reader:
        assert reader.read(STREAM, 0).body == b"first"


def _async_reader(_world: World, url: str, options: dict[str, Any]) -> None:
    async def main() -> bytes | None:
        async with await AsyncStreamReader.open(url, **options) as reader:
            return (await reader.read(STREAM, 0)).body

    assert asyncio.run(main()) == b"first"


def _relations(world: World, url: str, options: dict[str, Any]) -> None:
    with Relations(url, world.database, **options) as relations:
        assert [message.body for message in relations.find("order_id", "o-1").messages] == [b"first"]


def _async_relations(world: World, url: str, options: dict[str, Any]) -> None:
    async def main() -> list[bytes | None]:
        async with AsyncRelations(url, world.database, **options) as relations:
            return [message.body for message in (await relations.find("order_id", "o-1")).messages]

    assert asyncio.run(main()) == [b"first"]


def _recorder(world: World, url: str, options: dict[str, Any]) -> None:
    stop, ended = threading.Event(), []
    recorder = Recorder(url, world.database, [STREAM], **options)

    def run() -> None:
        try:
            recorder.run(stop)
        except RelatumError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: bool(ended) or recorder.statistics().streams[STREAM].is_recording, WAIT_S)
    finally:
        stop.set()
        thread.join(WAIT_S)
    if ended:
        raise ended[0]


def _collector(world: World, url: str, options: dict[str, Any]) -> None:
    seen = threading.Event()
    collector = MessageCollector(
        unique_name("tls"), database=world.database, broker=url, streams=[STREAM], type_of=lambda _: "any", **options
    )
    collector.register_executor("any", lambda _bulk: seen.set(), ExecutorOptions(bulk_messages=1))
    collector.start()
    try:
        assert seen.wait(WAIT_S)
    finally:
        collector.close()


def _async_collector(world: World, url: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        seen = asyncio.Event()

        async def execute(_bulk: object) -> None:
            seen.set()

        name = unique_name("tls")
        collector = AsyncMessageCollector(
            name, database=world.database, broker=url, streams=[STREAM], type_of=lambda _: "any", **options
        )
        collector.register_executor("any", execute, ExecutorOptions(bulk_messages=1))
        await collector.start()
        try:
            await asyncio.wait_for(seen.wait(), WAIT_S)
        finally:
            await collector.close()

    asyncio.run(main())


def _serial(world: World, url: str, options: dict[str, Any]) -> None:
    with SerialConsumer(SUPER, unique_name("tls"), database=world.database, broker=url, **options) as consumer:
        assert next(consumer.messages(WAIT_S)).body == b"of the super stream"


def _async_serial(world: World, url: str, options: dict[str, Any]) -> None:
    async def main() -> bytes | None:
        name = unique_name("tls")
        consumer = AsyncSerialConsumer(SUPER, name, database=world.database, broker=url, **options)
        async with consumer, contextlib.aclosing(consumer.messages(WAIT_S)) as messages:  # type: ignore[type-var]
            async for message in messages:
                return message.body
        return None

    assert asyncio.run(main()) == b"of the super stream"


def _super_streams(_world: World, url: str, options: dict[str, Any]) -> None:
    assert len(describe_super_stream(_address(url, options), SUPER)) == 1


def _spark_source(_world: World, url: str, options: dict[str, Any]) -> None:
    with SparkBroker.of(url).open() as reader:
        assert reader.read(STREAM, 0).body == b"first"


def _spark_sink(_world: World, url: str, options: dict[str, Any]) -> None:
    connect(SparkBroker.of(url), 10.0).close()


def _command(_world: World, url: str, options: dict[str, Any]) -> None:
    ended = CliRunner().invoke(complete_app(), ["read", STREAM, "0", "--broker", url])
    if ended.exit_code:
        # As the class and the words that a terminal shows.
        kind = AccessRefused if "client certificate's user" in ended.output else TlsRefused
        raise kind(" ".join(ended.output.split()))


def _context(tls: TlsBroker, way: str) -> ssl.SSLContext:
    return tls.context("relatum" if way in ("client", "external") else None)


def _pika_connection(tls: TlsBroker, way: str) -> pika.BlockingConnection:
    """A connection as an application makes it, with nothing of Relatum."""
    port = tls.elsewhere if way == "other-name" else tls.secure
    user, _, password = tls.credentials.partition(":")
    return pika.BlockingConnection(
        pika.ConnectionParameters(
            "localhost",
            port.amqp,
            credentials=ExternalCredentials() if way == "external" else pika.PlainCredentials(user, password),
            ssl_options=pika.SSLOptions(_context(tls, way), "broker.example" if way == "other-name" else "localhost"),
        )
    )


def _needs_external(broker_version: tuple[int, ...]) -> None:
    """Skip what logs in to the stream port by a client certificate where RabbitMQ cannot."""
    if broker_version < BY_STREAMS_SINCE:
        pytest.skip("this RabbitMQ cannot take EXTERNAL by the stream protocol")


@pytest.mark.parametrize("way", ["ca", "client", "external", "other-name"])
def test_an_intercepted_pika_connection(world: World, way: str, broker_version: tuple[int, ...]) -> None:
    """The embedded recorder, receipts and settling log in as the connection does, whose options hold all of it."""
    if way == "external":
        _needs_external(broker_version)
    connection = _pika_connection(world.tls, way)
    try:
        relatum.intercept(connection, database=world.database, keys=["order_id"])
        channel = connection.channel()
        receipt = relatum.publish(channel, "", STREAM, b"by pika", pika.BasicProperties(headers={"order_id": way}))
        assert [place.stream for place in receipt.wait(WAIT_S)] == [STREAM]
        assert receipt.settle(WAIT_S) == receipt.wait(WAIT_S)
        with Relations(world.tls.server.broker_url, world.database) as relations:
            wait_until(lambda: relations.find("order_id", way).messages, WAIT_S)
    finally:
        relatum.release(connection)
        connection.close()


@pytest.mark.parametrize("way", ["ca", "client", "external", "ca-url", "external-url"])
async def test_an_intercepted_aio_pika_connection(world: World, way: str, broker_version: tuple[int, ...]) -> None:
    """As with pika; aio-pika has its options in its URL, or a context."""
    if way.startswith("external"):
        _needs_external(broker_version)
    tls = world.tls
    query = "auth=external" if way.startswith("external") else ""
    if way.endswith("url"):
        query += f"&{_ca(tls, 'cafile')}&{_client(tls, 'relatum')}"
    url = tls.amqp_url(tls.secure, query.lstrip("&"), login="external" not in way)
    context = None if way.endswith("url") else _context(tls, way)
    async with await aio_pika.connect(url, ssl_context=context) as connection:
        relatum.intercept(connection, database=world.database, keys=["order_id"])
        try:
            channel = await connection.channel()
            message = aio_pika.Message(b"by aio-pika", headers={"order_id": f"aio-{way}"})
            receipt = await relatum.publish_async(channel.default_exchange, message, STREAM)
            assert [place.stream for place in await receipt.wait(WAIT_S)] == [STREAM]
        finally:
            await asyncio.to_thread(relatum.release, connection)


@pytest.mark.parametrize("way", ["ca", "client", "external", "other-name"])
def test_an_intercepted_celery_app(world: World, way: str, broker_version: tuple[int, ...]) -> None:
    """As with pika; kombu makes the context itself, out of names of files."""
    if way == "external":
        _needs_external(broker_version)
    tls = world.tls
    port = tls.elsewhere if way == "other-name" else tls.secure
    options: dict[str, Any] = {"ca_certs": str(tls.file("authority.pem")), "cert_reqs": ssl.CERT_REQUIRED}
    options["server_hostname"] = "broker.example" if way == "other-name" else "localhost"
    if way in ("client", "external"):
        options |= {"certfile": str(tls.file("relatum.pem")), "keyfile": str(tls.file("relatum.key"))}
    user, _, password = tls.credentials.partition(":")
    login = {"login_method": "EXTERNAL"} if way == "external" else {"userid": user, "password": password}
    with kombu.Connection("localhost", port=port.amqp, ssl=options, **login) as connection:
        app = relatum.intercept(Celery(set_as_current=False), database=world.database, keys=["order_id"])
        with app.producer_or_acquire(kombu.Producer(connection)) as producer:
            producer.publish("by Celery", routing_key=STREAM, headers={"order_id": f"celery-{way}"})
        with Relations(tls.server.broker_url, world.database) as relations:
            wait_until(lambda: relations.find("order_id", f"celery-{way}").messages, WAIT_S)
        relatum.release(app)


COMPONENTS: dict[str, Callable[[World, str, dict[str, Any]], None]] = {
    "reader": _reader,
    "async-reader": _async_reader,
    "relations": _relations,
    "async-relations": _async_relations,
    "recorder": _recorder,
    "collector": _collector,
    "async-collector": _async_collector,
    "serial": _serial,
    "async-serial": _async_serial,
    "super-streams": _super_streams,
    "spark-source": _spark_source,
    "spark-sink": _spark_sink,
    "command": _command,
}
BY_URL_ALONE = {"spark-source", "spark-sink", "command"}
READERS = ("reader", "async-reader")
"""They log in in each of the ways; all others only have to hand on what they are given."""

OF_OTHERS = ("ca-url", "ca-context", "wrong-ca", "external-url", "external-context")
"""What works, what is refused, and what logs in by the certificate, as URLs and as options in code tell it."""


def _cases() -> Iterator[Any]:
    for component in COMPONENTS:
        for name in WAYS:
            if component in BY_URL_ALONE and "context" in name:
                continue
            if component not in READERS and name not in OF_OTHERS:
                continue
            yield pytest.param(component, name, id=f"{component}-{name}")


@pytest.mark.parametrize(("component", "name"), list(_cases()))
def test_a_way_to_log_in(
    world: World, component: str, name: str, broker_version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What logs in elsewhere does so here; what is refused is one error that names the cause, and no password."""
    way = WAYS[name]
    if way.is_external and component != "super-streams":
        _needs_external(broker_version)
    url, options = way.prepare(world.tls, monkeypatch)
    if way.raises is None:
        COMPONENTS[component](world, url, options)
        return
    kind, words = way.raises
    with pytest.raises(ConfigurationError if component == "command" and kind is ConfigurationError else kind) as caught:
        COMPONENTS[component](world, url, options)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert KEY_PASSWORD not in str(caught.value)
