"""`relatum expect` and `relatum missing`: definitions, and exit codes that alarms can rest on."""

import json
import time

import sqlalchemy as sa

from relatum.terminal import ExitCode
from tests.acceptance._command import Relatum
from tests.support import declare_stream, delete_stream, publish_plain, record, recording, unique_name, wait_recorded

BASE_US = (time.time_ns() // 1_000_000_000 - 7_200) * 1_000_000


def publish(amqp_url: str, stream: str, *values: str, time_us: int = BASE_US) -> None:
    """Publish a message for each value."""
    publish_plain(amqp_url, stream, [(b"", {"order_id": value, "relatum_time": time_us}) for value in values])


def test_what_is_expected_is_defined_and_what_is_missing_is_told(
    relatum: Relatum, amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Nothing is missing, a recorder is behind, something is missing: 0, 8 and 10; a follower gives JSON lines."""
    payments = unique_name()
    declare_stream(amqp_url, payments)
    try:
        publish(amqp_url, stream_name, "a")
        publish(amqp_url, payments, "a")
        with recording(amqp_url, engine, stream_name, payments, keys=["order_id"]):
            for stream in (stream_name, payments):
                wait_recorded(amqp_url, engine, stream)
        assert "Nothing is expected" in relatum.ok("missing")
        words = ("--of", stream_name, "--by", "order_id", "--follows", payments)
        relatum.ok("expect", "add", "paid", *words, "--within", "0.001s", "--grace", "0.5s")
        assert relatum.run("expect", "add", "paid", *words, "--within", "2h").returncode == ExitCode.USAGE
        wanted = {"name": "paid", "of": stream_name, "by": "order_id", "follows": payments, "within_s": 0.001}
        wanted["grace_s"] = 0.5
        assert relatum.json("expect", "list") == [wanted]
        assert "nothing is missing" in relatum.ok("missing", "paid")
        publish(amqp_url, stream_name, "b")
        behind = relatum.run("missing")
        assert behind.returncode == ExitCode.NOT_YET
        assert f"nobody records {stream_name}" in behind.stdout
        record(amqp_url, engine, stream_name, keys=["order_id"])
        shown = relatum.run("missing", "paid")
        assert shown.returncode == ExitCode.UNSUCCESSFUL
        assert f"missing\t{stream_name}\t1\tb" in shown.stdout
        (report,) = relatum.json("missing", "paid")
        assert (report["status"], report["expectation"], report["missing_count"]) == ("found", wanted, 1)
        assert [(each["value"], each["id"]) for each in report["missing"]] == [
            ("b", {"stream": stream_name, "offset": 1})
        ]
        follower = relatum.start("missing", "paid", "--follow", "--since", "yesterday", "--json")
        try:
            assert follower.stdout is not None
            told = json.loads(follower.stdout.readline())
            assert (told["finding"], told["value"]) == ("missing", "b")
        finally:
            follower.kill()
            follower.communicate()
        relatum.ok("expect", "remove", "paid")
        assert relatum.run("missing", "paid").returncode == ExitCode.NOT_THERE
        assert relatum.run("expect", "remove", "paid").returncode == ExitCode.NOT_THERE
    finally:
        delete_stream(amqp_url, payments)


def test_wrong_options_are_said_before_anything_is_asked(relatum: Relatum) -> None:
    """A follower has one expectation and no end; metrics are a follower's."""
    for words in (("--follow",), ("x", "--follow", "--until", "now"), ("x", "--metrics-port", "9")):
        assert relatum.run("missing", *words).returncode == ExitCode.USAGE
