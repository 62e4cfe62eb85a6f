"""The installed commands of contexts, of groups and of collectors, and what docs/contexts.md shows of moving."""

import json
import re
import shlex
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.collecting import Collected, OutcomeStatus
from relatum.collecting._collector_core import Advance, Result
from relatum.contexts import MoveProgress, SerialConsumer, SerializationContexts
from relatum.membership import GROUP_KEY
from relatum_cli.exits import ExitCode
from relatum_consumer import GroupConsumer, Relations
from tests.acceptance._command import Relatum
from tests.support import delete_stream, wait_until
from tests.support.collectors import StoreMember
from tests.support.groups import group_id, of_group, whole_group
from tests.support.leases import let_last
from tests.support.pages import blocks_of, names_there, run, text_of
from tests.support.place import Place

FIELDS = re.findall(r"^A move has (.*?)\. ", text_of("commands.md"), re.DOTALL | re.MULTILINE)[0]
MOVE = set(re.findall(r"`(\w+)`", FIELDS))
"""The fields of a move for programs, as docs/commands.md names them."""

PARTITION = {"partition_id", "stream", "binding_key", "place", "state", "weight", "open_sets"}


class Crash(Exception):
    """Represents the end of a process that moves contexts."""


def crash(progress: MoveProgress) -> None:
    raise Crash


def test_what_the_page_shows_of_moving_works(relatum: Relatum, super_stream: str) -> None:
    """The page's Python, then its commands: at the end contexts are spread over the partitions that were added."""
    renamed = {f"accounts{end}": f"{super_stream}{end}" for end in ("", "-0", "-1", "-2")}
    with names_there(relatum.broker_url, relatum.database_url) as names:
        run("contexts.md", blocks_of("contexts.md", "Moving", renamed)[0], names)
    lines = re.findall(r"^\$ relatum (contexts .*)$", text_of("contexts.md", "Moving"), re.MULTILINE)[:5]
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


WHOLE, LACKING, UNSOUND, SECOND, UNKNOWN = 1, 2, 3, 4, 5
HOUR_US = 3_600_000_000

MESSAGES = [
    *whole_group(WHOLE, 2),
    of_group(LACKING, 1, time_us=HOUR_US),
    of_group(LACKING, 4, time_us=2 * HOUR_US),
    *whole_group(UNSOUND, 2),
    of_group(UNSOUND, 3),
    *whole_group(SECOND, 1),
]


@pytest.fixture
def stream(place: Place) -> str:
    """A recorded stream with two sound groups, one that lacks messages, and one with a number past its last."""
    place.put(*MESSAGES)
    place.record(keys=[GROUP_KEY])
    return place.stream


def test_incomplete_groups_are_listed(relatum: Relatum, stream: str) -> None:
    """Incomplete groups older than an hour, or than was said, are listed with what they lack and where they are."""
    (lacking,) = relatum.json("groups")
    assert (lacking["group_id"], lacking["missing"], lacking["seen"]) == (group_id(LACKING), [[2, 3]], 2)
    assert (lacking["first_seen"], lacking["last_seen"]) == ("1970-01-01T01:00:00+00:00", "1970-01-01T02:00:00+00:00")
    assert lacking["places"] == [{"stream": stream, "offset": 2}, {"stream": stream, "offset": 3}]
    every = relatum.json("groups", stream, "--older-than", "0")
    assert [each["group_id"] for each in every] == [group_id(LACKING), group_id(UNSOUND)]
    assert [each["anomalies"] for each in every] == [[], ["past_last"]]
    shown = relatum.ok("groups", stream, "--older-than", "0s")
    assert group_id(LACKING) in shown
    assert "2–3" in shown
    assert relatum.run("groups", "nobody-knows-it").returncode == ExitCode.NOT_THERE
    assert all(each["is_proven"] for each in every)
    recorded = relatum.json("groups", "--older-than", "0", "--recorded")
    assert recorded == [each | {"is_proven": False} for each in every]


def test_one_group_is_shown(relatum: Relatum, stream: str) -> None:
    """A group is shown with its position and messages, and the exit code says whether it is whole."""
    for number, code, words in (
        (WHOLE, ExitCode.OK, stream),
        (LACKING, ExitCode.NOT_YET, "2–3"),
        (UNKNOWN, ExitCode.NOT_THERE, ""),
        (UNSOUND, ExitCode.DIFFERENT, ""),
    ):
        ended = relatum.run("groups", stream, "--group", group_id(number))
        assert (ended.returncode, words in ended.stdout) == (code, True), ended.stderr
    document = relatum.json("groups", "--group", group_id(LACKING))
    assert (document["is_complete"], document["next_sequence"], document["last_sequence"]) == (False, 2, None)
    messages = [(each["sequence"], each["last"], each["offset"]) for each in document["messages"]]
    assert messages == [(1, False, 2), (4, False, 3)]


