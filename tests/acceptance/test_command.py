"""The installed command, in processes of its own, on real servers."""

import json
import re
import signal
import time
import urllib.request
from typing import Any

import pika
import pytest

from relatum import Broker
from relatum.local import LocalRabbitMQ
from relatum.superstreams import Layout, describe_super_stream
from relatum_cli.app import COMMANDS
from relatum_cli.exits import ExitCode
from tests.acceptance._command import LIMIT_S, Relatum, run, run_installed
from tests.support import broker_connection, unique_name, wait_until
from tests.support.place import Place
from tests.support.ports import free_port
from tests.support.super_streams import delete_by_hand

CANARY = "canary-password"


def orders(*numbers: int) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"order %d" % number, {"order_id": number, "relatum_time": number * 10**6}) for number in numbers]


def ends(relatum: Relatum, code: ExitCode, *commands: str) -> None:
    assert {line: relatum.run(*line.split()).returncode for line in commands} == dict.fromkeys(commands, code)


def test_the_installed_command_lists_each_command() -> None:
    """By the console script, and nothing is said on stderr."""
    listed = run_installed("--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert all(f" {name} " in listed.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nonsense"], ExitCode.USAGE),
        (["status", "--nonsense"], ExitCode.USAGE),
        (["status"], ExitCode.CONFIGURATION),
        (["keys", "list"], ExitCode.CONFIGURATION),
        (["keys", "list", "--database", f"mysql://user:{CANARY}@127.0.0.1/x"], ExitCode.CONFIGURATION),
        (["keys", "list", "--database", f"postgresql://user:{CANARY}@127.0.0.1:1/x"], ExitCode.DATABASE),
        (["keys", "list", "--database", f"postgresql://user:{CANARY}@127.0.0.1:x/x"], ExitCode.CONFIGURATION),
        (["read", "s", "0", "--broker", f"http://user:{CANARY}@127.0.0.1/"], ExitCode.CONFIGURATION),
        (["read", "s", "0", "--broker", f"amqp://user:{CANARY}@127.0.0.1:400/"], ExitCode.BROKER),
        (["read", "s", "0", "--broker", f"rabbitmq-stream://user:{CANARY}@127.0.0.1:1/"], ExitCode.BROKER),
        (["super-stream", "route", "s", "k", "--broker", f"amqp://user:{CANARY}@127.0.0.1:1/"], ExitCode.BROKER),
        (["read", "s", "--", "-1"], ExitCode.USAGE),
        (["keys", "add", "a", "b", "--source", "header:c"], ExitCode.USAGE),
        (["related", "s", "0", "--time", "before"], ExitCode.USAGE),
        (["groups", "--group", "0", "--consumer", "c"], ExitCode.USAGE),
        (["migrate", "--sql", "--current"], ExitCode.USAGE),
    ],
)
def test_errors_are_one_line_and_a_code_without_the_password(arguments: list[str], code: ExitCode) -> None:
    """What is wrong is said in words on stderr, ends with its own exit code, and never shows a password."""
    ended = run(*arguments)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr
    assert "Traceback" not in ended.stderr
    assert CANARY not in ended.stderr


def test_refused_passwords_are_configuration_errors(relatum: Relatum) -> None:
    """A refused password ends with code 3, and is not shown; the server that refused it is named."""
    url = re.sub(r"://[^@]*@", f"://guest:{CANARY}@", relatum.stream_url)
    ended = run("read", "s", "0", "--broker", url)
    assert ended.returncode == ExitCode.CONFIGURATION, ended.stderr
    assert url.rpartition("@")[2].rstrip("/") in ended.stderr
    assert CANARY not in ended.stderr + ended.stdout


def test_migrate_makes_the_schema_and_says_where_it_is(amqp_url: str, stream_url: str, empty_database_url: str) -> None:
    """A database without the schema is named as such, is made ready once, and stays so; SQL is shown without one."""
    ended = run("migrate", "--sql")
    assert (ended.returncode, "CREATE TABLE relatum.relationships" in ended.stdout) == (0, True)
    relatum = Relatum(amqp_url, stream_url, empty_database_url)
    ends(relatum, ExitCode.CONFIGURATION, "keys list")
    assert relatum.json("migrate", "--current")["revision"] is None
    made = relatum.json("migrate")
    assert made["revision"] == made["head"]
    assert relatum.json("migrate") == made == relatum.json("migrate", "--current")
    assert relatum.json("keys", "list") == relatum.json("status") == []


