"""The programs in `examples/` run as they are."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance._command import Relatum
from tests.support import declare_stream, delete_stream, publish_plain, unique_name
from tests.support.spark import JDBC_JAR
from tests.support.spark_python import spark_python
from tests.support.super_streams import delete_by_hand

EXAMPLES = Path(__file__).parents[2] / "examples"
SPARK_SUBMIT = Path(sys.executable).with_name("spark-submit")
STREAMS = (
    "example-orders",
    "example-payments",
    "example-readings",
    "example-alarms",
    "example-bookings",
    "example-invoices",
)
SUPER_STREAMS = {"example-affinity": 3}
SPARK_STREAMS = ("example-flights", "example-planes", "example-weather")

PRINTED = {
    "affinity_sets.py": [
        "invoice 17 lies in one partition: 4 chairs, 1 table, total: 830 EUR",
        "invoice 18 lies in one partition: 4 chairs, 1 table, total: 830 EUR",
        "open sets: 0",
        "the same partition: True",
    ],
    "async_orders.py": ["ordered: 4 chairs", "paid: 480 EUR"],
    "async_worker.py": [
        "4 chairs: paid 480",
        "12 EUR: absent: this message has no value of order (no header:order): nothing was looked for",
        "offset 2 failed: invalid literal for int() with base 10: b'much'",
    ],
    "collector.py": [
        "order: succeeded",
        "payment: succeeded",
        "order: failed, 'a lot' is no amount",
        "order: succeeded",
        "booked, order: 500",
        "booked, payment: 480",
    ],
    "message_groups.py": [
        "missing: ((3, 3),) complete: False",
        "Invoice 2026-17",
        "4 chairs, 480 EUR",
        "1 table, 350 EUR",
        "delivery, 40 EUR",
        "total: 870 EUR",
        "Invoice 2026-18 / 1 lamp, 60 EUR",
    ],
    "sensors.py": [
        "12:00:30 pump-7: 25 °C",
        "12:01:00 pump-7: 48 °C",
        "12:01:30 pump-7: 61 °C",
        "before the alarm: 48 °C",
    ],
}


def _delete(amqp_url: str) -> None:
    for name in (*STREAMS, *SPARK_STREAMS):
        delete_stream(amqp_url, name)
    for name, partitions in SUPER_STREAMS.items():
        delete_by_hand(amqp_url, name, *(f"{name}-{place}" for place in range(partitions)))


@pytest.fixture
def environment(amqp_url: str, stream_url: str, database_url: str) -> Iterator[dict[str, str]]:
    """The variables the examples read, and none of their streams there yet."""
    _delete(amqp_url)
    yield Relatum(amqp_url, stream_url, database_url).environment
    _delete(amqp_url)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_prints_what_it_should(name: str, environment: dict[str, str]) -> None:
    """Each example ends well and prints what its messages say."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == PRINTED[name]


@pytest.mark.timeout(900)
def test_spark_agrees_with_pandas(environment: dict[str, str]) -> None:
    """The flights' example joins as pandas' `merge` and `merge_asof` do."""
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "spark" / "flights.py", "2000"],
        env=environment | {"PYSPARK_PYTHON": str(spark_python())},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("with their plane: as pandas")


@pytest.mark.timeout(900)
def test_spark_back_fills_and_joins_by_spark_submit(environment: dict[str, str], amqp_url: str) -> None:
    """The back-fill records both streams; the joins then find pairs, what has none, and the nearest in time."""
    pythons = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": str(spark_python())}

    def submit(program: str, *arguments: str) -> str:
        ended = subprocess.run(
            [SPARK_SUBMIT, "--master", "local[2,4]", "--jars", JDBC_JAR, EXAMPLES / "spark" / program, *arguments],
            env=environment | pythons,
            capture_output=True,
            text=True,
            timeout=420,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    relatum = Relatum(*(environment[f"RELATUM_{name}_URL"] for name in ("BROKER", "STREAM", "DATABASE")))
    relatum.ok("keys", "add", "order_id")
    left, right = unique_name("left"), unique_name("right")
    for stream, count in ((left, 3), (right, 2)):
        declare_stream(amqp_url, stream)
        publish_plain(amqp_url, stream, [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(count)])

    filled = submit("backfill.py", left, right).splitlines()
    assert [line.rpartition(" in ")[0] for line in filled] == [
        f"{left}: 3 messages read, 3 rows written",
        f"{right}: 2 messages read, 2 rows written",
    ]
    cells = [tuple(part.strip() for part in line.strip("|").split("|"))
             for line in submit("joins.py", left, right, "order_id").splitlines() if line.startswith("|o")]  # fmt: skip
    assert cells == [
        ("o0", "0", "0"), ("o1", "1", "1"),
        ("o2", "2", "absent"),
        ("o0", "0", "0"), ("o1", "1", "1"), ("o2", "2", "NULL"),
    ]  # fmt: skip
    for stream in (left, right):
        delete_stream(amqp_url, stream)
