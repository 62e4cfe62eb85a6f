"""What a recorder reports of its progress, and what an embedded one asks about names."""

from types import SimpleNamespace
from typing import Any

import pytest

from relatum.metrics import exposition
from relatum.reading import BrokerAddress
from relatum.recording.embedded import ASK_S, SUBJECTS_MAX, UNUSED_S, Subject, Watched
from relatum.recording.recorder import SHARED_NAME_BYTES_MAX, shared_name
from relatum.recording.recorder_group import RecorderGroup
from relatum.recording.statistics import Progress
from tests.support.alerts import documented_alerts, fires


@pytest.fixture
def clock() -> Any:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def progress(clock: Any) -> Progress:
    return Progress(lambda: clock.now)


def lag(progress: Progress) -> tuple[float | None, int | None]:
    """The lag in seconds and in offsets."""
    found = progress.statistics()
    return found.lag_s, found.lag_offsets


def test_who_knows_nothing_counts_from_the_start(clock: Any, progress: Progress) -> None:
    """Before the first connection the lag grows from the start; an empty stream has none."""
    clock.now += 7
    assert (*lag(progress), progress.statistics().is_recording) == (7.0, None, False)
    progress.show(5)
    assert lag(progress)[0] == 7.0, "of a stream with messages nobody knows whether they are recorded"
    progress.show(None)
    assert lag(progress)[0] == 0.0, "an empty stream lacks nothing"


def test_what_was_read_and_not_written_tells_the_lag_also_after_the_session(clock: Any, progress: Progress) -> None:
    """The lag is the age of the oldest unwritten message, also after the session, until it is written."""
    unwritten: list[float] = []
    progress.begin(9, lambda: unwritten[0] if unwritten else None)
    progress.show(9)
    assert lag(progress) == (0.0, 0)
    unwritten.append(990.0)
    progress.read(12)
    assert lag(progress) == (10.0, 3)
    progress.stop()
    clock.now += 50
    assert lag(progress) == (60.0, 3)
    progress.begin(9, lambda: None)
    progress.show(12)
    assert lag(progress)[0] == 60.0
    progress.written(12, 992.0)
    assert lag(progress) == (0.0, 0)


def test_while_nobody_records_the_end_of_the_stream_tells_the_lag(clock: Any, progress: Progress) -> None:
    """Without a recorder, an idle stream has no lag while the broker reports the same end."""
    progress.begin(9, lambda: None)
    progress.show(9)
    progress.stop()
    clock.now += 40
    assert lag(progress)[0] == 40.0, "nobody has asked since"
    progress.show(9)
    assert lag(progress)[0] == 0.0
    clock.now += 30
    progress.show(11)
    assert lag(progress) == (30.0, 2)


def test_a_backlog_counts_from_what_was_recorded_last(clock: Any, progress: Progress) -> None:
    """A backlog's lag counts from the last recorded message."""
    progress.begin(-1, lambda: None)
    progress.show(100)
    progress.written(49, 1040.0)
    clock.now = 1100.0
    assert lag(progress) == (60.0, 51)
    progress.stop()
    assert lag(progress)[0] == 60.0


def test_who_stands_by_tells_nothing_of_the_lag(clock: Any, progress: Progress) -> None:
    """A standby reports no lag; after a takeover its lag counts from the takeover."""
    progress.begin(9, lambda: 990.0)
    progress.show(12)
    progress.stop()
    progress.stand_by()
    assert (*lag(progress), progress.recorded, progress.end) == (None, None, None, None)
    clock.now += 5
    progress.is_standby = False
    assert lag(progress)[0] == 5.0


def test_a_hole_is_told_of_for_a_day(clock: Any, progress: Progress) -> None:
    """A hole counts for a day after it was noticed, and the number is 0 before."""
    assert progress.statistics().hole_offsets == 0
    progress.lost(7)
    clock.now += 80_000
    progress.lost(5)
    assert progress.statistics().hole_offsets == 12
    clock.now += 10_000
    assert progress.statistics().hole_offsets == 5
    clock.now += 80_000
    assert progress.statistics().hole_offsets == 0


def test_the_documented_alert_of_holes_fires_on_a_hole_and_not_before() -> None:
    """The documented alert has its series from the start and fires on the first hole."""
    group = RecorderGroup(BrokerAddress.of("amqp://localhost"), "postgresql://localhost/none", connections_max=1)
    group.progress_of("orders")
    expression = documented_alerts()["RelatumHole"]
    page = exposition()
    assert 'relatum_hole_offsets{stream="orders"} 0.0' in page
    assert not fires(expression, page)
    group.progress_of("orders").lost(5)
    assert fires(expression, exposition())
    group.stop()


