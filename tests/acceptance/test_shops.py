"""A shop as users of Celery write it, tapped or intercepted: what belongs to what, and what is missing."""

import json
import os
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

ORDERS: list[dict[str, Any]] = [
    {"id": "scarce", "items": ["chair", "table"], "is_scarce": True},
    {"id": "plain", "items": ["chair", "table", "lamp"]},
    {"id": "killing", "items": ["bed", "lamp"], "kills": True},
    {"id": "refused", "items": ["chair", "bed"], "is_refused": True},
]


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


def missing(relatum: Relatum, of: str, by: str, follows: str) -> set[str]:
    """Values of what should have been followed within a second, once nothing else is due."""
    words = f"--of {of} --by {by} --follows {follows} --within 1s --grace 0.5s"
    relatum.ok("expect", "add", "followed", *words.split())

    def is_known() -> bool:
        report.update(relatum.json("missing", "followed")[0])
        return bool(report["missing"]) and not report["not_known_count"]

    report: dict[str, Any] = {}
    wait_until(is_known, LIMIT_S, what="all to be due")
    return {each["value"] for each in report["missing"]}


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
        command, given = [sys.executable, "-m", self.module, json.dumps(orders)], os.environ | self.environment
        ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert ended.returncode == 0, ended.stderr
        return dict(json.loads(ended.stdout))

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
    till, dock = (f"{exchange}.{number}" for number in range(2))
    for stream, key in ((till, "till"), (dock, "dock")):
        relatum.ok("tap", exchange, "--binding-key", key, "--stream", stream, "--max-length-bytes", "20000000")
    recorder = relatum.start("record", till, dock)
    try:
        with shop.worker():
            told = shop.place(ORDERS)["orders"]
            for stream in (till, dock):
                relatum.await_recorded(stream)
    finally:
        recorder.kill()
        recorder.communicate(timeout=LIMIT_S)
    assert missing(relatum, till, "celery_root", dock) == {told["refused"]}
    till_of = {each["headers"]["root_id"] for each in relatum.json("find", "celery_root", told["plain"])["messages"]}
    assert till_of == {told["plain"]}
