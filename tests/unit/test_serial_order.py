"""What `verify` says of partitions: each kind of finding, and silence where nothing is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from relatum.contexts._order import FINDINGS_MAX, Finding, FindingKind, OrderCheck, SerialReport, ValidMessage
from relatum.contexts._partition_log import NO_ENTRY, Adoption, Data, Entry, Fence, Marker, Placed

A, B = "a" * 16, "b" * 16
Partitions = Mapping[str, Sequence[Entry]]
DISORDER, FALSE = FindingKind.DISORDER, FindingKind.FALSE_ADOPTION


def data(epoch: int, number: int, *, context: str = "c", session: str = A) -> Data:
    return Data(context, Placed(epoch, session, number))


def fence(move_id: int, epoch: int, *contexts: str) -> Fence:
    return Fence(move_id, epoch, frozenset(contexts or ("c",)))


def marker(move_id: int, epoch: int, source: str, fence_offset: int, *contexts: str) -> Marker:
    return Marker(move_id, epoch, frozenset(contexts or ("c",)), source, fence_offset)


def read(partitions: Partitions, *, first: Any = None, floors: Any = None) -> tuple[SerialReport, list[ValidMessage]]:
    begin = {stream: (first or {}).get(stream, 0) for stream in partitions}
    report = SerialReport("s", "serialization_context")

    def look(stream: str, offset: int) -> Entry | None:
        if offset < begin[stream]:
            return None
        entries = partitions[stream]
        return entries[offset - begin[stream]] if offset - begin[stream] < len(entries) else NO_ENTRY

    check = OrderCheck(look, report)
    counted = []
    for stream, entries in partitions.items():
        check.begin(stream, (floors or {}).get(stream, {}))
        counted += [check.add(offset, entry) for offset, entry in enumerate(entries, begin[stream])]
    check.finish({stream: (begin[stream], begin[stream] + len(entries)) for stream, entries in partitions.items()})
    return report, [message for message in counted if message is not None]


FENCED = [data(1, 1), fence(7, 2), data(1, 2), Data("c", None)]
"""A partition with a stray that can be adopted, and a message of no router."""

MARKER = marker(7, 2, "s-0", 1)
ADOPTED = Adoption("c", 2, "s-0", 2)

FOUND: dict[str, tuple[Partitions, set[FindingKind]]] = {
    "routers and contexts each for itself": (
        {"s-0": [data(1, 5), data(1, 1, session=B), data(1, 2, context="d"), data(1, 6)]},
        set(),
    ),
    "repeated and late controls": (
        {"s-0": [data(1, 1), fence(7, 2), fence(7, 2)], "s-1": [MARKER, data(2, 2), MARKER, data(2, 3)]},
        set(),
    ),
    "a later message before an adoption": ({"s-0": FENCED[:3], "s-1": [MARKER, data(2, 3), ADOPTED]}, {DISORDER}),
    "twice in a partition": ({"s-0": [data(1, 1), data(1, 1)]}, {DISORDER}),
    "turned in a partition": ({"s-0": [data(1, 2), data(1, 1)]}, {DISORDER}),
    "twice in two partitions": ({"s-0": [data(1, 1)], "s-1": [data(2, 1)]}, {DISORDER}),
    "turned in two partitions": ({"s-0": [data(2, 1)], "s-1": [data(1, 2)]}, {DISORDER}),
    "across an epoch": ({"s-0": [data(3, 1)], "s-1": [data(1, 2)], "s-2": [data(2, 1, session=B)]}, {DISORDER}),
    "adopted twice": ({"s-0": FENCED[:3], "s-1": [MARKER, ADOPTED, ADOPTED]}, {DISORDER}),
    "an epoch in two partitions": ({"s-0": [data(1, 1)], "s-1": [data(1, 2)]}, {FindingKind.SPLIT}),
    "before its marker": ({"s-0": [fence(7, 2)], "s-1": [data(2, 1), marker(7, 2, "s-0", 0)]}, {FindingKind.EARLY}),
    "before its fence": ({"s-0": [data(2, 1), fence(7, 2)], "s-1": [MARKER]}, {FindingKind.EARLY}),
    **{
        f"an adoption of {what}": ({"s-0": FENCED, "s-1": [MARKER, ADOPTED, adoption]}, {FALSE})
        for what, adoption in {
            "no message": Adoption("c", 2, "s-0", 99),
            "a fence": Adoption("c", 2, "s-0", 1),
            "another context's": Adoption("d", 2, "s-0", 2),
            "one of no router": Adoption("c", 2, "s-0", 3),
        }.items()
    },
    "an adoption of what counts": ({"s-0": FENCED[:2], "s-1": [MARKER, Adoption("c", 2, "s-0", 0)]}, {DISORDER, FALSE}),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_is_wrong_is_found_and_nothing_else(what: str) -> None:
    """Each fault is found once, and none where numbers ascend and each epoch is in one partition."""
    partitions, expected = FOUND[what]
    found = [finding.kind for finding in read(partitions)[0].findings]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_strays_are_notices() -> None:
    """A publisher that died leaves them; the order is not broken by that."""
    report, _ = read({"s-0": [data(1, 1), fence(7, 2), data(1, 2)], "s-1": []})
    assert (report.counts, report.ok) == ({FindingKind.STRAY: 1}, True)
    assert not read({"s-0": [data(1, 1), data(1, 1)]})[0].ok


def test_a_stray_adoption_adopts_nothing() -> None:
    """An adoption behind the next fence does not count; the one published again does."""
    partitions: Partitions = {
        "s-0": [fence(7, 2), data(1, 1)],
        "s-1": [marker(7, 2, "s-0", 0), fence(8, 3), Adoption("c", 2, "s-0", 1)],
        "s-2": [marker(8, 3, "s-1", 1), Adoption("c", 3, "s-0", 1), data(3, 2)],
    }
    report, counted = read(partitions)
    assert report.findings == []
    assert [str(each.at) for each in counted] == ["s-2@1", "s-2@2"]


def test_what_no_router_published_is_in_no_order() -> None:
    """It counts where it is, with a fence or without."""
    report, counted = read({"s-0": [Data("c", None), data(1, 1), fence(7, 2), Data("c", None), Data(None, None)]})
    assert [each.epoch for each in counted] == [0, 1, 1, 0]
    assert report.ok


def test_floors_from_before_the_first_offset_count() -> None:
    """Where retention has dropped the fence, what was published behind it is a stray anyway."""
    partitions: Partitions = {"s-0": [data(1, 2), data(5, 1)]}
    assert [each.epoch for each in read(partitions, floors={"s-0": {"c": 4}})[1]] == [5]


def test_an_adoption_of_what_has_expired_says_nothing() -> None:
    """What it named cannot be read any more: it is neither false nor in an order."""
    report, counted = read({"s-0": [data(1, 9)], "s-1": [Adoption("c", 2, "s-0", 3)]}, first={"s-0": 8})
    assert report.findings == []
    assert [str(each.at) for each in counted] == ["s-0@8"]


def test_findings_are_listed_up_to_a_bound_and_counted_beyond() -> None:
    """A super stream that is all wrong does not fill the memory."""
    report = SerialReport("s", "h")
    for offset in range(FINDINGS_MAX + 1):
        report.add(Finding(FindingKind.DISORDER, "s-0", offset, "c", ""))
    report.add(Finding(FindingKind.STRAY, "s-0", 0, "c", ""))
    assert len(report.findings) == FINDINGS_MAX + 1
    assert report.counts == {FindingKind.DISORDER: FINDINGS_MAX + 1, FindingKind.STRAY: 1}
