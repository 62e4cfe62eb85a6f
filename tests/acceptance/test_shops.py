"""A shop as users of Celery write it, intercepted: what belongs to what."""

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
from tests.support import delete_stream, run_python, unique_name

pytestmark = pytest.mark.rare

SHOP = "tests.acceptance._celery_shop"

ORDERS: list[dict[str, Any]] = [
    {"id": "scarce", "items": ["chair", "table"], "is_scarce": True},
    {"id": "plain", "items": ["chair", "table", "lamp"]},
    {"id": "killing", "items": ["bed", "lamp"], "kills": True},
    {"id": "refused", "items": ["chair", "bed"], "is_refused": True},
]


class Shop:
    """The app of one test, its worker, and what Celery itself says became of the tasks."""

    def __init__(self, relatum: Relatum, directory: Path) -> None:
        self.results = directory / "results"
        self.results.mkdir()
        urls = {"SHOP_BROKER": relatum.broker_url, "SHOP_DATABASE": relatum.database_url}
        where = {"SHOP_RESULTS": str(self.results), "SHOP_QUEUE": unique_name("shop")}
        self.environment = urls | where
        self.log = directory / "worker.log"

    @contextmanager
    def worker(self) -> Iterator[None]:
        command = f"{sys.executable} -m celery -A {SHOP} worker -P prefork -c 2 -l INFO".split()
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
        ended = run_python("-m", SHOP, json.dumps(orders), env=os.environ | self.environment)
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
    shop = Shop(relatum, tmp_path)
    with shop.worker():
        told = shop.place(ORDERS[:2])
    relatum.await_recorded(stream)
    with shop.worker():
        again = shop.place(ORDERS[2:])
    # The child that is killed may be the one that records: then the next process to record continues.
    with relatum.running("record", stream):
        relatum.await_recorded(stream)
    for name, root in {**told["orders"], **again["orders"]}.items():
        check_trace(relatum, shop, root, retries=2 if name == "scarce" else 0)
        # So that each charge can be expected to be followed by its shipping.
        steps = {each["headers"]["task"] for each in relatum.json("find", "celery_root", root)["messages"]}
        assert ("shop.charge" in steps, "shop.ship" in steps) == (True, name != "refused"), name
    for audits in (told["audits"], again["audits"]):
        (start,) = relatum.json("find", "celery_id", audits[0])["messages"]
        related = relatum.json("related", stream, str(start["offset"]), "--by", "celery_group")
        assert {each["headers"]["id"] for each in related["messages"]} == set(audits[1:])
    delete_stream(relatum.broker_url, stream)


def check_trace(relatum: Relatum, shop: Shop, root: str, *, retries: int) -> None:
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
