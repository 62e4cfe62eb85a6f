"""`relatum contexts`, as it is installed, and what docs/contexts.md shows of moving, unchanged."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

import relatum as package
from relatum import Broker
from relatum.contexts import MoveProgress, SerialConsumer, SerializationContexts
from relatum_cli.exits import ExitCode
from tests.acceptance._command import Relatum
from tests.support import delete_stream, wait_until
from tests.support.leases import let_last
from tests.support.place import Place
from tests.support.super_streams import super_stream as made

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "contexts.md").read_text()
COMMANDS = (DOCS / "commands.md").read_text()
PART = PAGE[PAGE.index("\n## Moving") :]

MOVE = set(re.findall(r"`(\w+)`", re.findall(r"^A move has (.*?)\. ", COMMANDS, re.DOTALL | re.MULTILINE)[0]))
"""The fields of a move for programs, as docs/commands.md names them."""

PARTITION = {"partition_id", "stream", "binding_key", "place", "state", "weight", "open_sets"}


class Crash(Exception):
    """Represents the end of a process that moves contexts."""


def crash(progress: MoveProgress) -> None:
    raise Crash


@pytest.fixture
def super_stream(broker: Broker) -> Iterator[str]:
    with made(broker, 3) as layout:
        yield layout.super_stream


@pytest.fixture
def contexts(super_stream: str, relatum: Relatum) -> Iterator[SerializationContexts]:
    with SerializationContexts(super_stream, relatum.database_url, broker=relatum.broker_url) as contexts:
        yield contexts


def test_what_the_page_shows_of_moving_works(relatum: Relatum, super_stream: str) -> None:
    """The page's Python, then its commands: at the end contexts are spread over the partitions that were added."""
    block = re.findall(r"```python\n(.*?)```", PART, re.DOTALL)[0].replace("accounts", super_stream)
    names = {"relatum": package, "DATABASE": relatum.database_url, "BROKER": relatum.broker_url}
    exec(compile(block, "docs/contexts.md", "exec"), names)
    lines = re.findall(r"^\$ relatum (contexts .*)$", PART, re.MULTILINE)[:5]
    assert [shlex.split(line)[1] for line in lines] == ["status", "move", "consolidate", "add-partition", "rebalance"]
    shown = [relatum.ok(*shlex.split(line.replace("accounts", super_stream))) for line in lines]
    assert f"{super_stream}-4" in shown[0]
    assert "Added" in shown[3]
    status = relatum.json("contexts", "status", super_stream)
    assert sorted(row["open_sets"] for row in status["partitions"]) == [0] * 5 + [1] * 2
    assert (status["header"], status["moves"]) == ("serialization_context", [])
    assert set(status) == {"super_stream", "header", "generation", "partitions", "moves"}
    assert set(status["partitions"][0]) == PARTITION


def test_contexts_are_assigned_moved_and_shown(relatum: Relatum, super_stream: str) -> None:
    """The moves with their pause go out as JSON, a dry run moves nothing, and each error is a line and its code."""
    relatum.ok("contexts", "assign", super_stream, "a", "b", "c", "--to", f"{super_stream}-0")
    [moved] = relatum.json("contexts", "move", super_stream, "a", "b", "--to", f"{super_stream}-1")
    assert (moved["contexts"], moved["state"], 0 < moved["pause_s"] < 60) == (2, "switched", True)
    assert set(moved) >= MOVE
    listed = [json.loads(line) for line in relatum.ok("contexts", "list", super_stream, "--json").splitlines()]
    assert {tuple(each) for each in listed} == {("context", "partition", "epoch", "move_id")}
    assert {each["context"]: each["partition"][-1] for each in listed} == {"a": "1", "b": "1", "c": "0"}
    rebalance = ("contexts", "rebalance", super_stream, f"{super_stream}-2")
    assert list(map(sorted, relatum.json(*rebalance, "--dry-run").values())) == [["a", "b", "c"]]
    assert "3 contexts would move" in relatum.ok(*rebalance, "--dry-run")
    assert "3 contexts in 2 moves" in relatum.ok(*rebalance)
    relatum.ok("contexts", "retire", super_stream, f"{super_stream}-1")
    refused = relatum.run("contexts", "retire", super_stream, f"{super_stream}-2")
    assert (refused.returncode, refused.stderr.count("\n")) == (7, 1)
    delete_stream(relatum.broker_url, f"{super_stream}-1")
    assert relatum.run("contexts", "show", super_stream, "nobody").returncode == 6


