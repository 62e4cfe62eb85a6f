"""What routers of contexts and affinity sets refuse, how they look in the background, and the locks of names."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika
import pytest

import relatum
from relatum.common.waiting import Deadline
from relatum.contexts import ContextOptions
from relatum.contexts._placement_cache import NameLocks, Sent
from relatum.errors import DatabaseUnavailable, InvalidInput
from tests.support import wait_until

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What a router does beside publishing; it looks every two milliseconds."""
    monkeypatch.setattr("relatum.contexts._router_core.LOOK_EVERY_S", 0.002)
    with relatum.ContextRouter("orders", NOWHERE) as router:
        yield router._core


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        *((relatum.ContextRouter, {"serialization_context": name}) for name in ("", 17, "a\0b", "x" * 1025, b"bytes")),
        *((relatum.AffinityRouter, {"affinity_set": name}) for name in ("", 7, "a\0b", "\ud800", "é" * 513, b"s1")),
        (relatum.AffinityRouter, {"affinity_predecessor": 17}),
        (relatum.AffinityRouter, {"affinity_predecessor": ""}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_predecessor": "m1"}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_last": 1}),
        (relatum.AffinityRouter, {"affinity_set": "s1", "affinity_last": "true"}),
        (relatum.AffinityRouter, {"affinity_last": True}),
    ],
)
def test_headers_that_make_no_sense_are_refused(kind: Any, headers: dict[str, Any]) -> None:
    """A header that makes no sense is refused before anything is sent; a name has 1 to 1,024 bytes without NUL."""
    router = kind("orders", NOWHERE)
    with pytest.raises(InvalidInput, match="nothing was sent"):
        router.publish(None, b"", pika.BasicProperties(headers=headers))
    router.close()


def publish_until(core: Any, looked: threading.Event) -> int:
    """Publish two messages at a time until a look follows, which may also come between the two; says how many."""
    pairs = 0

    def is_looked() -> bool:
        nonlocal pairs
        pairs += 1
        core.published()
        core.published()
        return looked.wait(0.01)

    wait_until(is_looked, what="a look")
    return 2 * pairs


def test_some_messages_are_followed_by_a_look(core: Any) -> None:
    """A look follows where several messages were published since the last one, and none follows the end."""
    looked, published = threading.Event(), 0
    core.publications.look = looked.set
    for _ in range(3):
        published += publish_until(core, looked)
        looked.clear()
    assert core.statistics().published == published
    core.close()
    looked.clear()
    core.published()
    core.published()
    assert not looked.is_set()


def test_looks_go_on_after_one_that_failed(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks continue after some that failed while the database was away."""
    monkeypatch.setattr("relatum.contexts._router_core.AWAY_S", 0.001)
    fails = [DatabaseUnavailable("away"), KeyError("a defect"), DatabaseUnavailable("away")]
    looked = threading.Event()

    def look() -> None:
        if fails:
            raise fails.pop()
        looked.set()

    core.publications.look = look
    publish_until(core, looked)


def test_the_thread_that_looks_rests_without_messages(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when nothing is published, and the next message starts another one."""
    monkeypatch.setattr("relatum.contexts._router_core.RESTS_AFTER_S", 0.0)
    looked = threading.Event()
    core.publications.look = looked.set
    for _ in range(2):
        core.published()
        wait_until(lambda: core._refresher is None, what="the thread's rest")
    monkeypatch.setattr("relatum.contexts._router_core.RESTS_AFTER_S", 60.0)
    publish_until(core, looked)


def test_an_earlier_refresh_answers_no_later_call(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow refresh that ends while a later one ends leaves the later answer to its caller."""
    monkeypatch.setattr("relatum.contexts._router_core.REFRESH_TURN_S", 0.01)
    asked, may_end = threading.Event(), threading.Event()

    class Store:
        def changes(self, since: int | None) -> tuple[int, None]:
            if threading.current_thread() is not slow:
                return 2, None
            asked.set()
            assert may_end.wait(90)
            return 1, None

    @contextmanager
    def let_slow_one_end(**_: Any) -> Iterator[None]:
        yield
        if threading.current_thread() is not slow:
            may_end.set()
            slow.join()

    core.store, core.in_time = Store(), let_slow_one_end
    slow = threading.Thread(target=core.changes, args=(None,))
    slow.start()
    assert asked.wait(90)
    assert core.changes(None) == (2, None)


def test_a_message_is_settled_in_the_time_given() -> None:
    """What the search of the stream took is missing from the time to learn whether the message found there counts."""
    asked: list[int | None] = []

    class Store:
        def changes(self, since: int | None) -> None:
            asked.append(since)
            raise DatabaseUnavailable("away")

    def settle(timeout_s: float, *, streams: tuple[str, ...]) -> tuple[relatum.MessageId, ...]:
        until = Deadline(timeout_s)
        while not until.has_passed:
            threading.Event().wait(until.left_s())
        return (relatum.MessageId(streams[0], 0),)

    options = ContextOptions(when_database_away="wait")
    with relatum.ContextRouter("orders", NOWHERE, options) as router:
        router._core.store = Store()  # type: ignore[assignment]
        sent = Sent("c", "orders-0", None)  # type: ignore[arg-type]
        with pytest.raises(DatabaseUnavailable):
            router._for_application(router._settle_unknown, settle, sent)(0.25)
    assert len(asked) == 1


@pytest.mark.parametrize("kind", [relatum.ContextRouter, relatum.AffinityRouter])
def test_a_published_message_stays_published_if_no_thread_can_start(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, no thread can start at interpreter shutdown; the message was published before."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with kind("orders", NOWHERE) as router:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        router._core.published()
        if kind is relatum.AffinityRouter:
            router._sets.record_use("x", 1, is_last=False)
        assert router.statistics().published == 1


async def test_a_names_lock_goes_to_those_who_came_first() -> None:
    """Tasks get a name's lock in the order they asked; other names are free; no lock is kept afterwards."""
    locks, order, may_end = NameLocks(asyncio.Lock), [], asyncio.Event()

    async def hold(name: str, number: int) -> None:
        async with locks(name):
            order.append((name, number))
            await may_end.wait()

    tasks = [asyncio.create_task(hold("x", number)) for number in range(5)]
    tasks.append(asyncio.create_task(hold("y", 0)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == [("x", 0), ("y", 0)]
    tasks[2].cancel()
    may_end.set()
    await asyncio.wait(tasks)
    assert order == [("x", 0), ("y", 0), ("x", 1), ("x", 3), ("x", 4)]
    tasks.clear()
    gc.collect()
    assert not len(locks._used)
