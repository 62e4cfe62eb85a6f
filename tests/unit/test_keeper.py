"""What is done beside an object: again and again, by a thread, and once it is dropped."""

import gc
import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue

from relatum.closing import Keeper, close_when_dropped

EVERY_S = 0.001


class _Owner:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[str] = SimpleQueue()
        self.ended = threading.Event()
        self.ends: Keeper | None = None

    def call(self) -> None:
        self.calls.put(threading.current_thread().name)
        if self.ends is not None:
            self.ends.end()
            self.ended.set()


def test_a_thread_calls_again_until_it_is_ended() -> None:
    """The function is called again and again, and never once `end` has returned."""
    owner = _Owner()
    keeper = Keeper(owner, _Owner.call, every_s=EVERY_S, name="again")
    assert [owner.calls.get(timeout=90) for _ in range(3)] == ["again"] * 3
    keeper.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "again"]


def test_what_is_called_may_end_it() -> None:
    """Ending it from within the call does not wait for the call itself."""
    owner = _Owner()
    owner.ends = Keeper(owner, _Owner.call, every_s=0.05, name="ends itself")
    assert owner.ended.wait(90)


def test_a_thread_ends_with_its_owner() -> None:
    """Who forgets the object has no thread left of it."""
    owner = _Owner()
    keeper = Keeper(owner, _Owner.call, every_s=EVERY_S, name="alone")
    owner.calls.get(timeout=90)
    gone = weakref.ref(owner)
    del owner
    keeper._thread.join(90)
    gc.collect()
    assert gone() is None
    assert not keeper._thread.is_alive()


def test_another_thread_closes_what_is_dropped() -> None:
    """The one that drops it has a lock that closing needs: it goes on, and what was dropped is closed later."""
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
    """To its end: a thread would be stopped in the midst of it."""
    program = """
import time
from relatum.closing import close_when_dropped

class Owner: ...

def close():
    time.sleep(0.2)
    print("closed")

owner = Owner()
close_when_dropped(owner, close)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
