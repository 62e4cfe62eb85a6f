"""What the README shows is run, as it stands there."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.acceptance._command import Relatum, run
from tests.support import delete_stream

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STREAMS = ("orders", "invoices", "parcels")


def example(name: str) -> str:
    """The block of Python the README marks by that name."""
    found = re.search(rf"<!-- example:{name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no example {name!r}"
    return found[1]


def run_example(name: str, environment: dict[str, str]) -> list[str]:
    """Run an example as a program of its own; return the lines it printed."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", example(name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
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


def test_commands_shown_exist() -> None:
    """Each `relatum …` the README shows is a command, with the options it is shown with."""
    shown = re.findall(r"^relatum (\w+)(.*?)(?:#.*)?$", README, re.MULTILINE)
    assert {command for command, _ in shown} >= {"migrate", "keys", "record", "status"}
    for command, arguments in shown:
        described = run(command, "--help")
        assert described.returncode == 0, described.stderr
        for option in re.findall(r"--[\w-]+", arguments):
            assert option in described.stdout


def test_documents_link_to_what_exists() -> None:
    """No link between README, CHANGELOG and docs leads nowhere."""
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"


def test_the_picture_of_the_table_is_what_the_view_gives(environment: dict[str, str], database_url: str) -> None:
    """The README's SQL runs, and gives the rows of the table shown below it."""
    run_example("publisher", environment)
    [statement] = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(statement).fetchall()
    assert sorted((stream, offset) for stream, offset, _ in rows) == sorted((name, 0) for name in STREAMS)