def test_keys_come_from_bodies_and_from_presets(relatum: Relatum) -> None:
    """A path in bodies is stored in one form, and presets bring their keys with what these name."""
    relatum.ok("keys", "add", "order", "--source", "body:$['order'].id")
    relatum.ok("keys", "add", "--preset", "spring", "--preset", "traceparent")
    relatum.ok("keys", "add", "--preset", "celery")
    listed = {key["name"]: key for key in relatum.json("keys", "list")}
    assert listed["order"]["source"] == ["body:$.order.id"]
    assert listed["celery_parent"]["names"] == "celery_id"
    assert len(listed) == 1 + 3 + 5
    wrong = ["--preset selery", "--names order", "--preset celery --source header:a", "x --source body:order.id"]
    ends(relatum, ExitCode.USAGE, *(f"keys add {words}" for words in ("", *wrong)))


def test_keys_are_added_listed_and_removed(relatum: Relatum) -> None:
    """Keys are defined as the command says, listed and removed; a name cannot get another meaning."""
    relatum.ok("keys", "add", "order_id", "host")
    relatum.ok("keys", "add", "airport_hour", "--source", "header:origin", "--source", "header:time_hour")
    relatum.ok("keys", "add", "order_id")
    listed = relatum.json("keys", "list")
    assert [(key["name"], key["source"]) for key in listed] == [
        ("order_id", ["header:order_id"]),
        ("host", ["header:host"]),
        ("airport_hour", ["header:origin", "header:time_hour"]),
    ]
    assert "airport_hour" in relatum.ok("keys", "list")
    relatum.ok("keys", "remove", "host")
    ends(relatum, ExitCode.NOT_THERE, "keys remove host")
    ends(relatum, ExitCode.USAGE, "keys add order_id --type integer", "keys add cause --names order")
    assert "names 'order_id'" in relatum.ok("keys", "add", "cause", "--names", "order_id")
    names = {key["name"]: key["names"] for key in relatum.json("keys", "list")}
    assert names == {"order_id": None, "airport_hour": None, "cause": "order_id"}
    assert "masked" in relatum.ok("keys", "add", "card", "--masked")
    assert [key["name"] for key in relatum.json("keys", "list") if key["masked"]] == ["card"]
    refused = relatum.run("keys", "remove", "card")
    assert refused.returncode == ExitCode.USAGE
    assert "relatum keys mask card --off" in " ".join(refused.stderr.split())
    relatum.ok("keys", "mask", "card", "--off")
    relatum.ok("keys", "remove", "card")


def test_record_follows_a_stream_serves_metrics_and_ends_on_sigterm(relatum: Relatum, place: Place) -> None:
    """A recorder records what is there and what comes, serves metrics, logs JSON, and ends with 0 on SIGTERM."""
    place.put(*orders(1, 2, 3))
    port = free_port((0,))
    options = ("--keys", "order_id", "--metrics-port", str(port), "--log-format", "json", "--log-level", "debug")
    with relatum.running("record", place.stream, *options) as process:
        status = relatum.await_recorded(place.stream)
        assert status["recorder"]
        place.put(*orders(4))
        wait_until(lambda: relatum.json("status", place.stream)[0]["rows"] == 4, LIMIT_S, what="the fourth row")
        (status,) = relatum.json("status", place.stream)
        assert status["state"] == "recording"
        assert len(status["covered"]["order_id"]) == 1
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            metrics = answer.read().decode()
        assert f'relatum_rows_total{{stream="{place.stream}"}} 4.0' in metrics
        process.send_signal(signal.SIGTERM)
        _, logs = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, logs
    for line in logs.splitlines():
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()
    assert "recorded: order_id" in relatum.ok("status", place.stream)
    assert relatum.json("status", place.stream)[0]["recorder"] is None