def test_looking_writes_nothing(relatum: Relatum, super_stream: str, place: Place) -> None:
    """Looking at a super stream without contexts says that nothing is placed, and writes nothing."""
    for command in (("status",), ("list",), ("moves",), ("show", "a")):
        ended = relatum.run("contexts", command[0], super_stream, *command[1:])
        assert (ended.returncode, ended.stdout) == (ExitCode.NOT_THERE, ""), ended.stderr
        assert f"super stream {super_stream!r} is not in the database" in ended.stderr
    assert place.sql("SELECT * FROM relatum.super_streams") == []


def test_a_move_that_was_left_is_seen_and_gone_on_with(
    relatum: Relatum, super_stream: str, contexts: SerializationContexts, engine: sa.Engine
) -> None:
    """Moves that nobody ended are listed; one is completed, and one taken back, by the command."""
    contexts.assign(["a", "b"], f"{super_stream}-0")
    for name in "ab":
        with pytest.raises(Crash):
            contexts.move(name, f"{super_stream}-1", progress=crash)
    let_last(engine)  # Or the process that moves its contexts takes it over.
    first, second = relatum.json("contexts", "moves", super_stream)
    assert (first["state"], first["contexts"], first["pause_s"]) == ("fencing", 1, None)
    numbers = [str(move["move_id"]) for move in (first, second)]
    refused = relatum.run("contexts", "move", super_stream, "a", "--to", f"{super_stream}-2")
    assert refused.returncode == 7
    assert f"move {numbers[0]}" in refused.stderr
    half = relatum.run("contexts", "abort", super_stream, numbers[0], "99", "--reason", "no room")
    assert (half.returncode, half.stdout) == (6, "")
    assert half.stderr.startswith(f"done before the error: {numbers[0]}\n")
    [aborted] = relatum.json("contexts", "abort", super_stream, numbers[0])
    assert (aborted["state"], aborted["reason"]) == ("aborted", "no room")
    assert "1 context in 1 move." in relatum.ok("contexts", "resume", super_stream)
    latest = relatum.ok("contexts", "moves", super_stream, "--latest", "2")
    assert latest.index("switched") < latest.index("aborted")
    assert [contexts.assignment_of(name).partition[-1] for name in "ab"] == ["0", "1"]


def test_a_line_of_a_file_is_one_name(
    relatum: Relatum, super_stream: str, contexts: SerializationContexts, tmp_path: Path
) -> None:
    """Only a newline ends a name: others may be part of it."""
    names = ["a", "a\u2028b", "b"]
    contexts.assign(names, f"{super_stream}-0")
    file = tmp_path / "names"
    file.write_text("a\u2028b\n", encoding="utf-8")
    relatum.ok("contexts", "move", super_stream, "--file", str(file), "--to", f"{super_stream}-1")
    assert [contexts.assignment_of(name).partition[-1] for name in names] == ["0", "1", "0"]


def test_consumers_are_shown_and_forgotten(relatum: Relatum, super_stream: str) -> None:
    """An operator sees how far each name is in each partition; a name is forgotten once its members are gone."""
    assert "no serial consumers" in relatum.ok("contexts", "consumers", super_stream)
    with SerialConsumer(super_stream, "billing", broker=relatum.broker, database=relatum.database_url) as consumer:
        wait_until(lambda: all(each.holder for each in consumer.status().partitions), what="all partitions taken")
        [line] = relatum.ok("contexts", "consumers", super_stream, "--json").splitlines()
        shown = json.loads(line)
        assert (shown["consumer"], shown["lag"], len(shown["partitions"])) == ("billing", 0, 3)
        assert relatum.run("contexts", "forget", super_stream, "billing").returncode == 7
    assert "billing" in relatum.ok("contexts", "consumers", super_stream)
    relatum.ok("contexts", "forget", super_stream, "billing")
    assert relatum.run("contexts", "forget", super_stream, "billing").returncode == 6
