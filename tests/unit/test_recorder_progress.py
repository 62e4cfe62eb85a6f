"""What a recorder tells of itself: its lag, as far as it can know, and the name by which recorders share."""

import logging
import threading
from dataclasses import dataclass

import pytest

from relatum.metrics import exposition, report, retire
from relatum.recording.recorder import SHARED_NAME_BYTES_MAX, shared_name
from relatum.recording.statistics import Progress, RecorderMetrics
from relatum.waiting import Outages
from tests.support.alerts import documented_alerts, fires


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    """The progress of a recorder that has just been started."""
    return Progress(clock)


def test_who_knows_nothing_counts_from_the_start(clock: Clock, progress: Progress) -> None:
    """Before the first connection the lag is there and grows; offsets are not known."""
    clock.now += 7
    assert (progress.lag_s, progress.lag_offsets, progress.is_recording) == (7.0, None, False)
    progress.show(5)
    assert progress.lag_s == 7.0, "of a stream with messages nobody knows whether they are recorded"
    progress.show(None)
    assert progress.lag_s == 0.0, "an empty stream lacks nothing"


def test_what_was_read_and_not_written_tells_the_lag_also_after_the_session(clock: Clock, progress: Progress) -> None:
    """The age of the oldest message that could not be written, until it is."""
    unwritten: list[float] = []
    progress.begin(9, lambda: unwritten[0] if unwritten else None)
    progress.show(9)
    assert (progress.lag_s, progress.lag_offsets) == (0.0, 0)
    unwritten.append(990.0)
    progress.read(12)
    assert (progress.lag_s, progress.lag_offsets) == (10.0, 3)
    progress.stop()
    clock.now += 50
    assert (progress.lag_s, progress.lag_offsets) == (60.0, 3)
    progress.begin(9, lambda: None)
    progress.show(12)
    assert progress.lag_s == 60.0
    progress.written(12, 992.0)
    assert (progress.lag_s, progress.lag_offsets) == (0.0, 0)


def test_while_nobody_records_the_end_of_the_stream_tells_whether_anything_lacks(
    clock: Clock, progress: Progress
) -> None:
    """An idle stream has no lag while the broker says so; from then on it counts."""
    progress.begin(9, lambda: None)
    progress.show(9)
    progress.stop()
    clock.now += 40
    assert progress.lag_s == 40.0, "nobody has asked since"
    progress.show(9)
    assert progress.lag_s == 0.0
    clock.now += 30
    progress.show(11)
    assert (progress.lag_s, progress.lag_offsets) == (30.0, 2)


def test_a_backlog_counts_from_what_was_recorded_last(clock: Clock, progress: Progress) -> None:
    """What lies behind the last recorded message is younger than that one."""
    progress.begin(-1, lambda: None)
    progress.show(100)
    progress.written(49, 1040.0)
    clock.now = 1100.0
    assert (progress.lag_s, progress.lag_offsets) == (60.0, 51)
    progress.stop()
    assert progress.lag_s == 60.0


def test_who_stands_by_tells_nothing_of_the_lag(clock: Clock, progress: Progress) -> None:
    """The lag is told by who records; who takes over counts from when somebody else did."""
    progress.begin(9, lambda: 990.0)
    progress.show(12)
    progress.stop()
    progress.stand_by()
    assert (progress.lag_s, progress.lag_offsets, progress.recorded, progress.end) == (None, None, None, None)
    clock.now += 5
    progress.is_standby = False
    assert progress.lag_s == 5.0


def test_a_hole_is_told_of_for_a_day(clock: Clock, progress: Progress) -> None:
    """From the start there is a number, which is 0; each hole counts for a day after it was noticed."""
    assert progress.hole_offsets == 0
    progress.lost(7)
    clock.now += 80_000
    progress.lost(5)
    assert progress.hole_offsets == 12
    clock.now += 10_000
    assert progress.hole_offsets == 5
    clock.now += 80_000
    assert progress.hole_offsets == 0


def test_the_documented_alert_of_holes_fires_on_a_hole_and_not_before() -> None:
    """The series is there from the moment a stream is named, and what the page shows looks at it."""
    metrics = RecorderMetrics(Outages(logging.getLogger("relatum.recorder"), stop=threading.Event()))
    metrics.stream("orders")
    expression = documented_alerts()["RelatumHole"]
    report(metrics)
    page = exposition()
    assert 'relatum_hole_offsets{stream="orders"} 0.0' in page
    assert not fires(expression, page)
    metrics.stream("orders").lost(5)
    assert fires(expression, exposition())
    retire(metrics)


def test_recorders_share_by_a_name_of_their_streams() -> None:
    """The same in whatever order; PostgreSQL refuses an index entry of 2,700 bytes, and 2,000 names are more."""
    assert shared_name("/", ["b", "a", "b"]) == shared_name("/", ["a", "b"]) == "/ a,b"
    assert shared_name("/", ["a"]) != shared_name("other", ["a"])
    names = [f"orders-of-region-{n}" for n in range(2_000)]
    name = shared_name("/", names)
    assert len(name.encode()) <= SHARED_NAME_BYTES_MAX
    assert name == shared_name("/", reversed(names)) != shared_name("/", names[:-1])