def test_read_prints_messages_and_says_what_is_not_there(relatum: Relatum, place: Place) -> None:
    """Messages are printed whole, a line each; an offset or stream that is not there ends with code 6."""
    place.put(*orders(1), (b"\xff", {"note": "[red]no markup[/red]"}))
    lines = [json.loads(line) for line in relatum.ok("read", place.stream, "1", "0", "--json").splitlines()]
    assert [line["offset"] for line in lines] == [1, 0]
    assert lines[0]["body_base64"] == "/w=="
    time_ = {"time": "1970-01-01T00:00:01+00:00", "time_source": "header"}
    headers = {"order_id": 1, "relatum_time": 1_000_000}
    shown = {"stream": place.stream, "offset": 0, "headers": headers, "properties": {}, "body": "order 1"}
    assert lines[1] | {"properties": {}} == shown | time_
    assert "[red]no markup[/red]" in relatum.ok("read", place.stream, "0", "1")
    beyond = relatum.run("read", place.stream, "0", "99")
    assert beyond.returncode == ExitCode.NOT_THERE
    assert "order 1" in beyond.stdout


def test_trace_shows_what_is_connected(relatum: Relatum, place: Place) -> None:
    """A tree from a message or a value, graphs, and a document; the code says how sure it is."""
    relatum.ok("keys", "add", "id", "order_id")
    relatum.ok("keys", "add", "cause", "--names", "id")
    held = [{"id": "a", "order_id": 7}, {"id": "b", "cause": "a"}, {"order_id": 7, "cause": "[red]x"}, {"id": "z"}]
    place.put(*[(b"x", headers | {"relatum_time": n}) for n, headers in enumerate(held)])
    place.record()
    shown = relatum.ok("trace", place.stream, "1")
    assert f"◀ cause: {place.stream}@0  1970-01-01 00:00:00.000+00:00" in shown
    for words in ("order_id = 7", "cause = [red]x: not found", "3 messages, 2 hops", "found: there are no more"):
        assert words in shown
    document = relatum.json("trace", "order_id", "7", "--fan-out", "5")
    messages = [(message["offset"], message["hop"], message["body"]) for message in document["messages"]]
    assert (document["status"], messages) == ("found", [(0, 1, "x"), (1, 2, "x"), (2, 1, "x")])
    stopped = relatum.ok("trace", "order_id", "7", "--hops", "1", "--by", "cause")
    assert "not followed: " in stopped
    ends(relatum, ExitCode.NOT_THERE, f"trace {place.stream} 3", "trace nowhere x")
    place.put((b"x", {"id": "c"}))
    ends(relatum, ExitCode.NOT_YET, f"trace {place.stream} 1")
    ends(relatum, ExitCode.OK, f"trace {place.stream} 1 --complete")
    # A stream has the same name as a key: the name means the key, unless --message is given.
    place.record()
    relatum.ok("keys", "add", place.stream)
    ends(relatum, ExitCode.NOT_YET, f"trace {place.stream} 1")
    assert "order_id = 7" in relatum.ok("trace", place.stream, "1", "--message")
    ends(relatum, ExitCode.USAGE, f"trace {place.stream} x --message")


def test_find_and_related_answer_and_end_with_their_status(relatum: Relatum, place: Place) -> None:
    """Found, absent and not recorded yet each have their exit code; `--complete` reads what is not recorded."""
    place.put(*orders(1, 2, 2, 3))
    place.record(keys=["order_id"])
    found = relatum.json("find", "order_id", "2", "--streams", place.stream)
    assert relatum.json("find", "order_id", "2", "--to", place.stream) == found, "as it was called before"
    assert found["status"] == "found"
    assert [message["offset"] for message in found["messages"]] == [1, 2]
    assert [message["offset"] for message in relatum.json("find", "order_id", "2", "-n", "1")["messages"]] == [1]
    assert "order 2" in relatum.ok("find", "order_id", "2")
    ends(relatum, ExitCode.NOT_THERE, "find order_id 9", "find nonsense 9", "around -5m")
    ends(relatum, ExitCode.USAGE, "around soon")
    since = ("--since", "1970-01-01T00:00:03")
    assert relatum.json("find", "order_id", "2", *since)["status"] == "absent"
    assert relatum.json("find", "order_id", "3", *since)["status"] == "found"

    related = relatum.json("related", place.stream, "1", "--by", "order_id")
    assert [(message["offset"], message["keys"]) for message in related["messages"]] == [(2, ["order_id"])]
    before = relatum.json("related", place.stream, "3", "--to", place.stream, "--time", "before")
    assert [message["offset"] for message in before["messages"]] == [2]

    around = relatum.run("around", "1970-01-01T00:00:02", "--for", "1s", "--before", "0", "--json")
    assert [message["offset"] for message in json.loads(around.stdout)["messages"]] == [1, 2, 3]
    assert "is read as 1970-01-01T00:00:02+00:00 (UTC" in around.stderr
    asked = relatum.run("find", "order_id", "2", "--log-level", "debug").stderr
    assert f"read ({place.stream}): 2 rows, " in asked
    assert "rows (" in asked
    place.put(*orders(9))
    later = relatum.run("find", "order_id", "9", "--to", place.stream, "--json")
    assert later.returncode == ExitCode.NOT_YET, later.stderr
    assert json.loads(later.stdout)["status"] == "not_recorded_yet"
    complete = relatum.json("find", "order_id", "9", "--to", place.stream, "--complete")
    assert [message["offset"] for message in complete["messages"]] == [4]


