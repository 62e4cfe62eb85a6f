"""The looks that go on in the background while messages are published."""

import queue
import threading

import pytest

from relatum.contexts import _looks
from relatum.contexts._looks import BackgroundLooks
from relatum.errors import DatabaseUnavailable


def test_each_message_is_followed_by_a_look() -> None:
    """A look begins after each time one is wanted, and none where none is, or after the end."""
    looked: queue.Queue[int] = queue.Queue()
    looks = BackgroundLooks(looked.put, 0.002)
    for _ in range(3):
        looks.want()
        assert looked.get(timeout=90) == 1
    looks.close()
    looks.want()
    assert looked.empty()
    unused = BackgroundLooks(looked.put, 0.002)
    unused.close()
    unused.want()
    assert unused._thread is None


def test_looks_go_on_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wanted while the database was away is looked at when it is back, without being wanted again."""
    monkeypatch.setattr(_looks, "AWAY_S", 0.001)
    fails = [DatabaseUnavailable("away"), DatabaseUnavailable("away")]
    looked = threading.Event()

    def look(_published: int) -> None:
        if fails:
            raise fails.pop()
        looked.set()

    looks = BackgroundLooks(look, 0.002)
    looks.want()
    assert looked.wait(90)
    looks.close()
