"""The benchmarks' table as pictures: what is in it, all of it, and nothing else."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks._plots import IMAGES, README, Margin, Pair, draw, margins, pairs, rows_of
from benchmarks._results import Row, markdown, save

ROWS = [
    Row("lookups", "`related`, median", "3.6 ms", "3.2 ms: bare probe and read", 1.12, "≤ 1.5 ×"),
    Row("lookups", "the same", "3.6 ms", "19 s: scanning", 5240.0, "≥ 1,000"),
    Row("publishing", "no confirms", "17,895/s", "21,317/s: bare pika", 0.84, "≥ 0.85", is_met=False),
    Row("lag", "publish to recorded", "median 4.3 ms", aim="25 ms"),
    Row("recording", "catching up", "146,077/s", "", None, "≥ 100,000/s"),
    Row("bloom", "on a broker without", "", note="not there", aim="≥ 2 ×"),
]


@pytest.mark.parametrize("name", ["results.json", "table.md"])
def test_what_was_measured_is_drawn_and_nothing_else(tmp_path: Path, name: str) -> None:
    """Of the JSON file and of the document the same: ratios that have an aim, and figures in one unit."""
    path = tmp_path / name
    if name.endswith("json"):
        save(path, {}, ROWS)
    else:
        path.write_text(markdown(ROWS))
    rows = rows_of(path)
    assert [(each.label, each.aim, round(each.share, 2)) for each in margins(rows)] == [
        ("related, median / bare probe and read", "≤ 1.5", 1.34),
        ("related / scanning", "≥ 1,000", 5.24),
        ("no confirms / bare pika", "≥ 0.85", 0.99),
    ]
    assert [(each.unit, round(each.ours, 6), each.other) for each in pairs(rows)] == [
        ("s", 0.0036, 0.0032),
        ("s", 0.0036, 19.0),
        ("messages/s", 17_895.0, 21_317.0),
    ]
    drawn = draw(path)
    assert sorted(each.name for each in drawn) == [f"{path.stem}-aims.svg", f"{path.stem}-figures.svg"]
    assert "no confirms / bare pika" in drawn[0].read_text()


def test_of_nothing_nothing_is_drawn(tmp_path: Path) -> None:
    """Rows without figures make no picture."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [asdict(ROWS[-1])]}))
    assert draw(path) == []


def test_the_documents_pictures_are_of_the_table_beside_them() -> None:
    """Each label and ratio of README's tables is in them: `make bench BENCH=--plot` after a change of the tables."""
    rows = rows_of(README)
    found: list[tuple[str, list[Margin] | list[Pair]]] = [("aims", margins(rows)), ("figures", pairs(rows))]
    for name, drawn in found:
        svg = (IMAGES / f"benchmarks-{name}.svg").read_text()
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg.replace("&#x27;", "'"))
        assert len(drawn) > 20
        labels = [each.label for each in drawn]
        assert sorted(labels) == sorted(text for text in texts if text in labels)
        shown = [f"{each.ratio:,g} ({each.aim})" for each in drawn if isinstance(each, Margin)]
        assert sorted(shown) == sorted(text for text in texts if "(" in text and text in shown)
