"""What Spark's Python workers are spared."""

import gc
import os
from collections.abc import Iterator

import pytest

from relatum_spark._workers import USED_AGAIN, spare_collections


@pytest.fixture
def thawed() -> Iterator[None]:
    """What a test freezes is collected again after it, and a worker's first call is one again."""
    spare_collections.cache_clear()
    yield
    spare_collections.cache_clear()
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_a_worker_that_is_used_again_collects_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there at the first call is looked at no more; what is there at later ones is."""
    monkeypatch.setenv(USED_AGAIN, "1")
    before = gc.get_freeze_count()
    spare_collections()
    frozen = gc.get_freeze_count()
    assert frozen > before
    assert len(gc.get_objects()) < frozen - before
    new = [[number] for number in range(1_000)]
    spare_collections()
    # What was frozen may be freed.
    assert gc.get_freeze_count() <= frozen
    assert any(each is new for each in gc.get_objects())


@pytest.mark.usefixtures("thawed")
def test_other_processes_are_left_alone() -> None:
    """A driver's program decides on its own collections."""
    assert USED_AGAIN not in os.environ
    before = gc.get_freeze_count()
    spare_collections()
    assert gc.get_freeze_count() == before