def test_a_consumer_is_shown(relatum: Relatum, stream: str, place: Place) -> None:
    """A consumer of groups is shown with its groups by state, its members, and how far each stream was read."""
    consumer = GroupConsumer("billing", member="host-1", prefetch=2, lease_s=60)
    with (
        Relations(place.amqp, place.database) as relations,
        relations.groups(stream, consumer=consumer, on_conflict="skip") as groups,
    ):
        next(groups).acknowledge()
        place.put(b"later", b"and later")
        next(groups)
        status = relatum.json("groups", "--consumer", "billing")
    assert status["counts"] == {"open": 1, "ready": 0, "claimed": 1, "done": 1, "dead": 1}
    assert (status["consumer"], status["streams"], status["order"]) == ("billing", [stream], "logical")
    assert status["sources"] == [{"stream": stream, "scanned_to": 8, "lag_offsets": 2}]
    [member] = status["members"]
    assert (member["holder"], member["claimed"], member["is_alive"]) == ("host-1", 1, True)
    assert status["oldest_open_at"]
    assert status["oldest_waiting_at"]
    shown = relatum.ok("groups", "--consumer", "billing")
    assert f"{stream}\t8\t2\n" in shown
    assert "host-1" not in shown, "it has given back what it had"
    assert relatum.run("groups", "--consumer", "nobody").returncode == ExitCode.NOT_THERE


BULK = 7


@pytest.fixture
def collected(place: Place) -> None:
    """A collector of six out of ten messages: each in another state, one of no type, one of a type nobody runs."""
    place.put(*(b"%d" % n for n in range(10)))
    stream, member = place.stream, StoreMember(place.database, keep_s=3600)
    member.follow(stream, 0)
    kinds = ("succeeded", "failed", "dead", "forwarded", "collected")
    entries = [Collected(MessageId(stream, offset), kind, "order", 1, None) for offset, kind in enumerate(kinds)]
    member.add([*entries, Collected(MessageId(stream, 9), "other", "invoice", 1, None)])
    member.add([], Advance(stream, 0, 6, passed_over=1))
    member.forward(BULK, [entry.place for entry in entries[:4]])
    reasons = dict(zip(entries[:3], (None, "no such customer", "took too long"), strict=True))
    member.finish(BULK, [Result(each.place, OutcomeStatus(each.message_id), why) for each, why in reasons.items()])


@pytest.mark.usefixtures("collected")
def test_outcomes_are_shown_and_end_with_what_needs_doing(relatum: Relatum) -> None:
    """The exit code is that of a failure, else of an unknown message, else of one that is not final."""
    succeeded = relatum.run("outcome", "succeeded")
    assert succeeded.returncode == ExitCode.OK, succeeded.stderr
    assert "billing" in succeeded.stdout
    codes = {
        ("forwarded",): ExitCode.NOT_YET,
        ("collected", "succeeded"): ExitCode.NOT_YET,
        ("nobody", "forwarded"): ExitCode.NOT_THERE,
        ("failed", "nobody"): ExitCode.UNSUCCESSFUL,
        ("dead",): ExitCode.UNSUCCESSFUL,
    }
    for ids, code in codes.items():
        assert relatum.run("outcome", *ids).returncode == code, ids
    document = relatum.json("outcome", "dead", "nobody")
    shown = [(each["message_id"], each["status"], each["is_final"]) for each in document]
    assert shown == [("dead", "dead", True), ("nobody", "unknown", False)]
    assert document[0]["attempts"] == 1
    assert relatum.json("outcome", "dead", "--collector", "billing")[0]["status"] == "dead"
    misspelt = relatum.run("outcome", "dead", "--collector", "biling")
    assert misspelt.returncode == ExitCode.NOT_THERE
    assert "'biling'" in misspelt.stderr


@pytest.mark.usefixtures("collected")
def test_status_shows_collectors(relatum: Relatum, stream_name: str) -> None:
    """A collector's status has members, positions with their lag, counts by state, and types without an executor."""
    [status] = relatum.json("status", "--collector")
    assert (status["collector"], status["keep_s"]) == ("billing", 3600)
    assert status["counts"] == {"collected": 2, "forwarded": 1, "succeeded": 1, "failed": 1, "dead": 1}
    assert status["unattended"] == {"invoice": 1}
    assert status["oldest_unfinished_at"]
    [source] = status["sources"]
    assert (source["stream"], source["position"], source["lag_offsets"]) == (stream_name, 6, 4)
    assert source["passed_over"] == 1
    [member] = status["members"]
    assert member["is_alive"]
    assert source["follower"] == member["holder"]
    assert relatum.json("status", "--collector", "billing") == [status]
    shown = relatum.ok("status", "--collector", "billing")
    assert f"{stream_name}\t6\t4\t" in shown
    assert "invoice" in shown
    assert relatum.run("status", "--collector", "nobody").returncode == ExitCode.NOT_THERE


@pytest.mark.usefixtures("collected")
def test_prune_forgets_what_was_finished_long_ago(relatum: Relatum, place: Place) -> None:
    """Pruning forgets just the outcomes that are older than they are kept, which are unknown afterwards."""
    assert relatum.json("prune") == {}
    finished = "UPDATE relatum.collected_messages SET finished_at = now() - interval '61 minutes'"
    place.sql(f"{finished} WHERE message_id = 'succeeded'")
    assert relatum.json("prune") == {"": 1}
    assert relatum.run("outcome", "succeeded").returncode == ExitCode.NOT_THERE
    assert relatum.run("outcome", "failed").returncode == ExitCode.UNSUCCESSFUL
