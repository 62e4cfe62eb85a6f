"""What the README shows is run, as it stands there."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pika
import psycopg
import pytest

from relatum.superstreams import delete_super_stream
from tests.acceptance._command import Relatum, run
from tests.support import declare_stream, delete_stream, publish_plain

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
STREAMS = ("orders", "invoices", "parcels", "lines", "mails", "requests", "replies")


def example(name: str) -> str:
    """The block of Python the README marks by that name."""
    found = re.search(rf"<!-- example:{name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no example {name!r}"
    return found[1]


def run_example(name: str, environment: dict[str, str], *, warnings: str = "error", limit_s: float = 400) -> list[str]:
    """Run an example as a program of its own; return the lines it printed."""
    ended = subprocess.run(
        [sys.executable, "-W", warnings, "-c", example(name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture
def environment(amqp_url: str, stream_url: str, database_url: str) -> Iterator[dict[str, str]]:
    """The two variables of the README, and streams of those names that are not there yet."""
    for name in STREAMS:
        delete_stream(amqp_url, name)
    yield Relatum(amqp_url, stream_url, database_url).environment
    for name in STREAMS:
        delete_stream(amqp_url, name)


@pytest.mark.parametrize("name", ["publisher", "consumer"])
def test_examples_have_twelve_lines_at_most(name: str) -> None:
    """The first thing a reader sees stays short."""
    assert len([line for line in example(name).splitlines() if line.strip()]) <= 12


def test_publisher_and_consumer_work_as_shown(environment: dict[str, str]) -> None:
    """The publisher prints where each message lies; the consumer finds what belongs to the order."""
    assert run_example("publisher", environment) == ["orders@0", "invoices@0", "parcels@0"]
    *related, parcel, second = run_example("consumer", environment)
    assert related == ["invoices@0 480 EUR", "parcels@0 32 kg"]
    assert re.fullmatch(r"the parcel left 0:00:\d\d\.\d+ after the order", parcel)
    assert second == "a second parcel? no"


def test_the_consumer_says_so_where_there_is_no_such_order(
    environment: dict[str, str], relatum: Relatum, amqp_url: str
) -> None:
    """Where the publisher has not run, the consumer ends with one line, and no traceback."""
    declare_stream(amqp_url, "orders")
    publish_plain(amqp_url, "orders", [(b"4 chairs", pika.BasicProperties(headers={"order_id": 4712}))])
    with relatum.start("record", "orders", "--keys", "order_id") as recorder:
        try:
            relatum.await_recorded("orders")
        finally:
            recorder.terminate()
            recorder.communicate(timeout=90)
    ended = subprocess.run(
        [sys.executable, "-c", example("consumer")], env=environment, capture_output=True, text=True, check=False
    )
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
    shown = re.search(r"<!-- example:first-look -->\n```\n(.*?)```", README, re.DOTALL)
    assert shown, "the README shows it"
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.split() == shown[1].split()


def test_an_existing_service_gets_an_answer_as_shown(environment: dict[str, str], amqp_url: str) -> None:
    """A plain publisher with correlation ids, the commands shown, and a pika consumer: each reply finds its request."""
    for name in ("requests", "replies"):
        declare_stream(amqp_url, name)
    pairs = [(b"a?", b"b?"), (b"a!", b"b!")]
    for stream, bodies in zip(("requests", "replies"), pairs, strict=True):
        named = [(body, pika.BasicProperties(correlation_id=body.decode()[0])) for body in bodies]
        publish_plain(amqp_url, stream, named)
    shown = re.search(r"## For an existing service.*?```\n(.*?)```", README, re.DOTALL)
    assert shown, "the README shows the commands"
    migrate, define, record = (shlex.split(line)[1:] for line in shown[1].splitlines())
    relatum = Relatum(
        environment["RELATUM_BROKER_URL"], environment["RELATUM_STREAM_URL"], environment["RELATUM_DATABASE_URL"]
    )
    relatum.ok(*migrate)
    relatum.ok(*define)
    with relatum.start(*record) as recorder:
        try:
            for stream in ("requests", "replies"):
                relatum.await_recorded(stream)
            assert run_example("existing", environment) == ["a! answers a?", "b! answers b?"]
        finally:
            recorder.terminate()
            recorder.communicate(timeout=90)


def test_groups_come_whole_as_shown(environment: dict[str, str]) -> None:
    """Two groups put among each other come one after the other, each in its order."""
    assert run_example("groups", environment) == ["4 chairs, 1 table, 2 lamps", "4 CHAIRS, 1 TABLE"]


def test_the_collector_tells_each_outcome_as_shown(environment: dict[str, str]) -> None:
    """The publisher learns of each of its messages what became of it."""
    printed = run_example("collector", environment)
    assert [line.strip() for line in printed] == ["succeeded", "failed no such address", "succeeded"]


def test_a_plane_keeps_its_order_as_shown(environment: dict[str, str], amqp_url: str) -> None:
    """Two messages come from the partition the context was in, then two from the one it was moved to."""
    try:
        moved, *flown = run_example("contexts", environment)
    finally:
        delete_super_stream(amqp_url, "flights", stream_url=environment.get("RELATUM_STREAM_URL"))
    assert re.fullmatch(r"moved from flights-\d to flights-2, and nothing else waited", moved)
    assert [line.partition(" ")[2] for line in flown] == ["EWR IAH", "IAH DEN", "DEN SFO", "SFO EWR"]
    assert [line.partition(" ")[0] for line in flown[2:]] == ["flights-2"] * 2


@pytest.mark.timeout(900)
def test_spark_works_as_shown(environment: dict[str, str]) -> None:
    """Spark shows the stream's message, finds all recorded already, and gives each order with its invoice."""
    run_example("publisher", environment)
    printed = run_example("spark", environment, warnings="default")
    assert any(re.fullmatch(r"\|\s*0\|20.*\|\s*4711\|\s*32 kg\|", line) for line in printed), printed
    assert printed[-1] == "4711 4 chairs 480 EUR"


def shown_commands() -> set[tuple[str, ...]]:
    """Each line `relatum …` of README and docs, as words; comments are left out, and pictures in text."""
    pages = (re.sub(r"^```text$.*?^```$", "", each.read_text(), flags=re.S | re.M) for each in DOCUMENTS)
    lines = (line for page in pages for line in page.splitlines())
    return {tuple(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("relatum ")}


def test_commands_shown_exist() -> None:
    """Each `relatum …` that README and docs show is a command, with the options it is shown with."""
    shown = shown_commands()
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


def test_sql_shown_gives_what_it_should(environment: dict[str, str], database_url: str) -> None:
    """The SQL of README and docs runs; it gives the messages of the order, and the order beside its invoice."""
    run_example("publisher", environment)
    statements = re.findall(r"```sql\n(SELECT.*?)```", README + (ROOT / "docs" / "sql.md").read_text(), re.DOTALL)
    with psycopg.connect(database_url) as connection:
        rows, same, joined = (connection.execute(statement).fetchall() for statement in statements[:3])
    assert sorted((stream, offset) for stream, offset, _ in rows) == [("invoices", 0), ("orders", 0), ("parcels", 0)]
    assert sorted(same) == sorted(rows)
    assert joined == [(0, 0)]
