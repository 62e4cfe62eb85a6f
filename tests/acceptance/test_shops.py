"""Programs as users write them, with Celery, FastStream and Java, tapped or intercepted: what belongs to what."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, delete_stream, unique_name, wait_until

pytestmark = pytest.mark.rare

PLAIN, LINE = "tests.acceptance._celery_shop", "tests.acceptance._celery_shop_line"
JAVA = Path(__file__).parents[1] / "support" / "java" / "Publisher.java"
CLIENT = os.environ.get("RELATUM_AMQP_CLIENT_JAR", "/usr/share/java/amqp-client.jar")
JARS = [Path(CLIENT), Path("/usr/share/java/slf4j-api.jar")]

ORDERS: list[dict[str, Any]] = [
    {"id": "scarce", "items": ["chair", "table"], "is_scarce": True},
    {"id": "plain", "items": ["chair", "table", "lamp"]},
    {"id": "killing", "items": ["bed", "lamp"], "kills": True},
    {"id": "refused", "items": ["chair", "bed"], "is_refused": True},
]


def printed(words: list[str], **environment: str) -> str:
    """What a program prints."""
    given = os.environ | environment
    ended = subprocess.run(words, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def recorded(relatum: Relatum, *streams: str) -> Iterator[None]:
    """`relatum record`, until the block ends; the streams are then deleted with the test's exchange."""
    recorder = relatum.start("record", *streams)
    try:
        yield
    finally:
        recorder.kill()
        recorder.communicate(timeout=LIMIT_S)


@pytest.fixture
def exchange(relatum: Relatum) -> Iterator[str]:
    """A topic exchange of the user's own; what was tapped of it goes with it."""
    name = unique_name("shop")
    with broker_connection(relatum.broker_url) as connection:
        connection.channel().exchange_declare(name, "topic", durable=True)
    yield name
    taps = relatum.json("tap", "--list")
    relatum.ok("untap", name)
    for tap in taps:
        delete_stream(relatum.broker_url, tap["stream"])
    with broker_connection(relatum.broker_url) as connection:
        connection.channel().exchange_delete(name)


def tapped(relatum: Relatum, exchange: str, *binding_keys: str) -> list[str]:
    """Tap an exchange by each of these keys; gives the streams."""
    streams = [f"{exchange}.{number}" for number in range(len(binding_keys))]
    for stream, key in zip(streams, binding_keys, strict=True):
        relatum.ok("tap", exchange, "--binding-key", key, "--stream", stream, "--max-length-bytes", "20000000")
    return streams


def missing(relatum: Relatum, of: str, by: str, follows: str) -> list[tuple[int, str]]:
    """Offsets and values of what should have been followed within a second, once nothing else is due."""
    words = f"--of {of} --by {by} --follows {follows} --within 1s --grace 0.5s"
    relatum.ok("expect", "add", "followed", *words.split())

    def is_known() -> bool:
        report.update(relatum.json("missing", "followed")[0])
        return bool(report["missing"]) and not report["not_known_count"]

    report: dict[str, Any] = {}
    wait_until(is_known, LIMIT_S, what="all to be due")
    return [(each["id"]["offset"], each["value"]) for each in report["missing"]]


