"""The common context of all groups: servers, databases, and shared streams and tables."""

import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from benchmarks import _streams as streams
from benchmarks._recorder import catch_up
from relatum import Broker
from relatum.common import limits
from relatum.local import LocalPostgreSQL, LocalRabbitMQ
from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from relatum_migrations import upgrade

KEYS: Final = ("order_id", "host")

QUICK_MESSAGES: Final = 100_000

QUICK_ROWS: Final = 2_000_000

PACKAGES: Final = ("relatum", "pika", "psycopg", "sqlalchemy", "rstream")


@dataclass(frozen=True, slots=True)
class Table:
    """A stream and the database in which it is recorded."""

    stream: str
    messages: int
    database_url: str


class Context:
    """The servers and the streams and databases created on them, which are removed at the end of the run.

    Args:
        broker_url: The broker's `amqp://` URL.
        stream_url: The broker's `rabbitmq-stream://` URL.
        server_url: A PostgreSQL database whose user may create databases.
        messages: Number of messages of the large stream.
        rows: Number of rows to which the table grows.
        is_quick: Whether to run fewer rounds.
        say: Called with descriptions of the progress.
    """

    def __init__(
        self,
        *,
        broker_url: str,
        stream_url: str,
        server_url: str,
        messages: int,
        rows: int,
        is_quick: bool,
        say: Callable[[str], None],
    ) -> None:
        self.broker_url = broker_url
        self.stream_url = stream_url
        self.messages = messages
        self.rows = rows
        self.is_quick = is_quick
        self.say = say
        self.broker = Broker(broker_url, stream_url=stream_url)
        self._server_url = server_url
        self._suffix = uuid.uuid4().hex[:8]
        self._streams: dict[str, str] = {}
        self._databases: list[str] = []
        self._tables: dict[int, Table] = {}

    def rounds(self, usual: int) -> int:
        """Return the number of rounds, given that of a usual run."""
        return min(usual, max(3, usual // 3)) if self.is_quick else usual

    # --- streams ------------------------------------------------------------------------------------------

    def stream(self, name: str, write: Callable[[str], object], messages: int, *, is_filtered: bool = False) -> str:
        """Return the stream of a name; the first call writes it."""
        if name not in self._streams:
            self.say(f"writing {messages:,} messages: {name}")
            stream = self.empty_stream(name, is_filtered=is_filtered)
            write(stream)
            streams.wait_written(self.broker, stream, messages)
        return self._streams[name]

    def empty_stream(self, name: str, *, is_filtered: bool = False) -> str:
        """Create an empty stream with a unique name."""
        stream = f"relatum-bench-{name}-{self._suffix}"
        self._streams[name] = stream
        streams.declare(self.broker_url, stream, is_filtered=is_filtered)
        return stream

    def orders(self, messages: int) -> str:
        """Return a stream of orders that rstream wrote in batches."""
        return self.stream(
            f"orders-{messages}", lambda name: streams.write_in_batches(self.stream_url, name, messages), messages
        )

    @property
    def singles_messages(self) -> int:
        """The number of messages in `singles`: fewer, since pika writes them one by one."""
        return self.messages // 5

    def singles(self) -> str:
        """Return a stream of orders that pika wrote one by one."""
        count = self.singles_messages
        return self.stream(
            f"singles-{count}", lambda name: streams.write_one_by_one(self.broker_url, name, range(count)), count
        )

    # --- databases ----------------------------------------------------------------------------------------

    def new_database(self) -> str:
        """Create a database with the schema and both keys, and return its URL."""
        name = f"relatum_bench_{uuid.uuid4().hex[:12]}"
        self._administer("CREATE DATABASE {} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'", name)
        self._databases.append(name)
        url = urlunsplit(urlsplit(self._server_url)._replace(path=f"/{name}"))
        upgrade(url)
        with as_engine(url) as engine:
            add_keys(engine, list(KEYS))
        return url

    def drop_database(self, url: str) -> None:
        """Drop a database."""
        name = urlsplit(url).path[1:]
        self._administer("DROP DATABASE {} WITH (FORCE)", name)
        self._databases.remove(name)

    def _administer(self, statement: str, name: str) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def keep_table(self, messages: int, database_url: str) -> None:
        """Keep a database in which all the orders are recorded for later groups."""
        with psycopg.connect(database_url, autocommit=True) as connection:
            # Otherwise autovacuum would do this in the middle of a measurement.
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
        self._tables[messages] = Table(self.orders(messages), messages, database_url)

    def table(self, messages: int) -> Table:
        """Return recorded orders; the first call records them."""
        if messages not in self._tables:
            stream, database = self.orders(messages), self.new_database()
            self.say(f"recording {messages:,} messages")
            catch_up(self.broker_url, self.stream_url, database, stream, messages)
            self.keep_table(messages, database)
        return self._tables[messages]

    def close(self) -> None:
        """Remove all streams and databases."""
        for stream in self._streams.values():
            streams.delete(self.broker_url, stream)
        for name in list(self._databases):
            self._administer("DROP DATABASE {} WITH (FORCE)", name)

    # --- facts --------------------------------------------------------------------------------------------

    @cached_property
    def broker_version(self) -> str:
        """RabbitMQ's version."""
        with streams.connected(self.broker_url) as connection:
            return str(connection._impl.server_properties["version"])

    @property
    def broker_numbers(self) -> tuple[int, ...]:
        """RabbitMQ's version as numbers, such as (3, 10)."""
        return tuple(int(part) for part in self.broker_version.split(".")[:2])

    def facts(self) -> dict[str, Any]:
        """Return the facts that the figures depend on: versions, the machine, sizes."""
        with psycopg.connect(self._server_url) as connection:
            row = connection.execute("SHOW server_version").fetchone()
            durable = connection.execute("SHOW fsync").fetchone()
        assert row is not None
        assert durable is not None
        return {
            "rabbitmq": self.broker_version,
            "postgresql": str(row[0]).split()[0],
            "postgresql_fsync": durable[0],
            "python": platform.python_version(),
            "packages": {name: version(name) for name in PACKAGES},
            "compiled": not str(limits.__file__).endswith(".py"),
            "system": platform.platform(),
            "architecture": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_before": os.getloadavg()[0],
            "messages": self.messages,
            "rows": self.rows,
            "body_bytes": streams.BODY_BYTES,
            "quick": self.is_quick,
        }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _stream_url(amqp_url: str) -> str:
    parts = urlsplit(amqp_url)
    credentials = parts.netloc.rpartition("@")[0]
    place = f"{parts.hostname}:{(parts.port or 5672) - 120}"
    return urlunsplit(("rabbitmq-stream", f"{credentials}@{place}" if credentials else place, parts.path, "", ""))


@contextmanager
def opened(messages: int, rows: int, say: Callable[[str], None], *, is_quick: bool) -> Iterator[Context]:
    """Open a context on private servers, or on those named by the tests' environment variables."""
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="relatum-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        broker_url = os.environ.get("RELATUM_TEST_AMQP_URL")
        stream_url = os.environ.get("RELATUM_TEST_STREAM_URL")
        server_url = os.environ.get("RELATUM_TEST_DATABASE_URL")
        if broker_url is None:
            say("starting RabbitMQ")
            rabbitmq = stack.enter_context(LocalRabbitMQ(directory / "rabbitmq"))
            broker_url, stream_url = rabbitmq.broker_url, rabbitmq.stream_url
        if server_url is None:
            say("starting PostgreSQL")
            server_url = stack.enter_context(LocalPostgreSQL(directory / "postgresql")).database_url
        context = Context(
            broker_url=broker_url,
            stream_url=stream_url or _stream_url(broker_url),
            server_url=server_url.replace("postgresql+psycopg://", "postgresql://"),
            messages=messages,
            rows=rows,
            is_quick=is_quick,
            say=say,
        )
        stack.callback(context.close)
        yield context
