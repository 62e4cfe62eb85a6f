"""The page's pieces by themselves: bodies, bars, trees. No input or output."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from relatum_consumer.trace_tree import CAUSE, CAUSED, SAME, KeyValue, Link, places, rows_of
from relatum_consumer.web.bodies import (
    HEX_BYTES_MAX,
    hex_lines,
    image_type,
    indented,
    kind_of,
    preview,
    previews,
    text_of,
)
from relatum_consumer.web.coverage_bar import coverage_bar as bar
from relatum_consumer.web.rendering import span_text, visible

# --- bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "empty"),
        (b'{"a": 1}', "json"),
        (b"[]", "json"),
        (b'{"a": ', "text"),
        (b"[" * 100_000, "text"),
        (b"<script>alert(1)</script>", "text"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "text"),
        (b"\x89PNG\r\n\x1a\n<script>", "image"),
        (b"\xff\xd8\xff\xe0", "image"),
        (b"GIF89a<script>", "image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image"),
        (b"RIFF\0\0\0\0WAVE", "binary"),
        (b"\x00\x01", "binary"),
        (b"\xff\xfe\xfd", "binary"),
    ],
)
def test_what_a_body_is_is_said_by_its_bytes(body: bytes, kind: str) -> None:
    """JSON where it is whole, images by their first bytes, text where it can be read; markup is text."""
    assert kind_of(body) == kind


@given(some.binary(max_size=400))
def test_any_bytes_can_be_shown(body: bytes) -> None:
    """Whatever was published has a preview in one line, lines of hexadecimal, and a kind."""
    assert "\n" not in preview(body)
    assert len(preview(body)) <= 160
    assert len(hex_lines(body)) == (len(body) + 15) // 16
    assert kind_of(body) in ("empty", "json", "text", "image", "binary")


@pytest.mark.parametrize("letter", ["a", "é", "東", "😀"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_long_text_has_a_preview_in_its_own_letters(letter: str, before: int) -> None:
    """However many bytes its letters have: the end that is cut off may lie within one."""
    shown = preview(("x" * before + letter * 1_000).encode())
    assert shown == f"{'x' * before}{letter * (159 - before)}…"


def test_json_has_a_line_for_each_member_and_numbers_stay_as_they_are_written() -> None:
    """Neither a large integer nor a decimal is rounded, and what JSON has no number for is shown, too."""
    body = '{"large": 12345678901234567890123, "price": [1.10, 1e999], "none": NaN, "t": true, "s": "<b>", "e": {}}'
    assert indented(body) == (
        '{\n  "large": 12345678901234567890123,\n  "price": [\n    1.10,\n    1e999\n  ],\n  "none": NaN,\n'
        '  "t": true,\n  "s": "<b>",\n  "e": {}\n}'
    )
    assert indented("{") is None
    assert indented("[" * 100_000) is None
    assert len(indented("[" * 300 + "]" * 300) or "") < 10_000


def test_hexadecimal_is_cut_and_text_has_no_control_characters() -> None:
    """The beginning is shown; what would move a terminal's or a page's cursor is no text."""
    assert len(hex_lines(bytes(2 * HEX_BYTES_MAX))) == HEX_BYTES_MAX // 16
    assert text_of(b"a\x1b[2Jb") is None
    assert text_of(b"before\0after") == "before\0after"
    assert text_of("UTF-16".encode("utf-16-le")) is text_of(bytes(8)) is None
    assert text_of(b"tab\tand\r\nlines") == "tab\tand\r\nlines"
    assert image_type(b"<svg></svg>") is None


# --- bars -------------------------------------------------------------------------------------------------


def test_a_bar_shows_what_is_recorded_lost_and_not_recorded() -> None:
    """All keys, some of them, a hole, nothing: each in its place, in per cent."""
    pieces = bar((100, 200), {"a": [(100, 150), (180, 190)], "time": [(100, 140)]}, [(170, 180)])
    assert sorted((each.start, each.end, each.kind) for each in pieces) == [
        (100, 140, "recorded"),
        (140, 150, "partly"),
        (150, 170, "unrecorded"),
        (170, 180, "hole"),
        (180, 190, "partly"),
        (190, 200, "unrecorded"),
    ]
    assert {each.start: (each.x, each.width) for each in pieces}[170] == (70.0, 10.0)
    assert bar((5, 5), {}, []) == ()


@given(
    some.lists(some.tuples(some.integers(0, 2_000), some.integers(1, 40)), max_size=600),
    some.lists(some.tuples(some.integers(0, 2_000), some.integers(1, 5)), max_size=5),
)
def test_any_coverage_is_drawn_whole_and_bounded(covered: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    """However torn it is: as many pieces as can be drawn, which leave nothing out, and each hole can be seen."""
    ranges, torn = ([(start, start + size) for start, size in each] for each in (covered, holes))
    pieces = sorted(bar((0, 2_100), {"a": ranges}, torn), key=lambda piece: piece.start)
    assert len(pieces) <= 2 * 200
    assert pieces[0].start == 0
    assert pieces[-1].end == 2_100
    assert all(one.end == other.start for one, other in pairwise(pieces))
    assert all(piece.width > 0.5 and piece.x + piece.width <= 100 for piece in pieces if piece.kind == "hole")
    for start, end in torn:
        assert any(piece.kind == "hole" and piece.start < end and start < piece.end for piece in pieces)


# --- text of others ----------------------------------------------------------------------------------


def test_what_is_not_seen_is_written_as_its_number() -> None:
    """Marks that turn text around, and control characters, are shown and do nothing."""
    assert visible("a\u202eb\nc\u200bd") == "a⟨202e⟩b⟨a⟩c⟨200b⟩d"
    assert visible("Bücher 東京 <b>") == "Bücher 東京 <b>"


# --- conversations ---------------------------------------------------------------------------------------

START = datetime(2026, 11, 23, 9, 30, tzinfo=UTC)


def moments(*seconds: float) -> list[datetime | None]:
    return [START + timedelta(seconds=each) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.000_25, "0.25 ms"), (0.35, "350 ms"), (1.25, "1.25 s"), (59.4, "59.4 s"), (60, "1 min"),
        (185, "3 min 5 s"), (10_799, "3 h"), (86_400 * 1500 + 3600, "1,500 d 1 h"), (-0.35, "−350 ms"),
    ],
)  # fmt: skip
def test_a_span_is_said_in_its_largest_units(seconds: float, words: str) -> None:
    """Two of them at most."""
    assert span_text(seconds) == words


# --- a conversation as a tree -----------------------------------------------------------------------------


def key(value: str) -> KeyValue:
    return KeyValue("k", value)


def lines(hops: list[int], *links: Link) -> list[tuple[int, int, str]]:
    """Each row of the tree: its message, its depth, how it is connected with the one above."""
    return [(row.message, row.depth, row.kind) for row in rows_of(hops, links)]


def test_a_message_is_below_the_one_that_it_was_found_from() -> None:
    """Of a start at 2: its cause with another effect of that, what it caused, and what has a value in common."""
    cause, caused = Link(CAUSED, key("1"), (0, 1, 2)), Link(CAUSED, key("2"), (2, 4))
    assert lines([1, 2, 0, 1, 1], cause, caused, Link(SAME, key("3"), (2, 3, 4))) == [
        (0, 0, CAUSE),
        (1, 1, CAUSED),
        (3, 0, SAME),
        (4, 0, CAUSED),
    ]


def test_from_a_value_all_that_have_it_are_at_the_top() -> None:
    """With what is further on below each; what no value connects is there, too."""
    assert lines([1, 1, 2, 1], Link(SAME, key("1"), (0, 1)), Link(SAME, key("2"), (1, 2))) == [
        (0, 0, SAME),
        (1, 0, SAME),
        (2, 1, SAME),
        (3, 0, SAME),
    ]
    assert lines([]) == []


LINKS = some.lists(
    some.builds(
        Link,
        some.sampled_from([SAME, CAUSED]),
        some.integers(0, 3).map(str).map(key),
        some.lists(some.integers(0, 11), min_size=1, max_size=5).map(tuple),
    ),
    max_size=30,
)


@given(some.lists(some.integers(0, 3), min_size=12, max_size=12), LINKS)
def test_a_tree_has_each_message_once(hops: list[int], links: list[Link]) -> None:
    """Also where messages came from each other, in a circle; each is one deeper than the one above at most."""
    rows = rows_of(hops, links)
    starts = [number for number, hop in enumerate(hops) if not hop]
    assert sorted([*starts, *(row.message for row in rows)]) == list(range(12))
    depth = -1
    for row in rows:
        assert row.depth <= depth + 1
        depth = row.depth


def test_a_long_chain_is_no_deeper_than_python() -> None:
    """Thousands of messages, each from the one before."""
    chain = [Link(CAUSED, key(str(cause)), (cause, effect)) for cause, effect in pairwise(range(5_000))]
    assert rows_of(range(5_000), chain)[-1].depth == 4_998


def test_times_have_their_places_around_the_start() -> None:
    """Nearer ones are farther apart; one without a time has none; without a start, the first time is at the left."""
    times = [*moments(-3, 0, 1, 7), None]
    found = places(times, START)
    assert found == (16.67, 50.0, 66.67, 100.0, None)
    assert places([*moments(2, 3, 9)], None) == (0.0, 33.33, 100.0)
    assert places([*moments(3, 3)], None) == (0.0, 0.0)
    assert places([None], None) == (None,)
    assert places([], None) == ()


def test_what_all_bodies_of_a_list_share_is_left_out() -> None:
    """Of JSON objects alone, and where something is left; numbers are as they were written."""
    assert previews([b'{"a": 1, "b": 1.10, "c": [{"d": "x"}]}', b'{"a": 1, "b": 2}']) == [
        '{… "b": 1.10, "c": [{"d": "x"}]}',
        '{… "b": 2}',
    ]
    for bodies in ([b'{"a": 1}'], [b'{"a": 1}', b'{"a": 1}'], [b'{"a": 1}', b'{"b": 1}'], [b'{"a": 1}', b"text"], []):
        assert previews(bodies) == [preview(each) for each in bodies]