def test_recorders_share_by_a_name_of_their_streams() -> None:
    """The shared name is the same in any order of streams, and fits PostgreSQL's index."""
    assert shared_name("/", ["b", "a", "b"]) == shared_name("/", ["a", "b"]) == "/ a,b"
    assert shared_name("/", ["a"]) != shared_name("other", ["a"])
    names = [f"orders-of-region-{n}" for n in range(2_000)]
    name = shared_name("/", names)
    assert len(name.encode()) <= SHARED_NAME_BYTES_MAX
    assert name == shared_name("/", reversed(names)) != shared_name("/", names[:-1])


STREAM, EXCHANGE = Subject("orders", False), Subject("events", True)


def due(watched: Watched, now: float) -> list[Subject]:
    """What is asked about in turn, as if nothing were found."""
    asked = []
    while (subject := watched.next(now)) is not None:
        watched.answered(subject, [], now)
        asked.append(subject)
    return asked


def test_a_name_is_asked_about_until_it_is_a_streams() -> None:
    """A name is asked about with doubling pauses until it is a stream's or unused for five minutes."""
    watched, now, pauses = Watched(), 0.0, []
    assert watched.add("", "orders", now)
    while found := due(watched, now):
        assert found == [STREAM]
        pauses.append(watched.next_s(now))
        now += pauses[-1]
    assert pauses == [min(ASK_S[0] * 2**each, ASK_S[1]) for each in range(len(pauses))]
    assert UNUSED_S < now <= UNUSED_S + ASK_S[1]
    assert watched.add("", "orders", now)
    watched.answered(STREAM, ["orders"], now)
    assert not watched.add("", "orders", now), "a stream that is recorded is settled"
    assert not due(watched, now + 10_000)


def test_an_exchange_is_asked_about_as_long_as_it_is_used() -> None:
    """An exchange is asked about once a minute while it is used, whatever the routing keys."""
    watched, now, asked = Watched(), 0.0, 0
    for key in range(10_000):
        assert watched.add("events", f"key-{key}", now) == (key == 0)
        if (subject := watched.next(now)) is not None:
            assert subject == EXCHANGE
            watched.answered(subject, ["one"], now)
            asked += 1
        now += 1
    assert 10_000 / ASK_S[1] <= asked <= 10_000 / ASK_S[1] + 8
    assert not due(watched, now + UNUSED_S + 1)


def test_what_is_new_has_its_turn_first() -> None:
    """A new name is asked about before known ones, once."""
    watched, now = Watched(), ASK_S[0]
    known = [Subject(f"queue-{number}", False) for number in range(3)]
    for subject in known:
        watched.add("", subject.name, 0.0)
    assert (due(watched, 0.0), watched.next(now)) == (known, known[0])
    watched.answered(known[0], [], now)
    watched.add("events", "key", now)
    assert (due(watched, now), due(watched, 1.5)) == ([EXCHANGE, *known[1:]], [*known, EXCHANGE])


def test_a_new_name_whose_query_fails_holds_up_no_other() -> None:
    """Each new name has its turn, also while the query of the first one keeps failing."""
    watched = Watched()
    watched.add("events", "key", 0.0)
    watched.add("", "orders", 0.0)
    assert [watched.next(0.0) for _ in range(3)] == [EXCHANGE, STREAM, EXCHANGE]
    assert list(watched.new) == [STREAM, EXCHANGE]


def test_what_is_no_name_is_passed_over() -> None:
    """A value that is not a name, or a name of the broker's own, is not asked about."""
    watched = Watched()
    wrong = [5, None, "\ud800", b"\xff", "x" * 256, "a\0b", ["a"], "", "amq.rabbitmq.reply-to.g1", b"amq.rabbitmq.log"]
    for name in wrong:
        assert not watched.add("", name, 0.0), name
        assert name in ("",) or not watched.add(name, "key", 0.0), name
    assert watched.add(b"", b"orders", 0.0)
    assert due(watched, 0.0) == [STREAM]


def test_what_is_watched_is_bounded() -> None:
    """At the limit the name that was used longest ago is forgotten."""
    watched = Watched()
    for number in range(SUBJECTS_MAX + 5):
        watched.add("", f"queue-{number}", float(number))
        watched.add("", "queue-0", float(number))
    found = due(watched, 1e6)
    assert len(found) == SUBJECTS_MAX
    assert Subject("queue-0", False) in found
    assert Subject("queue-1", False) not in found
