"""Every pipeline on a cluster without Relatum, executors killed: what comes out is known by arithmetic."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from tests.acceptance._command import Relatum
from tests.acceptance._spark_application import write
from tests.support import all_plain, new_streams, publish_plain, rows_of, wait_until
from tests.support.databases import named
from tests.support.plans import filled_database
from tests.support.spark_cluster import SparkCluster, build_wheel_zip, zip_dependencies

pytestmark = [pytest.mark.timeout(900), pytest.mark.own_jvms]

APPLICATION = Path(__file__).with_name("_spark_application.py")

LEFT, RIGHT = 40_000, 20_000
"""Messages of the two streams. Left ones 2n and 2n + 1 carry the order n, right ones n the order 2n."""

LIMIT_S = 240.0
"""Seconds a step may take on a machine that does much else."""

EXECUTORS = 2


@dataclass(frozen=True)
class Pair:
    """Where the two streams of this module are, and the table."""

    relatum: Relatum
    left: str
    right: str


class Application:
    """The application as it runs on the cluster."""

    def __init__(self, cluster: SparkCluster, process: "subprocess.Popen[bytes]", directory: Path) -> None:
        self._cluster = cluster
        self._process = process
        self._directory = directory
        self._numbers = count()

    def run(self, step: str, *, kill_after: int | None = 1, **arguments: Any) -> Any:
        """Do a step and return what came out; an executor with a task is killed once `kill_after` others ended."""
        number = next(self._numbers)
        write(self._directory / f"{number}.asked", [step, kill_after, arguments])
        answer = wait_until(lambda: self._read(f"{number}.answer"), LIMIT_S, what=f"{step} ends")
        assert "error" not in answer, answer["error"][0]
        assert kill_after is None or answer["failed"], "no executor was killed that had a task"
        return answer["answer"]

    def _read(self, name: str) -> Any:
        assert self._process.poll() is None, f"the driver ended; see {self._cluster.directory / 'driver.log'}"
        path = self._directory / name
        return json.loads(path.read_text()) if path.exists() else None

    def end(self) -> None:
        write(self._directory / f"{next(self._numbers)}.asked", ["end", None, {}])
        try:
            self._process.wait(90)
        finally:
            self._process.kill()
            self._process.wait()


def order_of_left(number: int) -> str:
    return f"o{number // 2}"


def order_of_right(number: int) -> str:
    return f"o{number * 2}"


@pytest.fixture(scope="module")
def pair(amqp_url: str, stream_url: str, database_server_url: str, _migrated_template: str) -> Iterator[Pair]:
    nothing = "SELECT"
    with (
        new_streams(amqp_url, 2) as (left, right),
        filled_database(database_server_url, _migrated_template, nothing, then=nothing) as connection,
    ):
        for name, size, order in ((left, LEFT, order_of_left), (right, RIGHT, order_of_right)):
            messages = ((b"%d" % number, {"order_id": order(number)}) for number in range(size))
            publish_plain(amqp_url, name, messages, confirm=False)
        relatum = Relatum(amqp_url, stream_url, named(database_server_url, connection.info.dbname))
        with as_engine(relatum.database_url) as engine:
            add_keys(engine, ["order_id"])
        yield Pair(relatum, left, right)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster"), workers=EXECUTORS) as running:
        yield running


@pytest.fixture(scope="module")
def application(cluster: SparkCluster, pair: Pair, pytestconfig: Any, tmp_path_factory: Any) -> Iterator[Application]:
    """The application, with all its tasks need shipped to them."""
    directory = tmp_path_factory.mktemp("application")
    process = cluster.submit(
        APPLICATION,
        str(directory),
        str(EXECUTORS),
        py_files=build_wheel_zip(pytestconfig.rootpath, directory),
        archive=zip_dependencies(directory / "dependencies.zip"),
        environment={name: value for name, value in pair.relatum.environment.items() if name.startswith("RELATUM_")},
    )
    running = Application(cluster, process, directory)
    yield running
    running.end()


def test_nodes_without_relatum_run_what_was_shipped(cluster: SparkCluster, application: Application) -> None:
    """The nodes' interpreter cannot import Relatum; tasks import it from the zip, and psycopg from the archive."""
    bare = subprocess.run([cluster.python, "-c", "import relatum"], capture_output=True, check=False)
    assert b"No module named 'relatum'" in bare.stderr
    for python, package, dependency in application.run("whereabouts", kill_after=None):
        assert Path(python) == cluster.python
        assert ".zip/relatum/" in package
        assert Path(dependency).relative_to(cluster.directory).parts[0].startswith("work")


def test_a_batch_read_has_every_message_once(application: Application, pair: Pair) -> None:
    """An executor killed: still each message, once."""
    found = application.run("read", stream=pair.left, maxRecordsPerPartition=2_000)
    assert sorted(found) == [[number, number] for number in range(LEFT)]


def test_a_back_fill_writes_every_row_once(application: Application, pair: Pair) -> None:
    """An executor killed: the table has the rows of all messages, once."""
    application.run("backfill", streams=[pair.left, pair.right])
    with as_engine(pair.relatum.database_url) as engine:
        for stream, size, order in ((pair.left, LEFT, order_of_left), (pair.right, RIGHT, order_of_right)):
            assert rows_of(engine, stream) == [("order_id", order(number), number) for number in range(size)]


def test_pairs_are_complete_and_come_once(application: Application, pair: Pair) -> None:
    """An executor killed: all pairs, each once, with both messages, which are resolved in other tasks."""
    found = application.run("pairs", kill_after=0, left=pair.left, right=pair.right, on="order_id")
    assert sorted(found) == sorted([4 * n + k, n] for n in range(LEFT // 4) for k in (0, 1))


def test_a_streaming_query_publishes_every_message_once(application: Application, pair: Pair, tmp_path: Path) -> None:
    """An executor killed: the target stream has each message once."""
    checkpoint = str(tmp_path / "checkpoint")
    with new_streams(pair.relatum.broker_url, 1) as (target,):
        batches = application.run("copy", source=pair.left, target=target, checkpoint=checkpoint, each=10_000)
        assert sum(batches) == LEFT
        bodies = [body for _, _, body in all_plain(pair.relatum.broker_url, target)]
    assert sorted(map(int, bodies)) == list(range(LEFT))