def places(messages: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Where messages are."""
    return {(each["stream"], each["offset"]) for each in messages}


def test_requests_of_faststream_their_replies_and_what_is_missing(relatum: Relatum, exchange: str) -> None:
    """Each request leads to its reply, and the one without is named."""
    asked, answered = tapped(relatum, exchange, "asked.*", "answered.*")
    relatum.ok("keys", "add", "--preset", "faststream")
    with recorded(relatum, asked, answered):
        command = [sys.executable, "-m", "tests.acceptance._faststream_shop"]
        told = printed(command, SHOP_BROKER=relatum.broker_url, SHOP_EXCHANGE=exchange)
        first, last = json.loads(told.splitlines()[-1])
        assert (first["id"], last["id"], last["cents"]) == ("o0", "o2", 4900)
        assert missing(relatum, asked, "faststream_correlation", answered) == [(1, "sofa-1")]
    (reply,) = relatum.json("related", asked, "0")["messages"]
    assert (reply["stream"], json.loads(reply["body"])["id"]) == (answered, "o0")
    trace = relatum.json("trace", "faststream_correlation", last["correlation"])
    assert places(trace["messages"]) == {(asked, 2), (answered, 1)}
    assert relatum.json("related", asked, "1")["status"] == "absent"


@pytest.mark.skipif(
    not (shutil.which("java") and shutil.which("javac") and all(jar.exists() for jar in JARS)),
    reason="there is no JDK or no RabbitMQ client for Java: tools/install java-client installs them",
)
def test_orders_of_a_java_program_their_shipments_and_what_is_missing(relatum: Relatum, exchange: str) -> None:
    """Five orders, three of them shipped: what belongs to an order, and which two were not."""
    ordered, shipped = tapped(relatum, exchange, "order.new", "order.shipped")
    relatum.ok("keys", "add", "order_id", "--type", "integer")
    with recorded(relatum, ordered, shipped):
        for key, count in (("order.new", 5), ("order.shipped", 3)):
            words = ["java", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, JARS)), str(JAVA)]
            printed([*words, relatum.broker_url + "%2f", exchange, key, str(count)])
        assert missing(relatum, ordered, "order_id", shipped) == [(3, "3"), (4, "4")]
    (shipment,) = relatum.json("related", ordered, "2", "--by", "order_id")["messages"]
    assert (shipment["stream"], shipment["offset"], shipment["body"]) == (shipped, 2, "order 2")
    trace = relatum.json("trace", ordered, "1", "--by", "order_id")
    assert places(trace["messages"]) == {(ordered, 1), (shipped, 1)}


# --- Celery -----------------------------------------------------------------------------------------------


class Shop:
    """The app of one test, its worker, and what Celery itself says became of the tasks."""

    def __init__(self, relatum: Relatum, directory: Path, module: str, **settings: str) -> None:
        self.module, self.results = module, directory / "results"
        self.results.mkdir()
        urls = {"SHOP_BROKER": relatum.broker_url, "SHOP_DATABASE": relatum.database_url}
        where = {"SHOP_RESULTS": str(self.results), "SHOP_QUEUE": unique_name("shop")}
        self.environment = {**urls, **where, **settings}
        self.log = directory / "worker.log"

    @contextmanager
    def worker(self) -> Iterator[None]:
        """A worker of two processes."""
        command = f"{sys.executable} -m celery -A {self.module} worker -P prefork -c 2 -l INFO".split()
        with self.log.open("a") as log:
            process = subprocess.Popen(command, env=os.environ | self.environment, stdout=log, stderr=log)
            try:
                yield
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT_S) == 0, self.log.read_text()
            finally:
                process.kill()
                process.wait()

    def place(self, orders: list[dict[str, Any]]) -> dict[str, Any]:
        """Place orders in a process of their own, and wait until they are done."""
        command = [sys.executable, "-m", self.module, json.dumps(orders)]
        return dict(json.loads(printed(command, **self.environment)))

    def tree(self, root: str) -> set[tuple[str, str]]:
        """The pairs of task and child under a first task, as Celery's own results have them."""
        metas = [json.loads(path.read_text()) for path in self.results.glob("celery-task-meta-*")]
        pairs = {(meta["parent_id"], meta["task_id"]) for meta in metas if meta.get("parent_id")}
        for meta in metas:
            # A child is ((id, parent), None), a group of them ((id, parent), children).
            for (child, _), members in meta["children"]:
                found = [child] if members is None else [each[0][0] for each in members]
                pairs.update((meta["task_id"], each) for each in found)
        under, added = {root}, 1
        while added:
            more = {child for parent, child in pairs if parent in under} - under
            under |= more
            added = len(more)
        return {(parent, child) for parent, child in pairs if parent in under and parent != child}


@pytest.mark.timeout(900)
def test_what_belongs_to_a_task(relatum: Relatum, tmp_path: Path) -> None:
    """Chains, chords, groups, retries and a killed child: trace and related say what Celery's results say."""
    stream = "celery.tasks"
    shop = Shop(relatum, tmp_path, LINE)
    with shop.worker():
        told = shop.place(ORDERS[:2])
    with shop.worker():
        again = shop.place(ORDERS[2:])
    relatum.await_recorded(stream)
    for name, root in {**told["orders"], **again["orders"]}.items():
        check_trace(relatum, shop, root, retries=2 if name == "scarce" else 0)
    for audits in (told["audits"], again["audits"]):
        (start,) = relatum.json("find", "celery_id", audits[0])["messages"]
        related = relatum.json("related", stream, str(start["offset"]), "--by", "celery_group")
        assert {each["headers"]["id"] for each in related["messages"]} == set(audits[1:])
    delete_stream(relatum.broker_url, stream)


def check_trace(relatum: Relatum, shop: Shop, root: str, *, retries: int) -> None:
    """All messages of an order are found by its first task, with the arrows that Celery's results have."""
    trace = relatum.json("trace", "celery_id", root)
    assert trace["status"] == "found"
    ids = {(each["stream"], each["offset"]): each["headers"]["id"] for each in trace["messages"]}
    edges = {
        (ids[tuple(edge["cause"].values())], ids[tuple(edge["effect"].values())])
        for edge in trace["edges"]
        if edge["cause"] is not None
    }
    expected = shop.tree(root)
    assert expected, "a task at least came of the first"
    assert {pair for pair in edges if pair[0] != pair[1]} == expected
    assert set(ids.values()) == {root} | {child for _, child in expected}
    assert list(ids.values()).count(root) == 1 + retries


@pytest.mark.timeout(900)
def test_what_is_missing(relatum: Relatum, exchange: str, tmp_path: Path) -> None:
    """With an exchange of its own, nothing is changed at all: each charge should be followed by its shipping."""
    shop = Shop(relatum, tmp_path, PLAIN, SHOP_EXCHANGE=exchange)
    relatum.ok("keys", "add", "--preset", "celery")
    till, dock = tapped(relatum, exchange, "till", "dock")
    with shop.worker(), recorded(relatum, till, dock):
        told = shop.place(ORDERS)["orders"]
        for stream in (till, dock):
            relatum.await_recorded(stream)
    assert {value for _, value in missing(relatum, till, "celery_root", dock)} == {told["refused"]}
    till_of = {each["headers"]["root_id"] for each in relatum.json("find", "celery_root", told["plain"])["messages"]}
    assert till_of == {told["plain"]}
