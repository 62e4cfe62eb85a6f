"""Spark Connect: a client without a JVM, and a server of its own process."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from tests.acceptance._command import Relatum
from tests.support import SPARK_START, START_S, all_plain, new_streams, publish_plain, run_python, wait_until
from tests.support.ports import free_port
from tests.support.spark import JDBC_JAR
from tests.support.spark_cluster import HOST, SPARK_HOME
from tests.support.spark_python import spark_python

pytestmark = [pytest.mark.timeout(900), pytest.mark.own_jvms]

CLIENT = Path(__file__).with_name("_spark_connect_client.py")
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
LEFT, RIGHT = 60, 40


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server, which knows nothing of the tests' broker and database."""
    directory = tmp_path_factory.mktemp("connect")
    port = free_port((0,))
    settings = {
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.extraJavaOptions": SPARK_START,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
    }
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--class", SERVER, "--master", "local[2]"]
    command += ["--jars", str(JDBC_JAR), "--driver-memory", "768m"]
    command += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RELATUM_")}
    own = {"PYSPARK_PYTHON": str(spark_python()), "SPARK_LOCAL_IP": HOST, "SPARK_LOCAL_DIRS": str(directory)}
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([*command, "spark-internal"], env=kept | own, cwd=directory, stdout=log, stderr=log)
    try:
        wait_until(lambda: _listens(port, server), START_S, what=f"the server; see {directory / 'log'}", every_s=0.2)
        yield f"sc://{HOST}:{port}"
    finally:
        server.terminate()
        server.wait(90)


def _listens(port: int, server: "subprocess.Popen[bytes]") -> bool:
    assert server.poll() is None, "the server ended"
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) == 0


def test_all_but_enrichment_works_over_connect(remote: str, amqp_url: str, stream_url: str, database_url: str) -> None:
    """All functions give over Connect what they give elsewhere; enrichment says clearly that it cannot."""
    with new_streams(amqp_url, 3) as (left, right, target), as_engine(database_url) as engine:
        for name, count in ((left, LEFT), (right, RIGHT)):
            publish_plain(amqp_url, name, [(b"%d" % number, {"order_id": f"o{number}"}) for number in range(count)])
        add_keys(engine, ["order_id"])
        environment = Relatum(amqp_url, stream_url, database_url).environment
        ended = run_python(str(CLIENT), remote, amqp_url, left, right, target, timeout_s=840, env=environment)
        bodies = [body for _, _, body in all_plain(amqp_url, target)]
    found = json.loads(ended.stdout.splitlines()[-1])
    refused = found.pop("Enrichment")
    assert found == {
        "backfill": [LEFT, RIGHT],
        "read": LEFT,
        "write": None,
        "streaming": None,
        "relationships": LEFT,
        "snapshot": LEFT,
        "catalog": LEFT + RIGHT,
        "resolve": 5,
        "related_pairs": RIGHT,
        "as_of": LEFT,
        "as_of by time": LEFT,
        "unmatched": LEFT - RIGHT,
        "conversations": LEFT,
    }
    assert "ConfigurationError" in refused
    assert "Spark Connect" in refused
    assert sorted(map(int, bodies)) == sorted([*range(LEFT)] * 2)