def test_rows_are_back_filled_compared_repaired_and_pruned(relatum: Relatum, place: Place) -> None:
    """A later key is recorded once; a row that is gone is listed, and written again only with `--no-dry-run`."""
    place.put(*orders(1, 2, 3))
    place.record()
    relatum.ok("keys", "add", "order_id")
    ends(relatum, ExitCode.NOT_YET, f"find order_id 2 --to {place.stream}")
    [report] = relatum.json("backfill", place.stream)
    assert (report["stream"], report["messages"], report["rows"]) == (place.stream, 3, 3)
    assert relatum.json("find", "order_id", "2", "--to", place.stream)["status"] == "found"
    assert relatum.json("backfill", place.stream)[0]["rows"] == 0
    verified = relatum.json("verify", place.stream)
    assert (verified["ok"], verified["streams"][0]["rows"]) == (True, 3)
    assert "no difference" in relatum.ok("verify", place.stream)
    place.sql("DELETE FROM relatum.relationships WHERE value = '2'")
    listed = relatum.run("verify", place.stream)
    assert (listed.returncode, "missing" in listed.stdout) == (ExitCode.DIFFERENT, True)
    planned = relatum.json("verify", place.stream, "--repair")
    assert (planned["dry_run"], len(planned["repaired"])) == (True, 1)
    ends(relatum, ExitCode.DIFFERENT, f"verify {place.stream}")
    assert relatum.json("verify", place.stream, "--repair", "--no-dry-run")["repaired"] == planned["repaired"]
    ends(relatum, ExitCode.OK, f"verify {place.stream}")
    assert relatum.json("prune") == {}
    relatum.ok("keys", "remove", "order_id")
    assert relatum.json("prune") == {"": 3}
    assert "Nothing" in relatum.ok("prune")


def test_a_super_stream_comes_and_goes(amqp_url: str, stream_url: str, broker: Broker) -> None:
    """A super stream is declared by number or by keys, described, routed to and, once confirmed, deleted."""
    relatum, name = Relatum(amqp_url, stream_url, ""), unique_name("relatum-super")
    partitions = [{"place": place, "stream": f"{name}-{place}", "binding_key": str(place)} for place in range(3)]
    document = {"super_stream": name, "partitions": partitions}
    try:
        assert relatum.json("super-stream", "declare", name, "--max-age", "7d") == document
        assert f"{name}-2" in relatum.ok("super-stream", "describe", name)
        assert relatum.ok("super-stream", "route", name, "hello1", "hello2") == f"hello1: {name}-1\nhello2: {name}-0\n"
        refused = relatum.run("super-stream", "delete", name)
        assert (refused.returncode, f"{name}-0" in refused.stderr) == (ExitCode.DECLINED, True)
        assert refused.stderr.endswith("[y/N]: \nnothing was done\n")
        assert relatum.json("super-stream", "describe", name) == document
        assert relatum.json("super-stream", "delete", name, "--yes") == document
        ended = relatum.run("super-stream", "describe", name)
        assert (ended.returncode, ended.stdout, name in ended.stderr) == (ExitCode.NOT_THERE, "", True)
        keys = "--binding-key emea --binding-key apac"
        ends(relatum, ExitCode.OK, f"super-stream declare {name} {keys}")
        assert describe_super_stream(broker, name) == Layout.keyed(name, ["emea", "apac"])
        ends(relatum, ExitCode.DIFFERENT, f"super-stream declare {name} --partitions 4")
        ends(relatum, ExitCode.USAGE, f"super-stream declare {name} --partitions 4 {keys}")
    finally:
        delete_by_hand(amqp_url, name, *(f"{name}-{end}" for end in ("0", "1", "2", "emea", "apac")))


