"""Reading message groups from real streams and a real database, through both faces."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from pkgutil import resolve_name
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum import Broker, errors
from relatum.keys import moment
from relatum.membership import GROUP_KEY, Anomaly, GroupPosition, GroupStatus, Membership
from relatum.recording import backfill, forget, prune
from relatum.store.catalog import add_keys, ensure_stream
from relatum_consumer import Relations, Status
from relatum_consumer.groups import GroupPage
from tests.support import publish_plain, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support.groups import Naive, group_id, ids, ids_of, of_group, shuffled, whole_group
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.raising import raising
from tests.support.relations import questions

KEYS = [GROUP_KEY]


def places(groups: Any) -> list[list[tuple[str, int]]]:
    return [[tuple(message.id) for message in group] for group in groups]


def bodies(groups: Any) -> list[list[bytes]]:
    return [[message.body for message in group] for group in groups]


def scattered(seed: int, streams: list[str]) -> dict[str, list[Any]]:
    """Groups whose messages are anywhere: some incomplete, some with duplicates, between messages in no group."""
    chooser = random.Random(seed)
    messages: list[Any] = []
    for number in range(60):
        group = whole_group(number, chooser.choice([1, 2, 5, 17]))
        if chooser.random() < 0.2:
            del group[chooser.randrange(len(group))]
        if group and chooser.random() < 0.3:
            group.append(chooser.choice(group))
        messages += group
    messages += [(b"alone", {"other": number}) for number in range(30)]
    chooser.shuffle(messages)
    spread: dict[str, list[Any]] = {stream: [] for stream in streams}
    for time_us, (body, headers) in enumerate(messages):
        # Also equal times: two messages in each microsecond.
        spread[chooser.choice(streams)].append((body, headers | {"relatum_time": 1_000_000 + time_us // 2}))
    return spread


@pytest.mark.parametrize("count", [1, 3])
def test_groups_are_what_a_naive_reader_of_everything_finds(
    place: Place, streams: list[str], relations: Relations, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each complete group is found once and in order, however much of it is recorded, across many windows."""
    monkeypatch.setattr("relatum_consumer.groups._finding.WINDOW_OFFSETS", 7)
    messages = scattered(count, streams[:count])
    half = {stream: len(each) // 2 for stream, each in messages.items()}
    for stream, each in messages.items():
        place.put(*each[: half[stream]], to=stream)
    place.record(*messages)
    for stream, each in messages.items():
        place.put(*each[half[stream] :], to=stream)
    naive = Naive(place.amqp, messages)
    for recorded in ("in part", "altogether"):
        for order in ("logical", "physical"):
            assert places(relations.groups(list(messages), order=order)) == naive.complete(order), recorded
        place.record(*messages)


def test_a_stream_s_own_order_is_that_of_its_offsets_whatever_its_times_are(place: Place, relations: Relations) -> None:
    """Times that run backwards change neither the order of groups nor that of arrival."""
    messages = [of_group(n, s, last=s == 2, time_us=1_000 - 10 * n - s) for n, s in [(1, 2), (2, 1), (1, 1), (2, 2)]]
    place.put_recorded(*messages)
    assert bodies(relations.groups(place.stream)) == [[b"2-1", b"2-2"], [b"1-1", b"1-2"]]
    assert bodies(relations.groups(place.stream, order="physical")) == [[b"1-2", b"1-1"], [b"2-1", b"2-2"]]


def test_reading_begins_with_the_first_group_that_stands_at_the_start(place: Place, relations: Relations) -> None:
    """By offset and by time; a group behind the start is whole though some of it is before."""
    messages = [(1, 1), (2, 2), (1, 2), (2, 1), (3, 1), (3, 2)]
    place.put_recorded(*(of_group(n, s, last=s == 2, time_us=s + n * 1_000_000) for n, s in messages))
    third, fourth = (relations.read(place.stream, offset).time for offset in (3, 4))
    logical = {0: ids(1, 2, 3), 1: ids(2, 3), 3: ids(2, 3), 4: ids(3), 5: [], third: ids(2, 3)}
    physical = {1: ids(2, 3), 2: ids(3), fourth: ids(3)}
    for order, expected in (("logical", logical), ("physical", physical)):
        found = {start: ids_of(relations.groups(place.stream, start=start, order=order)) for start in expected}
        assert found == expected, order


@pytest.mark.parametrize("one_face", ["blocking"])
def test_bad_arguments_are_refused_before_anything_is_read(place: Place, relations: Relations) -> None:
    """The call refuses each bad argument by its own error; a missing stream is an error once it is read."""
    options = {"order": ["random"], "on_duplicate": ["last"], "on_conflict": ["ignore", "dead_letter"]}
    options["start"] = [-1, True, "first", 2**63, 1.5]
    for option, wrong in [(option, wrong) for option, values in options.items() for wrong in values]:
        with pytest.raises(errors.InvalidInput):
            relations.groups(place.stream, **{option: wrong})
    with pytest.raises(errors.InvalidInput):
        relations.groups([place.stream, "other"], start=5)
    for bad in ("", "abc", "G" * 48, group_id(1).upper().replace("0", "A"), 7, None):
        with pytest.raises(errors.InvalidGroup):
            relations.group(bad)  # type: ignore[arg-type]
    for sequence in (0, 1_000_000_000, True, "1"):
        with pytest.raises(errors.InvalidGroup):
            relations.grouped(group_id(1), sequence)  # type: ignore[arg-type]
    place.record()
    with pytest.raises(errors.StreamNotFound):
        list(relations.groups("relatum-no-such-stream"))
    assert list(relations.groups()) == []


def test_without_the_key_of_groups_nothing_is_guessed(place: Place, relations: Relations) -> None:
    """The error names the key and says how it is defined."""
    for ask in (
        lambda: list(relations.groups(place.stream)),
        lambda: relations.group(group_id(1)),
        lambda: relations.grouped(group_id(1), 1),
        lambda: relations.group_position(group_id(1)),
        lambda: relations.incomplete_groups(older_than=0),
    ):
        with raising(errors.KeyNotDefined, match="GROUP_KEY", key="message_group"):
            ask()


def test_a_position_says_which_streams_it_holds_for(
    place: Place, streams: list[str], relations: Relations, channel: BlockingChannel
) -> None:
    """A group continues from a proven position of its own stream alone, so no number is given twice after a kill."""
    known, unknown, _ = streams
    place.put_recorded(of_group(2, 1), to=known)
    place.put(of_group(1, 1), of_group(1, 2), to=unknown)
    of_all = relations.group_position(group_id(1))
    assert (of_all.seen, of_all.streams, of_all.is_of_all) == (0, (known,), True)
    of_one = relations.group_position(group_id(1), streams=unknown)
    assert (of_one.contiguous, of_one.streams, of_one.is_of_all) == (2, (unknown,), False)
    never_seen = GroupPosition(group_id(1), 0, 0, (), None, 0)
    for position, exchange, key, holds in (
        (of_all, "", known, True),
        (of_all, "", unknown, False),
        (of_all, known, "key", True),
        (of_all, "a topic", "key", False),
        (of_one, "", unknown, True),
        (of_one, "", known, False),
        (of_one, "a topic", "key", True),
        (never_seen, "", "wherever", True),
    ):
        assert position.holds_for(exchange, key) is holds, (position, exchange, key)
    group = relations.group(group_id(1), streams=unknown)
    assert group.position is not None
    assert (len(group), group.position.holds_for("", unknown)) == (2, True)
    assert not relations.group_position(group_id(1), streams=known, complete=False).is_proven
    relatum.intercept(channel.connection)
    group = relatum.MessageGroup(channel, "", unknown)
    with pytest.raises(errors.InvalidGroup, match=f"streams='{unknown}'"):
        group.resume(of_all)
    unproven = relations.group_position(group_id(1), streams=unknown, complete=False)
    with pytest.raises(errors.InvalidGroup, match="not proven"):
        group.resume(unproven)
    group.resume(relations.group_position(group_id(1), streams=unknown))
    group.put(b"1-3", last=True)
    position = relations.group_position(group_id(1), streams=unknown)
    assert (position.is_complete, position.seen, position.anomalies) == (True, 3, ())


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_batch_that_cannot_be_unpacked_makes_no_position_proven(
    place: Place, relations: Relations, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch may have further messages of the group, so a publisher cannot continue from the position."""
    place.put(of_group(1, 1))
    # RabbitMQ 4.3 refuses codecs that it does not know.
    monkeypatch.setattr("relatum.wire.chunk._CODEC_NAMES", {})
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish((1, 2, 100, b"of an unknown codec"))
    if is_recorded:
        place.record()
    else:
        add_keys(place.engine, [GROUP_KEY])
    for position in (
        relations.group_position(group_id(1), streams=place.stream),
        relations.group(group_id(1), streams=place.stream).position,
    ):
        assert (position.contiguous, position.is_proven) == (1, False)
    (report,) = relations.incomplete_groups(place.stream, older_than=0)
    assert not report.position.is_proven


def test_where_no_stream_is_recorded_a_group_s_position_is_not_known(place: Place, relations: Relations) -> None:
    """Nobody named a stream, and the database knows none: a new group cannot be distinguished from an invisible one."""
    add_keys(place.engine, [GROUP_KEY])
    place.put(of_group(1, 1))
    for ask in (relations.group_position, relations.group):
        for complete in (True, False):
            with pytest.raises(errors.NothingRecorded):
                ask(group_id(1), complete=complete)
    assert relations.group_position(group_id(1), streams=place.stream).seen == 1


def test_streams_that_are_long_gone_cost_a_look_at_all_recorded_ones_nothing(
    place: Place, streams: list[str], relations: Relations, caplog: pytest.LogCaptureFixture
) -> None:
    """They are asked for all together: no channel is closed over one, and none is waited for."""
    place.put_recorded(of_group(1, 1), of_group(1, 2), to=streams[0])
    with place.engine.begin() as connection:
        for _ in range(30):
            ensure_stream(connection, "/", unique_name())
    with caplog.at_level("WARNING"):
        position = relations.group_position(group_id(1))
        assert ids_of(relations.incomplete_groups(older_than=0)) == ids(1)
        assert relations.find(GROUP_KEY.name, (group_id(2), 1, False)).status is Status.ABSENT
    assert position.contiguous == 2
    assert not caplog.records, caplog.text


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_group_s_position_says_where_to_go_on(
    place: Place, streams: list[str], relations: Relations, is_recorded: bool
) -> None:
    """Highest contiguous number, what is missing, whether the last was seen; also of what is not recorded."""
    place.record(*streams)
    place.put(of_group(1, 1), of_group(1, 4), of_group(2, 1), to=streams[0])
    place.put(of_group(1, 2), of_group(1, 7, last=True), to=streams[1])
    if is_recorded:
        place.record(*streams)
    position = relations.group_position(group_id(1))
    assert (position.contiguous, position.next_sequence, position.seen) == (2, 3, 4)
    assert (position.missing, position.last_sequence, position.is_complete) == (((3, 3), (5, 6)), 7, False)
    assert relations.group_position(group_id(1), streams=streams[0]).contiguous == 1
    assert relations.group_position(group_id(2)).last_sequence is None
    assert relations.group_position(group_id(3)).next_sequence == 1
    if not is_recorded:
        assert relations.group_position(group_id(1), complete=False).next_sequence == 1


@pytest.mark.differs
def test_a_group_is_found_beside_a_stream_that_is_not_the_recorded_one(place: Place, streams: list[str]) -> None:
    """If no stream is named, a stream that was declared again is left out, and makes a position unproven."""
    place.put(of_group(1, 1), *whole_group(2, 2), to=streams[0])
    place.record(streams[0])
    place.put_recorded(b"before")
    place.declare_again()
    place.put(b"after")
    for ask in (lambda each: each.group_position(group_id(1)), lambda each: each.group(group_id(1)).position):
        with Relations(place.amqp, place.database) as relations:
            position = ask(relations)
            assert (position.contiguous, position.is_proven) == (1, False)
    with Relations(place.amqp, place.database) as relations:
        assert ids_of(relations._newest_groups().groups) == ids(2, 1)
    with Relations(place.amqp, place.database) as relations:
        assert ids_of(relations.groups()) == ids(2)
        with pytest.raises(errors.StreamReplaced):
            list(relations.groups(place.stream))


def test_a_stream_that_is_forgotten_meanwhile_hides_no_group(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If rows are deleted while groups are found, the iteration ends with an error, not as if these were all."""
    place.put_recorded(*whole_group(1, 2))

    def after_forget(*arguments: Any) -> Any:
        monkeypatch.undo()
        forget(place.database, [place.stream])
        return resolve_name("relatum_consumer.groups._finding:batches")(*arguments)

    monkeypatch.setattr("relatum_consumer.groups._finding.batches", after_forget)
    with pytest.raises(errors.StreamReplaced):
        list(relations.groups(place.stream))


def test_a_group_is_found_by_its_id_and_a_message_by_id_and_number(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """A group, complete or not, is found by its id, and each of its messages by number and with its status."""
    place.put(of_group(1, 3, last=True), of_group(1, 1), (b"alone", {"group_last": 7}), to=streams[0])
    place.put(of_group(1, 2), of_group(2, 2), to=streams[1])
    place.record(*streams)
    group = relations.group(group_id(1))
    assert [message.body for message in group] == [b"1-1", b"1-2", b"1-3"]
    physical = relations.group(group_id(1), order="physical", streams=streams[0])
    assert [message.body for message in physical] == [b"1-3", b"1-1"]
    assert group.is_complete
    assert (group.at(2), group.at(4)) == (group[1], None)
    statuses = [group.status_of(message) for message in group]
    assert statuses == [GroupStatus.IN_GROUP, GroupStatus.IN_GROUP, GroupStatus.LAST_IN_GROUP]
    assert group.status_of(relations.read(streams[0], 2)) is GroupStatus.NOT_IN_GROUP
    part = relations.group(group_id(2))
    assert (len(part), part.is_complete, part.position.missing) == (1, False, ((1, 1),))
    assert len(relations.group(group_id(9))) == 0
    assert relations.grouped(group_id(1), 3).ids == ((streams[0], 0),)
    assert relations.grouped(group_id(1), 2, streams=streams[1]).first == group[1]
    assert relations.grouped(group_id(1), 4).status is Status.ABSENT


def test_duplicates_are_kept_apart_or_an_error(place: Place, relations: Relations) -> None:
    """A group takes the message that arrived first and names the others, unless duplicates are an error."""
    place.put_recorded(*whole_group(1, 2), of_group(1, 1), *whole_group(2, 1))
    first, second = relations.groups(place.stream)
    assert [message.offset for message in first] == [0, 1]
    assert [message.offset for message in first.duplicates] == [2]
    assert (first.position.anomalies, second.duplicates) == ((Anomaly.DUPLICATE,), ())
    assert Anomaly.DUPLICATE in relations.group_position(group_id(1)).anomalies
    with raising(errors.GroupConflict, group_id=group_id(1), anomaly=Anomaly.DUPLICATE):
        list(relations.groups(place.stream, on_duplicate="raise"))


def test_a_message_routed_to_two_streams_is_no_duplicate(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """Its copies have one message_id; another message with that number is a duplicate anyway."""
    named = lambda name, place: (  # noqa: E731
        b"",
        pika.BasicProperties(message_id=name, headers=of_group(*place, last=place[1] == 2)[1]),
    )
    for stream in streams[:2]:
        place.put(named("a", (1, 1)), named("b", (1, 2)), named("c", (2, 1)), to=stream)
    place.put(named("d", (2, 1)), named("e", (2, 2)), to=streams[1])
    place.record(*streams)
    first, second = relations.groups(streams)
    assert (len(first), first.duplicates, first.position.anomalies) == (2, (), ())
    assert [message.properties.message_id for message in second.duplicates] == ["d"]
    assert relations.group_position(group_id(1)).anomalies == ()
    assert relations.group_position(group_id(2)).anomalies == (Anomaly.DUPLICATE,)
    with pytest.raises(errors.GroupConflict):
        list(relations.groups(streams, on_duplicate="raise"))


@pytest.mark.parametrize(
    ("messages", "anomaly"),
    [
        ([of_group(2, 1), of_group(2, 2, last=True), of_group(2, 3, last=True)], Anomaly.TWO_LASTS),
        ([of_group(2, 1), of_group(2, 2, last=True), of_group(2, 3)], Anomaly.PAST_LAST),
    ],
)
def test_a_group_that_contradicts_itself_is_an_error_or_passed_over(
    place: Place, relations: Relations, messages: Any, anomaly: Anomaly
) -> None:
    """At its turn, named; the groups before it are given."""
    place.put_recorded(*whole_group(1, 2), *messages, *whole_group(3, 2))
    assert ids_of(relations.groups(place.stream, on_conflict="skip")) == ids(1, 3)
    with raising(errors.GroupConflict, group_id=group_id(2), anomaly=anomaly):
        list(relations.groups(place.stream))
    assert anomaly in relations.group_position(group_id(2)).anomalies
    (report,) = relations.incomplete_groups(older_than=0)
    assert (report.group_id, report.position.anomalies) == (group_id(2), (anomaly,))


@pytest.mark.differs
def test_a_group_that_retention_took_from_is_never_given_smaller(
    place: Place, fleeting: Place, relations: Relations
) -> None:
    """A group that lost a message to retention is an error or skipped, and is listed as incomplete, pruned or not."""
    stream, other = fleeting.stream, place.stream
    # Group 1's first message, and therefore its place, is in the stream that is retained.
    place.put(of_group(1, 2, last=True), *whole_group(2, 1), to=stream)
    place.put(of_group(1, 1), *whole_group(3, 1), to=other)
    place.record(stream, other)
    assert len(list(relations.groups())) == 3
    place.put(*((b"x" * 20_000, {"n": n}) for n in range(40)), to=stream)
    wait_until(lambda: errors.OffsetExpired is type(next(relations.read_many([(stream, 0)]))), what="retention")
    assert ids_of(relations.groups(on_conflict="skip")) == ids(3)
    with raising(errors.GroupConflict, group_id=group_id(1), anomaly=Anomaly.EXPIRED):
        list(relations.groups())
    group = relations.group(group_id(1))
    assert [message.body for message in group] == [b"1-1"]
    assert (group.expired, group.position.anomalies) == (((stream, 0),), (Anomaly.EXPIRED,))
    # Group 2, of which nothing is left, needs no report.
    (report,) = relations.incomplete_groups(older_than=0)
    assert (report.group_id, report.position.anomalies) == (group_id(1), (Anomaly.EXPIRED,))
    assert report.position.missing == ((2, 2),)
    prune(place.amqp, place.engine.url)
    assert ids_of(relations.groups()) == ids(3)
    (report,) = relations.incomplete_groups(older_than=0)
    assert (report.group_id, report.position.last_sequence) == (group_id(1), None)


def test_all_groups_are_listed_the_newest_first(place: Place, streams: list[str], relations: Relations) -> None:
    """Pages hold all groups of all or of named streams, complete or not, and none made of headers of strangers."""
    texts = ("", "0", "abc", group_id(3)[:-1], "F" * 48, "~", "a|b")
    hostile = [(b"", Membership(text, 1).headers) for text in texts]
    place.put(*whole_group(1, 2), of_group(2, 1), *hostile, to=streams[0])
    place.put(*whole_group(3, 1), of_group(2, 2, last=True), of_group(4, 2), to=streams[1])
    place.record(*streams)
    page = relations._newest_groups()
    assert ids_of(page.groups) == ids(4, 3, 2, 1)
    assert [each.position.is_complete for each in page.groups] == [False, True, True, True]
    assert page.groups[2].places in (((streams[0], 2), (streams[1], 1)), ((streams[1], 1), (streams[0], 2)))
    assert (page.next, page.unrecorded) == (None, ())
    found, before = [], None
    for _ in range(10):
        part = relations._newest_groups(before=before, limit=1)
        found += ids_of(part.groups)
        if (before := part.next) is None:
            break
    assert found == ids_of(page.groups)
    assert ids_of(relations._newest_groups(streams[1]).groups) == ids(4, 3, 2)
    for wrong in ({"limit": -1}, {"limit": 1_001}, {"before": 1}, {"before": "\0"}):
        with pytest.raises(errors.InvalidInput):
            relations._newest_groups(**wrong)  # type: ignore[arg-type]


def test_what_lies_before_the_key_was_defined_is_named_and_not_read(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """A list of recorded groups reads no stream and names the messages from before the key was defined."""
    place.put_recorded(*whole_group(1, 2), of_group(2, 1), to=streams[0], keys=["order_id"])
    add_keys(place.engine, [GROUP_KEY])
    place.put_recorded(of_group(2, 2, last=True), of_group(3, 2), to=streams[0], keys=())
    page = relations._newest_groups()
    assert ids_of(page.groups) == ids(3, 2)
    assert not any(each.position.is_complete for each in page.groups)
    (gap,) = page.unrecorded
    assert (gap.stream, gap.start) == (streams[0], 0)
    with questions() as asked:
        assert relations._newest_groups(limit=0) == GroupPage((), None, page.unrecorded)
    assert not any("walk" in each["about"] for each in asked), "no groups are looked for"
    as_recorded = relations.incomplete_groups(older_than=0, complete=False)
    assert sorted(ids_of(as_recorded)) == ids(2, 3)
    assert ids_of(relations.incomplete_groups(older_than=0)) == ids(3)


def test_a_group_that_a_back_fill_completes_is_followed(place: Place, streams: list[str], relations: Relations) -> None:
    """Also a group whose messages the back-fill records before the end of the stream."""
    place.put_recorded(*whole_group(1, 2), of_group(2, 1), to=streams[0], keys=["order_id"])
    add_keys(place.engine, [GROUP_KEY])
    place.put_recorded(of_group(2, 2, last=True), *whole_group(3, 2), to=streams[0], keys=())
    groups = relations.groups(streams[0], complete=False, follow=True, idle_timeout_s=10)
    found = [next(groups)]
    backfill(place.amqp, place.engine.url, streams[0])
    found += islice(groups, 2)
    groups.close()
    assert ids_of(found) == ids(3, 1, 2)


def test_groups_that_are_not_complete_are_listed_with_what_is_missing(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """Oldest first, with their times and places; a group that is complete in what is not recorded is none of them."""
    now = time.time_ns() // 1_000
    old, young = now - 3_600_000_000, now - 60_000_000
    place.record(*streams)
    place.put(of_group(1, 1, time_us=young), of_group(2, 3, last=True, time_us=old), to=streams[0])
    place.put(of_group(2, 1, time_us=young), *whole_group(3, 2, time_us=old), to=streams[1])
    place.put(of_group(4, 1, time_us=old), to=streams[0])
    place.record(*streams)
    place.put(of_group(4, 2, last=True, time_us=now), of_group(5, 9, time_us=old + 1), to=streams[1])
    reports = relations.incomplete_groups(older_than=0)
    assert ids_of(reports) == ids(2, 5, 1)
    assert reports[0].position.missing == ((2, 2),)
    assert reports[0].places == ((streams[0], 1), (streams[1], 0))
    assert (reports[0].first_seen, reports[0].last_seen) == (moment(old), moment(young))
    assert ids_of(relations.incomplete_groups(older_than=timedelta(minutes=30))) == ids(2, 5)
    assert relations.incomplete_groups(older_than=7_200) == []
    only = relations.incomplete_groups(streams[1], older_than=0)
    assert ids_of(only) == ids(5, 2, 4)


def test_what_others_write_into_the_headers_stands_for_no_number(place: Place, relations: Relations) -> None:
    """A group still lacks a number whose only message has headers that no message of a group has."""
    flag, number = of_group(1, 2), of_group(2, 2)
    flag[1]["group_last"], number[1]["group_sequence"] = 0, "02"
    strange = [(b"", Membership(name, 1).headers) for name in ("", "0", "F" * 48)]
    place.put(*strange, of_group(1, 1), flag, of_group(1, 3, last=True))
    place.put_recorded(of_group(2, 1), number, of_group(2, 3, last=True), *whole_group(3, 3))
    reports = relations.incomplete_groups(place.stream, older_than=0)
    assert ids_of(reports) == ids(1, 2)
    assert [report.position.missing for report in reports] == [((2, 2),), ((2, 2),)]
    assert ids_of(relations.groups(place.stream)) == ids(3)


def test_large_messages_of_groups_that_lie_mixed_come_whole(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each chunk holds messages of many groups, and they come to more than memory holds: they are read again."""
    # An eighth of the usual memory.
    monkeypatch.setattr("relatum.reading._plan.Part.__init__.__defaults__", (8 << 20,))
    monkeypatch.setattr("relatum.reading._many.ChunkCache.__init__.__defaults__", (4 << 20,))
    body, count, size = b"x" * 20_000, 45, 10
    messages = shuffled([message for number in range(count) for message in whole_group(number, size)], 5)
    # Without waiting for confirms, so that a chunk holds many messages.
    publish_plain(place.amqp, place.stream, [(body, headers) for _, headers in messages], confirm=False)
    # Unrecorded ranges are read first, for their members.
    wait_until(lambda: place.bounds().end >= len(messages), what="all in the stream")
    place.record()
    assert [len(group) for group in relations.groups(place.stream)] == [size] * count


def test_a_connection_that_is_lost_between_groups_is_made_again(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """A batch is gone on with where it was: each group once, in order, also after its end."""
    messages = shuffled([(body + b"x" * 2_000, headers) for n in range(300) for body, headers in whole_group(n, 3)], 3)
    for stream, part in zip(streams, (messages[::3], messages[1::3], messages[2::3]), strict=True):
        publish_plain(place.amqp, stream, part, confirm=False)
    place.record(*streams)
    expected, given = places(relations.groups(streams)), []
    with Proxy.to(place.stream_url) as proxy:
        through = proxy.url(place.stream_url)
        with Relations(Broker(place.amqp, stream_url=through), place.database) as afar:
            for group in afar.groups(streams):
                given.append(group)
                if len(given) % 50 == 0:
                    proxy.reset()
    assert len(expected) == 300
    assert places(given) == expected


@pytest.mark.parametrize("one_face", ["blocking"])
def test_a_group_that_is_completed_later_is_not_lost(place: Place, streams: list[str], relations: Relations) -> None:
    """Behind the position, in another stream, each once; following ends when nothing came for the time given."""
    first, second, _ = streams
    place.put(of_group(1, 1), *whole_group(2, 2), of_group(1, 3, last=True), to=first)
    place.put(of_group(3, 2, last=True), to=second)
    add_keys(place.engine, [GROUP_KEY])
    with place.recording(*streams):
        groups = relations.groups([first, second], follow=True, idle_timeout_s=90)
        assert next(groups).group_id == group_id(2)
        place.put(of_group(2, 1), *whole_group(4, 1), to=first)
        assert next(groups).group_id == group_id(4)
        place.put(of_group(1, 2), to=second)
        found = next(groups)
        assert places([found]) == [[(first, 0), (second, 1), (first, 3)]]
        place.put(of_group(3, 1), to=first)
        assert next(groups).group_id == group_id(3)
        for stream in streams:
            place.wait_recorded(stream)
        groups.close()
    assert ids_of(relations.groups([first, second], follow=True, idle_timeout_s=0.1)) == ids(1, 2, 4, 3)


@pytest.mark.parametrize("one_face", ["blocking"])
def test_whatever_order_messages_come_in_each_group_is_given_once_while_following(
    place: Place, streams: list[str], relations: Relations
) -> None:
    """A follower gets every group once and whole while its messages are published and recorded in any order."""
    messages = shuffled([message for number in range(40) for message in whole_group(number, 6)], seed=5)
    add_keys(place.engine, [GROUP_KEY])
    with place.recording(*streams):
        groups = relations.groups(streams, follow=True, idle_timeout_s=90)

        def publish() -> None:
            place.put((b"alone", {}), to=streams[2])
            for part in range(0, len(messages), 20):
                place.put(*messages[part : part + 20], to=streams[part // 20 % 3])

        with ThreadPoolExecutor(1) as publisher:
            publisher.submit(publish)
            found = list(islice(groups, 40))
        groups.close()
        for stream in streams:
            place.wait_recorded(stream)
    assert sorted(ids_of(found)) == ids(*range(40))
    assert all(len(group) == 6 for group in found)
