"""Putting groups together from their rows, held against what is said of it."""

import operator
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from relatum.errors import StreamReplaced
from relatum.membership import GROUP_KEY, Membership
from relatum.reading import Message
from relatum.reading.extractor import Extractor
from relatum.wire.amqp10 import data_section
from relatum_consumer.groups._assembly import GROUPS_AT_ONCE, Member, View, assemble, distinct, in_arrival
from relatum_consumer.groups._finding import batches
from relatum_consumer.groups._options import BATCH_MESSAGES, GroupOptions
from relatum_consumer.groups._reading import check
from relatum_consumer.lookups.servers import Servers
from tests.support.amqp import encode, listed, section

ID = "0" * 48

place = operator.itemgetter(3, 4)
times = st.none() | st.integers(-5, 5)
members = st.lists(
    st.builds(Member, st.just(ID), st.integers(1, 6), st.booleans(), st.sampled_from("abc"), st.integers(0, 20), times),
    max_size=15,
).map(distinct)


@given(members)
def test_arrival_keeps_each_stream_s_own_order(rows: Sequence[Member]) -> None:
    """In a stream by offset, whatever times and other streams there are; nothing is lost."""
    arrived = in_arrival(rows)
    assert sorted(arrived, key=id) == sorted(rows, key=id)
    for stream in "abc":
        offsets = [row[4] for row in arrived if row[3] == stream]
        assert offsets == sorted(offsets)


@given(members, st.randoms(use_true_random=False), st.sampled_from(["logical", "physical"]))
def test_a_group_does_not_depend_on_the_order_of_its_rows(rows: list[Member], random: object, order: str) -> None:
    """The same group from any order, every row in exactly one place."""
    group = assemble(ID, rows, order)  # type: ignore[arg-type]
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert assemble(ID, rows, order) == group  # type: ignore[arg-type]
    assert sorted((*group.rows, *group.duplicates), key=place) == sorted(rows, key=place)
    numbers = [row[1] for row in group.rows]
    assert sorted(numbers) == sorted({row.sequence for row in rows})
    if order == "logical":
        assert numbers == sorted(numbers)
        assert (group.head is None) == (1 not in numbers)


def test_an_expired_number_that_is_there_again_is_there() -> None:
    """A duplicate that is retained stands in for it."""
    rows = [Member(ID, 1, True, "a", 1, None), Member(ID, 1, True, "a", 9, None)]
    group = assemble(ID, rows, floors={"a": 5})
    assert (group.is_complete, group.position.anomalies, [row[4] for row in group.rows]) == (True, (), [9])


def test_large_groups_behind_small_ones_do_not_make_a_batch_large() -> None:
    """How large groups were says little of those to come: a batch goes beyond its size by one lookup at most."""
    groups = [(f"{number:048x}", size) for number, size in enumerate([1] * 3_000 + [50] * 6_500)]
    sizes = dict(groups)
    firsts = [(f"{id_}|1|{'true' if size == 1 else 'false'}", at, None) for at, (id_, size) in enumerate(groups)]

    def rows_of(id_: str) -> tuple[str, list[str], list[int], list[int], list[None]]:
        size, at = sizes[id_], int(id_, 16)
        places = [f"{n}|{'true' if n == size else 'false'}" for n in range(1, size + 1)]
        return id_, places, [1] * size, list(range(at, at + size)), [None] * size

    def answer(_: Any, asked: Any) -> list[Any]:
        if "group_ids" in asked:
            return [rows_of(id_) for id_ in asked["group_ids"][2:-2].split('","')]
        return firsts[asked["low"] : asked["high"]]

    def nobody() -> Any:
        raise AssertionError("no message is read")

    view = View(Servers(answer, nobody), 1, {"s": 1}, {"s": 0}, {"s": [(0, len(groups) + 50)]})
    counts = [sum(len(group.rows) for group in batch) for batch in batches(view, GroupOptions(("s",)))]
    assert sum(counts) == sum(sizes.values())
    assert max(counts) < BATCH_MESSAGES + 50 * GROUPS_AT_ONCE


def test_members_outside_the_seen_ranges_are_left_out() -> None:
    """A range begins with its first offset and ends before its last, also where two ranges meet."""
    offsets = list(range(12))
    columns = [f"{offset + 1}|false" for offset in offsets], [1] * 12, offsets, [None] * 12

    def nobody() -> Any:
        raise AssertionError("no message is read")

    view = View(Servers(lambda *_: [(ID, *columns)], nobody), 1, {"s": 1}, {}, {"s": [(2, 4), (4, 6), (9, 10)]})
    assert [row[4] for row in view.members_of([ID])[ID]] == [2, 3, 4, 5, 9]
    view.seen["s"] = []
    assert view.members_of([ID])[ID] == []


TIME_US = 1_700_000_000_000_000
HEADERS: dict[str, list[Any]] = {
    "group_id": [ID, "f" * 48, ID.encode(), None, 0],
    "group_sequence": [1, 2, 1.0, True, "1", b"1", 0],
    "group_last": [True, False, 1, 0, 1.0, "true", b"true", None],
    "relatum_time": [TIME_US, TIME_US + 1, float(TIME_US), True, str(TIME_US), 2**62],
}
PROPERTIES = {
    "none": b"",
    "id": section(0x73, listed(encode("7"))),
    "stamped": section(0x73, listed(*map(encode, [None] * 9 + [datetime.fromtimestamp(1_600_000_000, UTC)]))),
    "broken": section(0x73, b"\xc0\x03\x09\xa1\xff"),
}


@settings(max_examples=1_000)
@given(
    st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in HEADERS.items()}),
    st.sampled_from(sorted(PROPERTIES)),
    st.booleans(),
    st.tuples(st.just(ID), st.integers(1, 2), st.booleans()),
    st.none() | st.sampled_from([TIME_US, 1, 1_600_000_000_000_000, 5_000]),
)
def test_a_message_is_checked_against_what_a_recorder_would_store(
    headers: dict[str, Any], properties: str, is_broken: bool, place: Any, recorded_us: int | None
) -> None:
    """It is handed out only if its headers and its time give the same row, whatever the types of the headers are."""
    application = b"" if not headers else section(0x74, encode(headers))
    raw = PROPERTIES[properties] + application + data_section(b"group_id") + b"?" * is_broken
    time_us, _, values, *_ = Extractor([GROUP_KEY]).from_record(raw, 5)
    is_row = values == [(0, Membership(*place).value)] and recorded_us in (None, time_us)
    try:
        check((*place, "s", 7, recorded_us), Message.from_record("s", 7, raw, 5))
    except StreamReplaced:
        assert not is_row
    else:
        assert is_row
