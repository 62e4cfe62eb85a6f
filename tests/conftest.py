"""Servers of the tests, each started when first asked for, and what each test gets of them.

In this order: RELATUM_TEST_AMQP_URL (and …_STREAM_URL), RELATUM_TEST_DATABASE_URL; `--docker`; `relatum.local`.
"""

import inspect
import logging
import os
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit

import hypothesis
import pika
import psycopg
import pytest
import sqlalchemy as sa
from pika import BlockingConnection

from relatum import Broker
from relatum.contexts import SerializationContexts
from relatum.local import LocalPostgreSQL, LocalRabbitMQ, LocalServers
from relatum.reading import StreamReader
from relatum.store.database import make_engine
from relatum.superstreams import Layout
from relatum_migrations import upgrade
from tests.support import READERS, START_S, in_a_loop, make_streams_survive, new_streams, server_version, unique_name
from tests.support.clock import Clock
from tests.support.cluster import Cluster
from tests.support.databases import NEW, Databases, clear, new_database
from tests.support.leases import LEASE_S
from tests.support.loop_guard import blocked, install
from tests.support.place import Place
from tests.support.ports import STREAM_OFFSET, free_port
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import renew
from tests.support.sharing_out import BySharedFixtures, longest_first
from tests.support.super_streams import super_stream
from tests.support.threads import Threads

install()

# How long an example takes shows how busy the machine is, not whether the code is right.
_IN_NO_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("relatum", max_examples=30, **_IN_NO_TIME)
# The same examples each time: only a change can make them fail. All other runs try other examples.
hypothesis.settings.register_profile("ci", max_examples=100, derandomize=True, **_IN_NO_TIME)
hypothesis.settings.register_profile("long", max_examples=1000, **_IN_NO_TIME)

SEED = 12
"""Of what happens by chance in a run that is not long."""

DOCKER_PASSWORD = "relatum"

