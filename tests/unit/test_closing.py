"""What is closed when its owner is dropped: never by the thread that drops it, which may hold any lock."""

import subprocess
import sys
import threading

from relatum.closing import close_when_dropped


class Owner:
    """Something that can be dropped."""


def test_another_thread_closes_it() -> None:
    """The one that drops it has a lock that closing needs: it goes on, and what was dropped is closed afterwards."""
    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    owner = Owner()
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