def test_two_commands_and_an_exchange_is_looked_up(own_broker: LocalRabbitMQ, database_url: str) -> None:
    """Tap and record, then find; listed, and taken away."""
    relatum = Relatum(own_broker.broker_url, own_broker.stream_url, database_url)
    exchange = unique_name("orders")
    ends(relatum, ExitCode.NOT_THERE, f"tap {exchange}")
    ends(relatum, ExitCode.USAGE, "tap", "untap")
    with broker_connection(own_broker.broker_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "topic", durable=True)
        said = relatum.ok("tap", exchange, "--binding-key", "new", "--max-length-bytes", "20000000")
        assert f"relatum record tap.{exchange}" in said
        assert "at most 20.0 MB and 7d" in said
        with relatum.running("record", f"tap.{exchange}", "--keys", "order_id"):
            channel.basic_publish(exchange, "new", b"4 chairs", pika.BasicProperties(headers={"order_id": 7}))
            wait_until(lambda: relatum.run("find", "order_id", "7").returncode == 0, LIMIT_S, what="the order")
    (found,) = relatum.json("find", "order_id", "7")["messages"]
    assert (found["stream"], found["body"]) == (f"tap.{exchange}", "4 chairs")
    (listed,) = relatum.json("tap", "--list")
    tap = {"exchange": exchange, "type": "topic", "stream": f"tap.{exchange}", "binding_key": "new"}
    assert listed == listed | tap
    assert f"the copies stay in tap.{exchange}" in relatum.ok("untap", exchange)
    assert relatum.json("tap", "--list") == []
    ends(relatum, ExitCode.NOT_THERE, f"untap {exchange}")
    assert len(relatum.json("tap", "amq.headers", "--stream", f"{exchange}.all")) == 1
    assert "at most 5.0 GB and 90 s" in relatum.ok("tap", "amq.headers", "--max-age", "90")
    assert "the copies stay" in relatum.ok("untap", "amq.headers")


def test_expectations_are_defined_and_what_lacks_is_told(relatum: Relatum, place: Place, other_stream: str) -> None:
    """Nothing is missing, a recorder is behind, something is missing: 0, 8 and 10."""
    two_hours_ago_us = (time.time_ns() // 1_000_000_000 - 7_200) * 1_000_000

    def publish(stream: str, value: str) -> None:
        place.put((b"", {"order_id": value, "relatum_time": two_hours_ago_us}), to=stream)

    publish(place.stream, "a")
    publish(other_stream, "a")
    place.record(place.stream, other_stream, keys=["order_id"])
    assert "No expectation is defined" in relatum.ok("missing")
    words = f"--of {place.stream} --by order_id --follows {other_stream}"
    relatum.ok(*f"expect add paid {words} --within 0.001s --grace 0.5s".split())
    ends(relatum, ExitCode.USAGE, f"expect add paid {words} --within 2h")
    wanted = {"name": "paid", "of": place.stream, "by": "order_id", "follows": other_stream, "within_s": 0.001}
    wanted["grace_s"] = 0.5
    assert relatum.json("expect", "list") == [wanted]
    assert "nothing is missing" in relatum.ok("missing", "paid")
    publish(place.stream, "b")
    behind = relatum.run("missing")
    assert (behind.returncode, f"no recorder runs for {place.stream}" in behind.stdout) == (ExitCode.NOT_YET, True)
    place.record()
    shown = relatum.run("missing", "paid")
    assert (shown.returncode, f"missing\t{place.stream}\t1\tb" in shown.stdout) == (ExitCode.UNSUCCESSFUL, True)
    (report,) = relatum.json("missing", "paid")
    assert (report["status"], report["expectation"], report["missing_count"]) == ("found", wanted, 1)
    assert [(each["value"], each["id"]) for each in report["missing"]] == [("b", {"stream": place.stream, "offset": 1})]
    relatum.ok("expect", "remove", "paid")
    ends(relatum, ExitCode.NOT_THERE, "missing paid", "expect remove paid")