_ASKED_FOR = {"long": "takes long", "docker": "starts containers"}
"""Markers whose tests run with the option of the same name alone, and why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docker", action="store_true", help="run RabbitMQ and PostgreSQL from docker/compose.yaml")
    parser.addoption("--long", action="store_true", help="run long tests, and the others' many rounds: takes hours")
    parser.addoption("--budget", action="store_true", help="fail where a file takes far too much of a processor")
    parser.addoption("--seed", type=int, help="of what happens by chance: always the same, and with --long another one")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are tried, and the seed of this run, one for all of its processes; start the clock."""
    config.pluginmanager.register(Clock(config))
    chosen = config.getoption("--hypothesis-profile") or "relatum"
    hypothesis.settings.load_profile("long" if _is_long(config) else chosen)
    if config.getoption("--seed") is None:
        given = getattr(config, "workerinput", {}).get("seed")
        config.option.seed = given if given is not None else secrets.randbelow(1 << 32) if _is_long(config) else SEED


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.getoption("--seed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say how to run the same again, however little is said else."""
    seed, reporter = session.config.getoption("--seed"), session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and seed != SEED:
        reporter.write_line(f"seed {seed}: the same deaths again by --seed {seed}")


def _is_long(config: pytest.Config) -> bool:
    return bool(config.getoption("--long"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a test that does not say in a sentence what must hold."""
    if item.name.startswith("test_") and not item.obj.__doc__:  # type: ignore[attr-defined]
        raise pytest.UsageError(f"{item.nodeid} has no docstring")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long` or `docker`, unless asked for."""
    for marker, reason in _ASKED_FOR.items():
        if not config.getoption(f"--{marker}"):
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(pytest.mark.skip(reason=f"{reason}: --{marker} runs it"))
    if hasattr(config, "workerinput"):
        longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> BySharedFixtures:
    """Keep together what shares fixtures, in any number of processes."""
    return BySharedFixtures(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: pytest.TestReport) -> None:
    """Say of a process that died what else that means."""
    report.longrepr = f"{report.longrepr}: its other tests, and files that had not begun, were not run"


@pytest.fixture(scope="session")
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether tests shall run their long form: thousands of rounds instead of a few."""
    return _is_long(pytestconfig)


@pytest.fixture(scope="session")
def harm_s(is_long: bool) -> float:
    """Seconds for which servers and processes are harmed at random, once each kind was done: RELATUM_HARM_S, or 0."""
    return float(os.environ.get("RELATUM_HARM_S", 1200 if is_long else 0))


@pytest.fixture(scope="session")
def replays(is_long: bool) -> int:
    """How often it is done again what must not count twice."""
    return 20 if is_long else 3


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Chooses which process dies, and when, by the run's seed and the test's name, so that it can be repeated."""
    return random.Random(f"{request.config.getoption('--seed')} {request.node.name}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in a loop of its own, with a limit. Its fixtures are made outside it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    in_a_loop(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(autouse=True)
def earlier() -> Threads:
    """The threads at the test's start: those left by earlier tests, which may still end, or log about their servers."""
    return Threads()


@pytest.fixture(autouse=True)
def nothing_blocks_a_loop() -> Iterator[None]:
    """Nothing that may block is called in a component's loop, also where the component has caught the error."""
    blocked.clear()
    yield
    assert not blocked, blocked


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets up the process's logging: that ends with the test."""
    loggers = [logging.getLogger(name) for name in (None, "pika", "relatum")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in [each for each in loggers[0].handlers if type(each) is logging.StreamHandler]:
        loggers[0].removeHandler(handler)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, earlier: Threads) -> pytest.LogCaptureFixture:
    """Takes the lines of this test alone, of all threads that it began."""
    caplog.handler.addFilter(earlier.told)
    return caplog


@pytest.fixture(scope="session")
def docker_compose_file(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.rootpath / "docker" / "compose.yaml")


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    """Start the two servers alone, on free ports, and wait until they are healthy; fail without `docker`."""
    if shutil.which("docker") is None:
        pytest.fail("--docker needs a Docker engine and Compose v2, and there is no command `docker`", pytrace=False)
    amqp = free_port((0, STREAM_OFFSET, 1, 2))
    for name, offset in (("AMQP", 0), ("STREAM", STREAM_OFFSET), ("MANAGEMENT", 1), ("POSTGRESQL", 2)):
        os.environ[f"RELATUM_{name}_PORT"] = str(amqp + offset)
    os.environ["RELATUM_PASSWORD"] = DOCKER_PASSWORD
    return ["up --detach --wait --wait-timeout 180 rabbitmq postgresql"]


@contextmanager
def _directory(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    directory = factory.mktemp(name)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    amqp_url = os.environ.get("RELATUM_TEST_AMQP_URL")
    stream_url = os.environ.get("RELATUM_TEST_STREAM_URL")
    if amqp_url:
        yield Broker(amqp_url, stream_url=stream_url or _stream_url(amqp_url))
    elif stream_url:
        pytest.fail("RELATUM_TEST_STREAM_URL needs RELATUM_TEST_AMQP_URL of the same broker", pytrace=False)
    elif request.config.getoption("--docker"):
        services = request.getfixturevalue("docker_services")
        host = request.getfixturevalue("docker_ip")
        credentials = f"relatum:{DOCKER_PASSWORD}"
        amqp, stream = services.port_for("rabbitmq", 5672), services.port_for("rabbitmq", 5552)
        yield Broker(
            f"amqp://{credentials}@{host}:{amqp}/",
            stream_url=f"rabbitmq-stream://{credentials}@{host}:{stream}/",
        )
    else:
        with (
            _directory(tmp_path_factory, "rabbitmq") as directory,
            LocalRabbitMQ(directory, start_timeout_s=START_S) as server,
            StreamReader.open(server.broker_url) as READERS[server.broker_url],
        ):
            yield Broker(server.broker_url, stream_url=server.stream_url)


def _stream_url(amqp_url: str) -> str:
    parts = urlsplit(amqp_url)
    host = parts.netloc.rpartition("@")[0] + "@" if "@" in parts.netloc else ""
    port = (parts.port or 5672) + STREAM_OFFSET
    return urlunsplit(("rabbitmq-stream", f"{host}{parts.hostname}:{port}", parts.path, "", ""))


@pytest.fixture(scope="session")
def amqp_url(broker: Broker) -> str:
    return broker.url


@pytest.fixture(scope="session")
def stream_url(broker: Broker) -> str:
    return broker.stream_url or ""


@pytest.fixture(scope="session")
def broker_version(broker: Broker) -> tuple[int, ...]:
    return server_version(broker.url)


@pytest.fixture(scope="session")
def database_server_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database of the PostgreSQL of this run, whose user may create others."""
    named = os.environ.get("RELATUM_TEST_DATABASE_URL")
    if named:
        yield named.replace("postgresql+psycopg://", "postgresql://")
    elif request.config.getoption("--docker"):
        port = request.getfixturevalue("docker_services").port_for("postgresql", 5432)
        host = request.getfixturevalue("docker_ip")
        yield f"postgresql://relatum:{DOCKER_PASSWORD}@{host}:{port}/relatum"
    else:
        with (
            _directory(tmp_path_factory, "postgresql") as directory,
            LocalPostgreSQL(directory, durable=False, start_timeout_s=START_S) as server,
        ):
            yield server.database_url


@pytest.fixture(scope="session")
def _copying(database_server_url: str) -> str:
    """How databases are copied: where the server can, as files, which is quicker than through its log."""
    with psycopg.connect(database_server_url) as connection:
        return "STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else ""


@pytest.fixture(scope="session")
def _migrated_template(database_server_url: str) -> Iterator[str]:
    """The name of a database with the newest schema, which is copied for tests."""
    with new_database(database_server_url, NEW) as url:
        upgrade(url)
        yield urlsplit(url).path[1:]


@pytest.fixture(scope="session")
def _databases(database_server_url: str, _migrated_template: str, _copying: LiteralString) -> Iterator[Databases]:
    databases = Databases(database_server_url, _migrated_template, _copying)
    yield databases
    databases.close()


@pytest.fixture
def empty_database_url(database_server_url: str, _copying: LiteralString) -> Iterator[str]:
    """The URL of a new database with nothing in it."""
    with new_database(database_server_url, NEW + _copying) as url:
        yield url


@pytest.fixture
def database_url(_databases: Databases) -> Iterator[str]:
    """The URL of a database with the newest schema, as new."""
    url = _databases.take()
    yield url
    _databases.give_back(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def quick_rhythm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of `tests.support.leases.LEASE_S` are renewed, and looked at, four times a second."""
    monkeypatch.setattr("relatum.store.members.RENEWALS", 4 * LEASE_S)


@pytest.fixture(scope="session")
def _stream_maker(amqp_url: str) -> Iterator[BlockingConnection]:
    """A connection that makes and deletes streams for all tests: one for each would cost more than the streams do."""
    parameters = pika.URLParameters(amqp_url)
    parameters.heartbeat = 0
    connection = BlockingConnection(parameters)
    yield connection
    connection.close()


@pytest.fixture
def stream_name(_stream_maker: BlockingConnection) -> Iterator[str]:
    """The name of a new, empty stream."""
    name = unique_name()
    channel = _stream_maker.channel()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    yield name
    channel.queue_delete(name)
    channel.close()


@pytest.fixture
def other_stream(amqp_url: str) -> Iterator[str]:
    with new_streams(amqp_url, 1) as (name,):
        yield name


@pytest.fixture
def short_stream(amqp_url: str) -> Iterator[str]:
    """The name of a new stream that retains about 100 kB."""
    with new_streams(amqp_url, 1, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000) as (name,):
        yield name


@pytest.fixture
def place(request: Any, broker: Broker, database_url: str, engine: sa.Engine, stream_name: str) -> Place:
    """A broker with a new stream, and a database; recorded by the file's `KEYS`, if it has them."""
    keys = getattr(request.module, "KEYS", ())
    return Place(broker.url, broker.stream_url or "", database_url, engine, stream_name, keys)


@pytest.fixture
def layout(request: pytest.FixtureRequest, broker: Broker) -> Iterator[Layout]:
    """A new super stream of three partitions, or as many as the file's `PARTITIONS` says."""
    with super_stream(broker, getattr(request.module, "PARTITIONS", 3)) as made:
        yield made


@pytest.fixture(name="super_stream")
def super_stream_name(layout: Layout) -> str:
    return layout.super_stream


@pytest.fixture
def contexts(super_stream: str, broker: Broker, database_url: str) -> Iterator[SerializationContexts]:
    """Its contexts: none yet."""
    with SerializationContexts(super_stream, database_url, broker=broker) as contexts:
        yield contexts


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """The line to the broker."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with _directory(tmp_path_factory, "cluster") as directory, Cluster(directory) as started:
        yield started


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    """Three nodes, whole when the test begins, and healed when it ends. See `tests.support.cluster`."""
    _cluster.heal()
    yield _cluster
    _cluster.heal()


@pytest.fixture(scope="session")
def _own_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServers]:
    kinds = ("consistent_hash", "recent_history", "random", "jms_topic")
    plugins = ("rabbitmq_stream", *(f"rabbitmq_{kind}_exchange" for kind in kinds))
    with _directory(tmp_path_factory, "own") as directory:
        servers = LocalServers(directory, durable=False, start_timeout_s=START_S)
        servers.rabbitmq = LocalRabbitMQ(directory / "rabbitmq", plugins=plugins, start_timeout_s=START_S)
        with servers:
            yield servers


@pytest.fixture(scope="module")
def own_broker(_own_servers: LocalServers) -> LocalRabbitMQ:
    """A private RabbitMQ, as new for each file of tests: its users, virtual hosts and settings are theirs."""
    _own_servers.start()
    renew(_own_servers.rabbitmq)
    return _own_servers.rabbitmq


@pytest.fixture(scope="module")
def _surviving_broker(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    make_streams_survive(own_broker)
    return own_broker


@pytest.fixture
def private_servers(_surviving_broker: LocalRabbitMQ, _own_servers: LocalServers) -> Iterator[LocalServers]:
    """The broker `own_broker`, with streams of the file's earlier tests, and an empty PostgreSQL, to be harmed."""
    _own_servers.start()
    clear(_own_servers.database_url)
    yield _own_servers
    _own_servers.rabbitmq.thaw()
    _own_servers.postgresql.thaw()
