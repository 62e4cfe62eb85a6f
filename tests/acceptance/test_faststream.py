"""A FastStream application with RPC, as it is or with one line more: what led to what, and who got no reply?"""

import json
import os
import subprocess
import sys

import pytest

from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, delete_stream, unique_name, wait_until

PLAIN, LINE = "tests.acceptance._faststream_shop", "tests.acceptance._faststream_shop_line"


@pytest.mark.parametrize("program", [PLAIN, LINE], ids=["a command", "a line"])
def test_requests_replies_and_what_is_missing(relatum: Relatum, amqp_url: str, program: str) -> None:
    """Each request leads to its reply, and the one without is named."""
    exchange = unique_name("shop")
    asked, answered = f"{exchange}.asked", f"{exchange}.answered"
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_declare(exchange, "topic", durable=True)
    for stream, key in ((asked, "asked.*"), (answered, "answered.*")):
        relatum.ok("tap", exchange, "--binding-key", key, "--stream", stream, "--max-length-bytes", "20000000")
    relatum.ok("keys", "add", "--preset", "faststream")
    environment = {**os.environ, "SHOP_BROKER": amqp_url, "SHOP_EXCHANGE": exchange}
    environment["SHOP_DATABASE"] = relatum.database_url
    recorder = relatum.start("record", asked, answered)
    try:
        command = [sys.executable, "-m", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        first, last = json.loads(done.stdout.splitlines()[-1])
        assert (first["id"], last["id"], last["cents"]) == ("o0", "o2", 4900)
        words = ("--of", asked, "--by", "faststream_correlation", "--follows", answered)
        relatum.ok("expect", "add", "answered", *words, "--within", "1s", "--grace", "0.5s")

        def missing() -> bool:
            (report,) = relatum.json("missing", "answered")
            return bool(report["status"] == "found")

        wait_until(missing, LIMIT_S, what="the request without a reply")
        (report,) = relatum.json("missing", "answered")
        assert [(each["id"]["offset"], each["value"]) for each in report["missing"]] == [(1, "sofa-1")]
    finally:
        recorder.kill()
        recorder.communicate(timeout=LIMIT_S)
    (reply,) = relatum.json("related", asked, "0")["messages"]
    assert (reply["stream"], json.loads(reply["body"])["id"]) == (answered, "o0")
    trace = relatum.json("trace", "faststream_correlation", last["correlation"])
    assert {(each["stream"], each["offset"]) for each in trace["messages"]} == {(asked, 2), (answered, 1)}
    assert relatum.json("related", asked, "1")["status"] == "absent"
    relatum.ok("untap", exchange)
    for stream in (asked, answered):
        delete_stream(amqp_url, stream)
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_delete(exchange)
