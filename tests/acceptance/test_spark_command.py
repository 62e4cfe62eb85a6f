"""`relatum spark`, as it is installed: each command on a session of its own, all but the first in one JVM."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from relatum.terminal import ExitCode
from tests.acceptance._command import COMMAND, Relatum
from tests.support import declare_stream, delete_stream, publish_plain, unique_name
from tests.support.spark_gateway import spark_gateway
from tests.support.spark_python import spark_python

LIMIT_S = 840
LEFT, RIGHT = 6, 4

pytestmark = pytest.mark.timeout(900)


class Spark:
    """The command with this test's servers, and two streams."""

    def __init__(self, relatum: Relatum, gateway: dict[str, str], left: str, right: str) -> None:
        self._relatum = relatum
        self._gateway = gateway
        self.left = left
        self.right = right

    def run(self, *arguments: str, code: int = 0, own_jvm: bool = False) -> str:
        """Run it to its end, which must be of that code; return what it printed."""
        master = ["--master", "local[2]", "--conf", "spark.driver.memory=512m"]
        environment = self._relatum.environment | ({} if own_jvm else self._gateway)
        ended = subprocess.run(
            [COMMAND, "spark", *arguments, *master],
            env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert ended.returncode == code, ended.stderr
        return ended.stdout

    def refused(self, *arguments: str) -> None:
        """Run it without a JVM of its own: it must end as a wrong use, before Spark starts."""
        assert self._relatum.run("spark", *arguments, "--master", "local[2]").returncode == ExitCode.USAGE

    def lines(self, *arguments: str) -> list[Any]:
        """The documents it prints."""
        return [json.loads(line) for line in self.run(*arguments, "--json").splitlines()]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a JVM that knows nothing of the tests' servers; a command under them is as under `spark-submit`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELATUM_")}
    variables = {"PYSPARK_PYTHON": str(spark_python()), "SPARK_LOCAL_IP": "127.0.0.1"}
    with spark_gateway(tmp_path_factory.mktemp("gateway"), own | variables) as found:
        yield found | variables


@pytest.fixture
def spark(amqp_url: str, stream_url: str, database_url: str, gateway: dict[str, str]) -> Iterator[Spark]:
    """Two streams that share orders, and a key that nothing is recorded for yet."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    relatum.ok("keys", "add", "order_id")
    left, right = unique_name("left"), unique_name("right")
    for name, count in ((left, LEFT), (right, RIGHT)):
        declare_stream(amqp_url, name)
        publish_plain(amqp_url, name, [(b"%d" % number, {"order_id": f"o{number}"}) for number in range(count)])
    yield Spark(relatum, gateway, left, right)
    for name in (left, right):
        delete_stream(amqp_url, name)


def test_the_commands_do_what_they_say(spark: Spark, tmp_path: Path) -> None:
    """Back-fill, compare, pair, match in time, find what is unmatched and connected, and read places of a file."""
    filled = json.loads(spark.run("backfill", spark.left, spark.right, "--json", own_jvm=True))
    assert [(report["stream"], report["rows"]) for report in filled] == [(spark.left, LEFT), (spark.right, RIGHT)]
    compared = json.loads(spark.run("verify", spark.left, spark.right, "--json"))
    assert compared["ok"]
    assert [stream["messages"] for stream in compared["streams"]] == [LEFT, RIGHT]

    pairs = tmp_path / "pairs.parquet"
    assert spark.run("pairs", spark.left, spark.right, "--on", "order_id", "--payloads", "-o", str(pairs)) == (
        f"{pairs}: {RIGHT} rows.\n"
    )
    rows = sorted(pyarrow.parquet.read_table(pairs).to_pylist(), key=lambda row: row["value"])
    assert [(row["value"], row["left_value"], row["right_value"]) for row in rows] == [
        (f"o{number}", b"%d" % number, b"%d" % number) for number in range(RIGHT)
    ]
    assert dict(rows[0]["left_headers"]) == {"order_id": "o0"}

    found = spark.lines("unmatched", spark.left, spark.right, "--on", "order_id", "--payloads")
    assert sorted((row["value"], row["status"], row["left_value"]) for row in found) == [
        (f"o{number}", "absent", str(number)) for number in range(RIGHT, LEFT)
    ]

    nearest = tmp_path / "nearest.csv"
    spark.run("as-of", spark.left, spark.right, "--on", "order_id", "--direction", "nearest", "-o", str(nearest))
    with nearest.open(newline="") as file:
        matched = {row["value"]: row["right_offset"] for row in csv.DictReader(file)}
    assert matched == {f"o{number}": str(number) if number < RIGHT else "" for number in range(LEFT)}

    messages = tmp_path / "messages.jsonl"
    spark.run("resolve", str(places_of(nearest, tmp_path)), "-o", str(messages))
    resolved = [json.loads(line) for line in messages.read_text().splitlines()]
    assert sorted((row["offset"], row["status"], row["value"]) for row in resolved) == [
        (number, "found", str(number)) for number in range(LEFT)
    ]

    table = spark.run("conversations", "order_id", "--limit", "2")
    assert "and more" in table


def places_of(nearest: Path, directory: Path) -> Path:
    """The left places of a file of matches, as a file of places."""
    places = directory / "places.csv"
    with nearest.open(newline="") as file, places.open("w", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(["stream", "offset"])
        writer.writerows((row["left_stream"], row["left_offset"]) for row in csv.DictReader(file))
    return places


def test_mistakes_end_with_their_codes(spark: Spark, tmp_path: Path) -> None:
    """Usage is refused before Spark starts; a name that is not there is told as everywhere."""
    sides = (spark.left, spark.right, "--on", "order_id")
    spark.refused("pairs", *sides, "--within", "soon")
    spark.refused("pairs", *sides, "--output", str(tmp_path / "rows.txt"))
    spark.refused("pairs", *sides, "--conf", "master")
    for command in (("pairs", *sides), ("as-of", *sides), ("unmatched", *sides)):
        spark.refused(*command, "--payloads", "--output", str(tmp_path / "rows.csv"))
    spark.refused("resolve", str(tmp_path / "none.csv"))
    spark.run("pairs", spark.left, "no-such-stream", "--on", "order_id", code=ExitCode.NOT_THERE)


def test_without_pyspark_the_command_says_what_to_install() -> None:
    """`relatum --help` works, and `relatum spark …` is one error of code 3."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        program = "import sys; sys.modules['pyspark'] = None; from relatum.command import main; main()"
        return subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    assert "spark" in run("--help").stdout
    assert run("spark", "pairs", "--help").returncode == 0
    urls = ("--broker", "amqp://127.0.0.1/", "--database", "postgresql://127.0.0.1/x")
    for arguments in (("backfill", "orders"), ("pairs", "a", "b", "--on", "k"), ("conversations", "k")):
        ended = run("spark", *arguments, *urls)
        assert ended.returncode == ExitCode.CONFIGURATION, ended.stderr
        assert re.fullmatch(r"error: pyspark\S* is not installed: pip install 'relatum\[spark\]'\n", ended.stderr)
