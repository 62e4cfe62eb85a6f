"""The page that lists what is asked of others, and when an embedded recorder asks."""

from pathlib import Path

from relatum.recording.embedded import ASK_S, SUBJECTS_MAX, UNUSED_S, Subject, Watched
from relatum.wire.frames import Command

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text()

STREAM, EXCHANGE = Subject("orders", False), Subject("events", True)


def test_each_command_of_the_stream_protocol_is_on_the_page() -> None:
    """Whoever adds a question says there who asks it, how often, and where it is safe."""
    assert [command.name for command in Command if f"`{command.name}`" not in PAGE] == []


def due(watched: Watched, now: float) -> list[Subject]:
    """What is asked about in turn, as if nothing were found."""
    asked = []
    while (subject := watched.next(now)) is not None:
        watched.answered(subject, [], now)
        asked.append(subject)
    return asked


def test_a_name_is_asked_about_until_it_is_a_streams() -> None:
    """The pauses double up to a minute; after five minutes it has to be published to again."""
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
    """Whatever the routing keys: streams may be bound later. At most once a minute, and no more when nobody uses it."""
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
    """Before all that is known, and in the midst of a round of it; asked about once, it has no precedence any more."""
    watched, now = Watched(), ASK_S[0]
    known = [Subject(f"queue-{number}", False) for number in range(3)]
    for subject in known:
        watched.add("", subject.name, 0.0)
    assert due(watched, 0.0) == known
    assert watched.next(now) == known[0]
    watched.answered(known[0], [], now)
    watched.add("events", "key", now)
    assert due(watched, now) == [EXCHANGE, *known[1:]]
    assert due(watched, 1.5) == [*known, EXCHANGE]


def test_what_is_no_name_is_passed_over() -> None:
    """Whatever a caller gives: it is for the client to refuse, and what belongs to the broker is not asked about."""
    watched = Watched()
    wrong = [5, None, "\ud800", b"\xff", "x" * 256, ["a"], "", "amq.rabbitmq.reply-to.g1h2", b"amq.rabbitmq.log"]
    for name in wrong:
        assert not watched.add("", name, 0.0), name
        assert name in ("",) or not watched.add(name, "key", 0.0), name
    assert watched.add(b"", b"orders", 0.0)
    assert due(watched, 0.0) == [STREAM]


def test_what_is_watched_is_bounded() -> None:
    """The name that was used longest ago is forgotten first."""
    watched = Watched()
    for number in range(SUBJECTS_MAX + 5):
        watched.add("", f"queue-{number}", float(number))
        watched.add("", "queue-0", float(number))
    found = due(watched, 1e6)
    assert len(found) == SUBJECTS_MAX
    assert Subject("queue-0", False) in found
    assert Subject("queue-1", False) not in found
