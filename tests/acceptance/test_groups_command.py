"""`relatum groups`: what is not complete, one group, and a consumer of groups."""

import pytest

from relatum.membership import GROUP_KEY
from relatum_cli.exits import ExitCode
from relatum_consumer import GroupConsumer, Relations
from tests.acceptance._command import Relatum
from tests.support.groups import group_id, of_group, whole_group
from tests.support.place import Place

WHOLE, LACKING, UNSOUND, SECOND, UNKNOWN = 1, 2, 3, 4, 5
HOUR_US = 3_600_000_000

MESSAGES = [
    *whole_group(WHOLE, 2),
    of_group(LACKING, 1, time_us=HOUR_US),
    of_group(LACKING, 4, time_us=2 * HOUR_US),
    *whole_group(UNSOUND, 2),
    of_group(UNSOUND, 3),
    *whole_group(SECOND, 1),
]


@pytest.fixture
def stream(place: Place) -> str:
    """A recorded stream with two sound groups, one that lacks messages, and one with a number past its last."""
    place.put(*MESSAGES)
    place.record(keys=[GROUP_KEY])
    return place.stream


def test_incomplete_groups_are_listed(relatum: Relatum, stream: str) -> None:
    """Incomplete groups older than an hour, or than was said, are listed with what they lack and where they are."""
    (lacking,) = relatum.json("groups")
    assert (lacking["group_id"], lacking["missing"], lacking["seen"]) == (group_id(LACKING), [[2, 3]], 2)
    assert (lacking["first_seen"], lacking["last_seen"]) == ("1970-01-01T01:00:00+00:00", "1970-01-01T02:00:00+00:00")
    assert lacking["places"] == [{"stream": stream, "offset": 2}, {"stream": stream, "offset": 3}]
    every = relatum.json("groups", stream, "--older-than", "0")
    assert [each["group_id"] for each in every] == [group_id(LACKING), group_id(UNSOUND)]
    assert [each["anomalies"] for each in every] == [[], ["past_last"]]
    shown = relatum.ok("groups", stream, "--older-than", "0s")
    assert group_id(LACKING) in shown
    assert "2–3" in shown
    assert relatum.run("groups", "nobody-knows-it").returncode == ExitCode.NOT_THERE
    assert all(each["is_proven"] for each in every)
    recorded = relatum.json("groups", "--older-than", "0", "--recorded")
    assert recorded == [each | {"is_proven": False} for each in every]


def test_one_group_is_shown(relatum: Relatum, stream: str) -> None:
    """A group is shown with its position and messages, and the exit code says whether it is whole."""
    for number, code, words in (
        (WHOLE, ExitCode.OK, stream),
        (LACKING, ExitCode.NOT_YET, "2–3"),
        (UNKNOWN, ExitCode.NOT_THERE, ""),
        (UNSOUND, ExitCode.DIFFERENT, ""),
    ):
        ended = relatum.run("groups", stream, "--group", group_id(number))
        assert (ended.returncode, words in ended.stdout) == (code, True), ended.stderr
    document = relatum.json("groups", "--group", group_id(LACKING))
    assert (document["is_complete"], document["next_sequence"], document["last_sequence"]) == (False, 2, None)
    messages = [(each["sequence"], each["last"], each["offset"]) for each in document["messages"]]
    assert messages == [(1, False, 2), (4, False, 3)]


def test_a_consumer_is_shown(relatum: Relatum, stream: str, place: Place) -> None:
    """A consumer of groups is shown with its groups by state, its members, and how far each stream was read."""
    consumer = GroupConsumer("billing", member="host-1", prefetch=2, lease_s=60)
    with (
        Relations(place.amqp, place.database) as relations,
        relations.groups(stream, consumer=consumer, on_conflict="skip") as groups,
    ):
        next(groups).acknowledge()
        place.put(b"later", b"and later")
        next(groups)
        status = relatum.json("groups", "--consumer", "billing")
    assert status["counts"] == {"open": 1, "ready": 0, "claimed": 1, "done": 1, "dead": 1}
    assert (status["consumer"], status["streams"], status["order"]) == ("billing", [stream], "logical")
    assert status["sources"] == [{"stream": stream, "scanned_to": 8, "lag_offsets": 2}]
    [member] = status["members"]
    assert (member["holder"], member["claimed"], member["is_alive"]) == ("host-1", 1, True)
    assert status["oldest_open_at"]
    assert status["oldest_waiting_at"]
    shown = relatum.ok("groups", "--consumer", "billing")
    assert f"{stream}\t8\t2\n" in shown
    assert "host-1" not in shown, "it has given back what it had"
    assert relatum.run("groups", "--consumer", "nobody").returncode == ExitCode.NOT_THERE
