"""Coverage as `relatum status` draws it."""

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console
from rich.table import Table

from relatum.command._coverage_drawn import CELLS_MAX, CoverageDrawn, cells_of
from relatum.recording import coverage_bar

PIECES = coverage_bar((0, 100_000), {"a": [(0, 90_000)], "time": [(0, 50_000)]}, [(20_000, 20_001)])


def drawn(width: int, encoding: str = "utf-8") -> str:
    """What stands on a terminal of this width, without colours."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=out, width=width, force_terminal=True, color_system=None).print(CoverageDrawn(PIECES))
    out.seek(0)
    return out.read()


def test_each_kind_has_its_own_sign() -> None:
    """Without colours it says the same: a hole of one offset is seen, and the legend names what occurs."""
    bar, *legend = drawn(40).splitlines()
    assert [(sign, len(list(run))) for sign, run in itertools.groupby(bar)] == [
        ("█", 8),
        ("X", 1),
        ("█", 11),
        ("▒", 16),
        ("·", 4),
    ]
    assert legend == ["█ recorded  ▒ recorded for some keys", "· not recorded  X lost to retention"]


def test_a_terminal_without_utf8_gets_ascii() -> None:
    """The same bar, of signs that every terminal has."""
    assert set(drawn(40, "latin-1").splitlines()[0]) == set("#+.X")
    assert drawn(40, "ascii").isascii()


@pytest.mark.parametrize("width", [4, 20, 80, 400])
def test_it_fits_where_it_stands(width: int) -> None:
    """Alone and in a table, it is not wider than there is room, nor wider than can be taken in at a glance."""
    assert len(drawn(width).splitlines()[0]) == min(width, CELLS_MAX)
    table = Table(show_header=False)
    table.add_row("coverage", CoverageDrawn(PIECES))
    out = io.StringIO()
    Console(file=out, width=max(width, 40)).print(table)
    assert all(len(line) <= max(width, 40) for line in out.getvalue().splitlines())


@given(
    some.lists(some.tuples(some.integers(0, 900), some.integers(1, 99)), max_size=30),
    some.lists(some.tuples(some.integers(0, 900), some.integers(1, 9)), max_size=3),
    some.integers(1, 60),
)
def test_nothing_that_is_wrong_vanishes(
    covered: list[tuple[int, int]], holes: list[tuple[int, int]], width: int
) -> None:
    """Each cell shows the worst of its offsets, however narrow the bar is."""
    pieces = coverage_bar(
        (0, 1_000), {"a": [(at, at + size) for at, size in covered]}, [(at, at + size) for at, size in holes]
    )
    cells = cells_of(pieces, width)
    assert len(cells) == width
    worst = ["hole", "unrecorded", "partly", "recorded"]
    for number, cell in enumerate(cells):
        start, end = 1_000 * number / width, 1_000 * (number + 1) / width
        within = [each.kind for each in pieces if each.start < end and start < each.end]
        assert cell == min(within, key=worst.index)
