"""What pages of docs show is run, unchanged: those of the table in tests/unit/test_documents.py."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pika
import psycopg
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import relatum
from relatum import KeyDefinition
from relatum.contexts import AffinityOptions
from relatum.membership import GROUP_KEY, Membership, assess, membership
from relatum.superstreams import Layout, StreamOptions, declare_super_stream, describe_super_stream
from relatum.tapping import tap
from relatum_consumer import Relations
from tests.support import unique_name
from tests.support.affinity import Partitions
from tests.support.collectors import SUCCEEDED
from tests.support.groups import group_id, of_group, whole_group
from tests.support.pages import blocks_of, names_there, run, text_of
from tests.support.place import Place
from tests.support.super_streams import bodies, delete_by_hand


def test_affinity(layout: Layout, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block runs after the one before, the messages of a set share a partition, and open sets are listed."""
    with names_there(place.amqp, place.database) as names:
        names["AffinityOptions"] = AffinityOptions
        for block in blocks_of("affinity.md", renamed={"ledger": layout.super_stream}):
            run("affinity.md", block, names)
    assert list(Partitions(place.amqp, layout).of_set("invoice 18").values()) == [[b"2 lamps", b"120 EUR"]]
    assert "invoice 17" in capsys.readouterr().out
    assert names["handle"].partition is not None


@pytest.fixture
def name(amqp_url: str) -> Iterator[str]:
    name = unique_name("relatum-flights")
    yield name
    delete_by_hand(amqp_url, name, *(partition.stream for partition in Layout.numbered(name, 3)))


