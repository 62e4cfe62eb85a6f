"""What a fork does to objects, and what is done beside an object or once it is dropped."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from relatum.common.closing import PeriodicThread, close_when_dropped
from relatum.common.processes import after_fork, refuse_in_child
from relatum.common.uuid7 import uuid7
from relatum.errors import ConfigurationError, UsedAfterFork
from relatum.reading import Broker, BrokerAddress
from tests.support.forking import in_child


class _Single:
    def __init__(self) -> None:
        self.name = "mine"
        self.closed = 0
        refuse_in_child(self, "a thing")

    def use(self) -> str:
        return self.name

    async def use_later(self) -> str:
        return self.name

    def __iter__(self) -> Iterator[str]:
        return iter([self.name])

    def close(self) -> bool:
        self.closed += 1
        return False

    def __enter__(self) -> "_Single":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def test_each_use_of_a_parents_object_is_refused() -> None:
    """In a child a parent's object refuses methods, iteration and blocks; attributes stay, and closing does nothing."""
    one = _Single()

    def in_the_child() -> int:
        assert one.name == "mine"
        assert isinstance(one, _Single)
        for use in (one.use, lambda: asyncio.run(one.use_later()), lambda: list(one), one.__enter__):
            with pytest.raises(UsedAfterFork, match="a thing was created before"):
                use()
        assert one.close() is True
        assert not one.__exit__(KeyError, KeyError(), None)
        return one.closed

    assert in_child(in_the_child) == 0
    assert (one.use(), list(one)) == ("mine", ["mine"])
    assert issubclass(UsedAfterFork, ConfigurationError)


def test_objects_are_renewed_before_anything_else_runs_in_the_child() -> None:
    """Objects are renewed in a child and in its child; dropped ones are not kept for it."""
    calls: list[str] = []

    class Renewed:
        pass

    kept, dropped = Renewed(), Renewed()
    after_fork(kept, lambda _: calls.append("kept"))
    after_fork(dropped, lambda _: calls.append("dropped"))
    del dropped
    assert in_child(lambda: calls + in_child(lambda: list(calls))) == ["kept", "kept", "kept"]
    assert calls == []


def test_a_child_asks_for_the_password_by_itself() -> None:
    """A call that runs during the fork never returns in the child, also if another broker has the same function."""
    asked, answer = threading.Event(), threading.Event()

    def token() -> str:
        asked.set()
        answer.wait()
        return "token"

    first, second = (BrokerAddress.of(Broker("amqp://nowhere", password=token)) for _ in range(2))
    assert first.password_function == second.password_function
    asking = threading.Thread(target=second.secret)
    asking.start()
    asked.wait()

    def in_the_child() -> str:
        answer.set()
        return second.secret()

    assert in_child(in_the_child) == "token"
    answer.set()
    asking.join()


def test_a_child_makes_ids_of_its_own() -> None:
    """Ids of one moment differ between parent and child."""
    uuid7(1)
    theirs = in_child(lambda: [uuid7(1) for _ in range(100)])
    assert not {uuid7(1) for _ in range(100)} & set(theirs)


EVERY_S = 0.001


class _Owner:
    def __init__(self) -> None:
        self.calls: SimpleQueue[str] = SimpleQueue()
        self.ended = threading.Event()
        self.ends: PeriodicThread | None = None

    def call(self) -> None:
        self.calls.put(threading.current_thread().name)
        if self.ends is not None:
            self.ends.end()
            self.ended.set()


def test_a_thread_calls_again_until_it_is_ended() -> None:
    """The function is called until `end` returns; ended from within the call, the thread does not wait for itself."""
    owner = _Owner()
    keeper = PeriodicThread(owner, _Owner.call, every_s=EVERY_S, name="again")
    assert [owner.calls.get(timeout=90) for _ in range(3)] == ["again"] * 3
    keeper.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "again"]
    owner.ends = PeriodicThread(owner, _Owner.call, every_s=0.05, name="ends itself")
    assert owner.ended.wait(90)


def test_a_thread_ends_with_its_owner() -> None:
    """A keeper's thread ends once its owner is dropped."""
    owner = _Owner()
    keeper = PeriodicThread(owner, _Owner.call, every_s=EVERY_S, name="alone")
    owner.calls.get(timeout=90)
    gone = weakref.ref(owner)
    del owner
    keeper._thread.join(90)
    gc.collect()
    assert gone() is None
    assert not keeper._thread.is_alive()


def test_another_thread_closes_what_is_dropped() -> None:
    """A dropped object is closed by another thread, so that a lock its dropper holds does no harm."""
    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    owner = _Owner()
    close_when_dropped(owner, close)
    with lock:
        del owner
        assert not closed.is_set()
    assert closed.wait(90)


def test_what_is_never_dropped_is_closed_as_the_process_ends() -> None:
    """An object that is never dropped is closed completely as the process ends."""
    program = """
import time
from relatum.common.closing import close_when_dropped

class Owner: ...

def close():
    time.sleep(0.2)
    print("closed")

owner = Owner()
close_when_dropped(owner, close)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
