"""What a run of the benchmarks is compared with: ratios kept by kind of machine, and what is marked as fallen."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import _command
from benchmarks._kept import fallen, keep, kept_in, kind_of, path_of
from benchmarks._results import Row

FACTS: dict[str, Any] = {
    "architecture": "x86_64",
    "cores": 2,
    "rabbitmq": "3.10.8",
    "postgresql": "18.0",
    "python": "3.11.2",
    "compiled": True,
    "messages": 1_000_000,
    "quick": False,
    "system": "somebody's machine",
}


def _row(what: str, ratio: float | None, aim: str = "≥ 0.9 ×", error: str = "") -> Row:
    return Row("publishing", what, "1 ms", ratio=ratio, aim=aim, error=error)


@pytest.mark.parametrize(
    ("aim", "now", "fell"),
    [
        ("≥ 0.9 ×", 0.9, False),
        ("≥ 0.9 ×", 0.89, True),
        ("≥ 0.9 ×", 1.5, False),
        ("≤ 1.15", 1.11, False),
        ("≤ 1.15", 1.12, True),
        ("≤ 1.15", 0.5, False),
        ("reported", 0.1, False),
    ],
)
def test_what_is_more_than_a_tenth_worse_has_fallen(aim: str, now: float, fell: bool) -> None:
    """A large ratio falls as it shrinks, a small one as it grows; figures, errors and new rows are not compared."""
    rows = [
        _row("figure", None),
        _row("broken", 0.1, error="it broke"),
        _row("new", 0.1),
        _row("with confirms", now, aim),
    ]
    before = {f"publishing: {name}": 1.0 for name in ("figure", "broken", "with confirms")}
    assert [each.what for each in fallen(rows, before)] == ["publishing: with confirms"] * fell


def test_ratios_are_kept_by_kind_of_machine(tmp_path: Path) -> None:
    """What depends on the machine is in the file's name; rows that were not measured again stay."""
    path = path_of(tmp_path / "kept", FACTS)
    assert path.stem == "x86_64-2-cores-rabbitmq-3.10-compiled-1000000"
    assert kept_in(path) == {}
    keep(path, FACTS, [_row("a", 1.23456), _row("b", 2.0)])
    keep(path, FACTS, [_row("b", 3.0)])
    assert kept_in(path) == {"publishing: a": 1.235, "publishing: b": 3.0}
    assert "somebody" not in path.read_text()
    assert kind_of(FACTS | {"cores": 4}) != kind_of(FACTS)


def test_the_short_form_fails_no_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers that do not come up are named, and the exit code is 0."""
    for name, scheme in (("AMQP", "amqp"), ("STREAM", "rabbitmq-stream"), ("DATABASE", "postgresql")):
        monkeypatch.setenv(f"RELATUM_TEST_{name}_URL", f"{scheme}://127.0.0.1:1/")
    results = tmp_path / "results.json"
    assert _command.run("bench", {}, results, ["lookups"], ["--short"]) == 0
    assert "not measured: " in capsys.readouterr().out
    assert not results.exists()
