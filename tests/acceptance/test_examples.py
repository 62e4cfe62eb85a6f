"""Programs that README and `examples/` show, run as they are, and the commands that documents show."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import psycopg
import pytest

from relatum import Broker
from relatum.superstreams import delete_super_stream
from tests.acceptance._command import Relatum, run
from tests.support import declare_stream, delete_stream, publish_plain, run_python
from tests.support.super_streams import delete_by_hand

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
STREAMS = ["orders", "invoices", "parcels", "lines", "mails", "requests", "replies"]
STREAMS += [f"example-{name}" for name in ("orders", "payments", "readings", "alarms", "bookings", "invoices")]
STREAMS += [f"example-{name}" for name in ("flights", "planes", "weather")]
SUPER_STREAMS = {"example-affinity": 3}

PRINTED: dict[str, list[str]] = {
    "publisher": ["orders@0", "invoices@0", "parcels@0"],
    "affinity_sets.py": [
        "invoice 17 is in one partition: 4 chairs, 1 table, total: 830 EUR",
        "invoice 18 is in one partition: 4 chairs, 1 table, total: 830 EUR",
        "open sets: 0",
        "the same partition: True",
    ],
    "async_orders.py": ["ordered: 4 chairs", "paid: 480 EUR"],
    "async_worker.py": [
        "4 chairs: paid 480",
        "12 EUR: absent: this message has no value of order (no header:order): nothing was searched",
        "offset 2 failed: invalid literal for int() with base 10: b'much'",
    ],
    "collector.py": [
        "order: succeeded",
        "payment: succeeded",
        "order: failed, 'a lot' is not an amount",
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


def example(name: str) -> str:
    blocks = (re.search(rf"<!-- example:{name} -->\n```\w*\n(.*?)```", each.read_text(), re.S) for each in DOCUMENTS)
    return next(found[1] for found in blocks if found)


def printed(name: str, environment: dict[str, str]) -> list[str]:
    """The lines that a program prints: a file of `examples/`, or a block of a document."""
    program = [str(EXAMPLES / name)] if name.endswith(".py") else ["-c", example(name)]
    ended = run_python("-W", "error", *program, env=environment)
    return [line.strip() for line in ended.stdout.splitlines()]


def _delete(amqp_url: str) -> None:
    for name in STREAMS:
        delete_stream(amqp_url, name)
    for name, partitions in SUPER_STREAMS.items():
        delete_by_hand(amqp_url, name, *(f"{name}-{place}" for place in range(partitions)))


@pytest.fixture
def environment(amqp_url: str, stream_url: str, database_url: str) -> Iterator[dict[str, str]]:
    """The variables that programs read, and none of their streams there yet."""
    _delete(amqp_url)
    yield Relatum(amqp_url, stream_url, database_url).environment
    _delete(amqp_url)


def test_each_example_is_run() -> None:
    """The table below has each file of `examples/`; the first two programs that a reader sees stay short."""
    assert {*PRINTED, "contexts.py"} - {"publisher"} == {path.name for path in EXAMPLES.glob("*.py")}
    for name in ("publisher", "consumer"):
        assert len([line for line in example(name).splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("name", PRINTED)
def test_a_program_prints_what_it_should(name: str, environment: dict[str, str]) -> None:
    """Each ends well, without a warning, and prints what its messages say."""
    assert printed(name, environment) == PRINTED[name]


def test_consumer_and_sql_find_what_the_publisher_published(environment: dict[str, str], database_url: str) -> None:
    """The consumer finds what belongs to the order; the SQL of README and docs finds it, too, and its invoice."""
    printed("publisher", environment)
    *related, parcel, second = printed("consumer", environment)
    assert related == ["invoices@0 480 EUR", "parcels@0 32 kg"]
    assert re.fullmatch(r"the parcel left 0:00:\d\d\.\d+ after the order", parcel)
    assert second == "a second parcel? no"
    statements = re.findall(r"```sql\n(SELECT.*?)```", README + (ROOT / "docs" / "sql.md").read_text(), re.DOTALL)
    with psycopg.connect(database_url) as connection:
        rows, same, joined = (connection.execute(statement).fetchall() for statement in statements[:3])
    assert sorted((stream, offset) for stream, offset, _ in rows) == [("invoices", 0), ("orders", 0), ("parcels", 0)]
    assert sorted(same) == sorted(rows)
    assert joined == [(0, 0)]


def test_the_consumer_says_so_where_there_is_no_such_order(environment: dict[str, str], relatum: Relatum) -> None:
    """Where the publisher has not run, the consumer ends with one line, and no traceback."""
    declare_stream(relatum.broker_url, "orders")
    publish_plain(relatum.broker_url, "orders", [(b"4 chairs", {"order_id": 4712})])
    relatum.ok("keys", "add", "order_id")
    relatum.ok("backfill", "orders")
    words = [sys.executable, "-c", example("consumer")]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == ["order 4711: absent "]


def test_the_first_look_of_a_new_user_is_answered_as_shown(
    environment: dict[str, str], amqp_url: str, stream_url: str, empty_database_url: str
) -> None:
    """`migrate`, `keys add`, `find`: nothing is recorded, which is said, with what to do."""
    relatum = Relatum(amqp_url, stream_url, empty_database_url)
    relatum.ok("migrate")
    relatum.ok("keys", "add", "order_id", "host")
    ended = relatum.run("find", "order_id", "4711")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.split() == example("first-look").split()


def test_an_existing_service_is_answered_as_shown(environment: dict[str, str], relatum: Relatum, amqp_url: str) -> None:
    """A plain publisher with correlation ids, the commands shown, and a pika consumer: each reply finds its request."""
    for name in ("requests", "replies"):
        declare_stream(amqp_url, name)
    pairs = [(b"a?", b"b?"), (b"a!", b"b!")]
    for stream, bodies in zip(("requests", "replies"), pairs, strict=True):
        named = [(body, pika.BasicProperties(correlation_id=body.decode()[0])) for body in bodies]
        publish_plain(amqp_url, stream, named)
    page = (ROOT / "docs" / "existing-service.md").read_text()
    commands = page.partition("```\n")[2].partition("```")[0]
    migrate, define, record = (shlex.split(line)[1:] for line in commands.splitlines())
    relatum.ok(*migrate)
    relatum.ok(*define)
    with relatum.start(*record) as recorder:
        try:
            for stream in ("requests", "replies"):
                relatum.await_recorded(stream)
            assert printed("existing", environment) == ["a! answers a?", "b! answers b?"]
        finally:
            recorder.terminate()
            recorder.communicate(timeout=90)


def test_a_plane_keeps_its_order_as_shown(environment: dict[str, str], amqp_url: str) -> None:
    """Two messages come from the partition the context was in, then two from the one it was moved to."""
    try:
        moved, *flown = printed("contexts.py", environment)
    finally:
        delete_super_stream(Broker(amqp_url, stream_url=environment.get("RELATUM_STREAM_URL")), "flights")
    assert re.fullmatch(r"moved from flights-\d to flights-2, and no other context waited", moved)
    assert [line.partition(" ")[2] for line in flown] == ["EWR IAH", "IAH DEN", "DEN SFO", "SFO EWR"]
    assert [line.partition(" ")[0] for line in flown[2:]] == ["flights-2"] * 2


SPARK = """
import runpy, sys
for words in {programs!r}:
    print("---", flush=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""
"""Runs programs one after the other in the one JVM that pyspark starts, which takes longer than any of them."""


@pytest.mark.own_jvms
@pytest.mark.timeout(900)
def test_spark_works_as_shown(environment: dict[str, str], relatum: Relatum, amqp_url: str) -> None:
    """It finds each order with its invoice; a back-fill and joins find pairs; flights are joined as by pandas."""
    printed("publisher", environment)
    for stream, count in (("lines", 3), ("mails", 2)):
        declare_stream(amqp_url, stream)
        publish_plain(amqp_url, stream, [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(count)])
    words = [
        ["related.py"],
        ["backfill.py", "lines", "mails"],
        ["joins.py", "lines", "mails", "order_id"],
        ["flights.py", "2000"],
    ]
    programs = [[str(EXAMPLES / "spark" / name), *more] for name, *more in words]
    ended = run_python("-c", SPARK.format(programs=programs), timeout_s=840, env=environment)
    _, related, filled, joined, flights = (each.splitlines() for each in ended.stdout.split("---\n"))
    assert any(re.fullmatch(r"\|\s*0\|20.*\|\s*4711\|\s*32 kg\|", line) for line in related), related
    assert related[-1] == "4711 4 chairs 480 EUR"
    told = ["lines: 3 messages read, 3 rows written", "mails: 2 messages read, 2 rows written"]
    assert [line.rpartition(" in ")[0] for line in filled] == told
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in joined if line.startswith("|o")]
    pairs = [["o0", "0", "0"], ["o1", "1", "1"]]
    assert rows == [*pairs, ["o2", "2", "absent"], *pairs, ["o2", "2", "NULL"]]
    assert flights[-1].endswith("with their plane: as pandas")


def test_commands_shown_exist() -> None:
    """Each `relatum …` that README and docs show is a command, with the options it is shown with."""
    # Comments are left out, and so are pictures in text.
    pages = (re.sub(r"^```text$.*?^```$", "", each.read_text(), flags=re.S | re.M) for each in DOCUMENTS)
    lines = (line for page in pages for line in page.splitlines())
    shown = {tuple(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("relatum ")}
    assert {words[0] for words in shown} >= {"migrate", "keys", "record", "status"}
    by_command: dict[tuple[str, ...], set[str]] = {}
    for words in shown:
        has_own_commands = words[0] in ("keys", "expect", "super-stream", "affinity", "contexts")
        command = words[:2] if has_own_commands else words[:1]
        by_command.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    for command, options in by_command.items():
        described = run(*command, "--help")
        assert described.returncode == 0, described.stderr
        for option in options:
            assert option in described.stdout


def test_documents_link_to_what_exists() -> None:
    """No link between README, CHANGELOG and docs leads nowhere."""
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"
