"""That what judges the tests of kills would notice each kind of fault."""

import pytest

from tests.acceptance._serial_proof import Consumed, Record, Sent, faults

SENT = {
    "a/1": Sent("c", 1.0, 2.0),
    "a/2": Sent("c", 3.0, 4.0),
    "b/1": Sent("c", 5.0, 6.0),
    "a/3": Sent("c", 7.0, None),
}


def record(offset: int, name: str, epoch: int = 1) -> Record:
    """A message as a router publishes it."""
    return Record(offset, {"serialization_context": "c", "relatum_placed": f"{epoch}-a-1"}, name.encode())


def control(offset: int, kind: str, body: str) -> Record:
    """A fence, a marker or an adoption."""
    return Record(offset, {"relatum_control": kind}, body.encode())


FENCE = control(2, "fence", '{"contexts": ["c"], "epoch": 2}')
MARKER = control(0, "marker", '{"contexts": ["c"], "epoch": 2}')
ADOPTION = control(1, "adoption", '{"context": "c", "epoch": 2, "stream": "s-0", "offset": 3}')
LYING = {
    "s-0": [record(0, "a/1"), record(1, "a/2"), FENCE, record(3, "b/1")],
    "s-1": [MARKER, ADOPTION, record(2, "a/3", 2)],
}
ROWS = [Consumed("c", "a/1", "s-0", 0), Consumed("c", "a/2", "s-0", 1), Consumed("c", "b/1", "s-0", 3)]
LAST = Consumed("c", "a/3", "s-1", 2)


def test_the_proof_finds_nothing_wrong_with_what_is_right() -> None:
    """A move with a stray that was adopted, consumed in order."""
    assert faults(LYING, SENT, [*ROWS, LAST]) == []


@pytest.mark.parametrize(
    ("consumed", "words"),
    [
        pytest.param([ROWS[0], ROWS[2], LAST], "a/2: told and not consumed", id="lost"),
        pytest.param([*ROWS, ROWS[2], LAST], "b/1: consumed 2 times", id="twice"),
        pytest.param([ROWS[1], ROWS[0], ROWS[2], LAST], "c: a/1 was consumed behind a/2", id="a publisher's order"),
        pytest.param([ROWS[0], ROWS[2], ROWS[1], LAST], "c: a/2 was there before b/1 was sent", id="the order in time"),
        pytest.param([*ROWS], "c: consumed in another order than the partitions say", id="not told and not consumed"),
        pytest.param([*ROWS, LAST, Consumed("c", "d/1", "s-1", 9)], "d/1: consumed and never sent", id="from nowhere"),
    ],
)
def test_the_proof_notices_what_is_wrong(consumed: list[Consumed], words: str) -> None:
    """Each kind of fault is told by name."""
    assert [fault for fault in faults(LYING, SENT, consumed) if fault.startswith(words)]


def test_the_proof_notices_what_lies_in_the_partitions_twice() -> None:
    """A message that was published again is found even where consumers pass over it."""
    lying = {**LYING, "s-0": [*LYING["s-0"], record(4, "b/1")]}
    assert faults(lying, SENT, [*ROWS, LAST]) == ["b/1: 2 times in the partitions"]