def test_super_streams(place: Place, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block runs after the one before, publishes all messages, and prints what the page says."""
    with names_there(place.amqp, place.database) as names:
        for block in blocks_of("super-streams.md", renamed={"flights": name}):
            run("super-streams.md", block, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"{place} {name}-{place} {place}" for place in range(3)]
    assert printed[-1] == f"{name}-1"
    layout = describe_super_stream(place.broker, name)
    assert layout == declare_super_stream(place.broker, name, 3)
    assert sum(map(len, bodies(place.stream_url, layout).values())) == 6


def test_the_page_of_super_streams_names_each_option() -> None:
    """The tables of the page have each option of a super stream and of new streams."""
    page = text_of("super-streams.md")
    for options in (relatum.SuperStream, StreamOptions):
        for parameter in inspect.signature(options).parameters:
            assert f"| `{parameter}` |" in page, parameter


def test_putting_groups(place: Place) -> None:
    """Each block runs after the one before, and the groups with a last message are complete."""
    with ExitStack() as stack:
        names = stack.enter_context(names_there(place.amqp, place.database))
        names["relations"] = stack.enter_context(Relations(place.broker, place.database))
        renamed = {"orders": place.stream}
        first, *_ = blocks_of("groups.md", renamed=renamed)
        for block in (first, *blocks_of("groups.md", "Publish a group", renamed)):
            if "resume" in block:
                # Left incomplete, as by a publisher that failed, for the block that continues it.
                names["group"] = relatum.MessageGroup(names["channel"], "", place.stream)
                names["group"].put(b"first line")
                place.wait_recorded()  # the recorder has defined the key by then
            run("groups.md", block, names)
            if "channel" not in names:
                names["channel"] = names["connection"].channel()
                names["channel"].confirm_delivery()
        place.wait_recorded()
    groups: dict[str, list[Membership]] = {}
    for message in place.messages():
        member = membership(message.headers)
        assert member is not None
        groups.setdefault(member.group_id, []).append(member)
    assert [len(places) for places in groups.values()] == [3, 2, 3, 2]
    is_whole = [assess(group, places).is_complete for group, places in groups.items()]
    assert is_whole == [True, True, True, False]


def test_getting_groups(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks print the complete group, and what the incomplete one lacks."""
    place.put_recorded(*whole_group(1, 2), of_group(2, 1, time_us=1), of_group(2, 3, last=True), keys=[GROUP_KEY])
    outputs = []
    with Relations(place.amqp, place.database) as relations:
        names = {"relations": relations, "group_id": group_id(2), "timedelta": timedelta}
        for block in blocks_of("groups.md", "Read groups", {"orders": place.stream}):
            run("groups.md", block, names)
            outputs.append(capsys.readouterr().out)
    whole, _, incomplete = outputs
    assert whole == f"{group_id(1)} 2 [b'1-1', b'1-2']\n"
    assert incomplete.startswith(f"{group_id(2)} ((2, 2),) 1970-01-01 00:00:00.000001+00:00")


@pytest.mark.usefixtures("in_environment")
def test_collector(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's executor writes each message once, and each way shown finds the outcomes."""
    renamed = {"orders": place.stream, "0193…": "first", "0194…": "second"}
    collects, made, _, publishes, asks = blocks_of("collector.md", renamed=renamed)
    here: dict[str, Any] = {}

    def work() -> None:
        for message_id in ("first", "second"):
            properties = pika.BasicProperties(type="order", message_id=message_id)
            relatum.publish(here["channel"], "", place.stream, b"a parcel", properties)
        # Over the existing connection, which the test closes.
        run("collector.md", publishes[publishes.index("receipt = ") :], here)
        run("collector.md", asks, here)

    with psycopg.connect(place.database, autocommit=True) as database:
        database.execute("CREATE TABLE orders_booked (id text PRIMARY KEY, body bytea NOT NULL)")
        with names_there(place.amqp, place.database) as names:
            relatum.intercept(names["connection"], keys=["order_id"], database=place.database)
            here |= names | {"channel": names["connection"].channel(), "work": work}
            run("collector.md", collects.replace("time.sleep(60)", "work()"), here)
        booked = database.execute("SELECT id FROM orders_booked ORDER BY id").fetchall()
    run("collector.md", made, here)
    receipt, found = here["receipt"], here["found"]
    assert sorted(message_id for (message_id,) in booked) == sorted(["first", "second", receipt.message_id])
    statuses = [outcome.status for outcome in (here["outcome"], found["first"], found["second"])]
    assert statuses == [SUCCEEDED] * 3
    # By the result handler, and by the publisher.
    assert capsys.readouterr().out.count(f"{receipt.message_id} succeeded") == 2


@pytest.fixture
def in_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELATUM_BROKER_URL", place.amqp)
    monkeypatch.setenv("RELATUM_DATABASE_URL", place.database)


@pytest.mark.usefixtures("in_environment")
def test_tap(place: Place) -> None:
    """The page's program makes an exchange. Once that is tapped, it publishes a message with the page's keys."""
    (block,) = blocks_of("tap.md", renamed={"orders": place.stream})
    run("tap.md", block, {})
    (made,) = tap(place.amqp, place.database, place.stream)
    try:
        run("tap.md", block, {})
        place.record(made.stream, keys=["order_id", KeyDefinition("article", source="body:$.article")])
        assert place.rows(made.stream) == [("article", "chair", 0), ("order_id", "4711", 0)]
    finally:
        delete_by_hand(place.amqp, place.stream, made.stream)


@pytest.mark.usefixtures("in_environment")
def test_expectations(place: Place, other_stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The block defines its expectation, and finds that nothing is missing after the README's publisher."""
    place.put((b"4 chairs", {"order_id": 4711}))
    place.put((b"32 kg", {"order_id": 4711}), to=other_stream)
    place.record(place.stream, other_stream, keys=["order_id"])
    (block,) = blocks_of("expectations.md", renamed={"orders": place.stream, "parcels": other_stream})
    run("expectations.md", block, {})
    assert capsys.readouterr().out.startswith("nothing is missing")


USE = """
from relatum_consumer import Relations
with Relations(BROKER, DATABASE) as relations:
    assert len(relations.find("order_id", "17")) == 1
spans.shutdown()
"""


class Receiver(ThreadingHTTPServer):
    """Takes OTLP over HTTP on this machine; its `bodies` are those of all requests, by path."""

    def __init__(self) -> None:
        self.bodies: dict[str, list[bytes]] = {"/v1/traces": []}
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies[self.path].append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)


def test_opentelemetry(place: Place) -> None:
    """After the page's block, the span of a lookup arrives over OTLP."""
    place.put_recorded((b"", {"order_id": "17"}), keys=["order_id"])
    (block,) = blocks_of("opentelemetry.md")
    program = f"BROKER, DATABASE = {place.amqp!r}, {place.database!r}\n{block}{USE}"
    with Receiver() as receiver, ThreadPoolExecutor(1) as pool:
        pool.submit(receiver.serve_forever)
        try:
            url = f"http://127.0.0.1:{receiver.server_port}"
            environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env=environment)
        finally:
            receiver.shutdown()
    traces = [ExportTraceServiceRequest.FromString(body) for body in receiver.bodies["/v1/traces"]]
    scopes = [scope for trace in traces for resource in trace.resource_spans for scope in resource.scope_spans]
    assert ("relatum", "relatum find") in {(scope.scope.name, span.name) for scope in scopes for span in scope.spans}
