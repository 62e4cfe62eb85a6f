"""What a run of the benchmarks is compared with: ratios kept by kind of machine, and what is marked as fallen."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _command
from benchmarks._kept import compared, fallen, keep, kept_in, kind_of, path_of
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
    ("aim", "before", "now", "fell"),
    [
        ("≥ 0.9 ×", 1.0, 0.9, False),
        ("≥ 0.9 ×", 1.0, 0.89, True),
        ("≥ 0.9 ×", 1.0, 1.5, False),
        ("≤ 1.15", 1.0, 1.11, False),
        ("≤ 1.15", 1.0, 1.12, True),
        ("≤ 1.15", 1.0, 0.5, False),
    ],
)
def test_what_is_more_than_a_tenth_worse_has_fallen(aim: str, before: float, now: float, fell: bool) -> None:
    """A ratio that is to be large falls as it shrinks, and one that is to be small as it grows."""
    found = fallen([_row("with confirms", now, aim)], {"publishing: with confirms": before})
    assert bool(found) is fell
    for each in found:
        assert each.share > 0.1
        assert "publishing: with confirms" in str(each)


def test_only_ratios_with_an_aim_are_compared() -> None:
    """Neither figures, nor what failed, nor what is new; rows of one name are told apart."""
    rows = [
        _row("the same", 1.0),
        _row("the same", 0.5),
        _row("a figure", None),
        _row("reported", 1.0, "reported"),
        _row("broken", 1.0, error="it broke"),
    ]
    assert list(compared(rows)) == ["publishing: the same", "publishing: the same (2)"]
    assert [each.what for each in fallen(rows, {"publishing: the same (2)": 1.0})] == ["publishing: the same (2)"]


def test_ratios_are_kept_by_kind_of_machine(tmp_path: Path) -> None:
    """What depends on the machine is in the file's name; groups that were not measured again stay."""
    path = path_of(tmp_path / "kept", FACTS)
    assert path.stem == "x86_64-2-cores-rabbitmq-3.10-compiled-1000000"
    assert kept_in(path) == {}
    keep(path, FACTS, [_row("a", 1.23456), _row("b", 2.0)])
    keep(path, FACTS, [_row("b", 3.0)])
    assert kept_in(path) == {"publishing: a": 1.235, "publishing: b": 3.0}
    assert "somebody" not in path.read_text()
    others = [{"cores": 4}, {"rabbitmq": "4.1.0"}, {"compiled": False}, {"messages": 20_000}, {"quick": True}]
    assert len({kind_of(FACTS | other) for other in others} | {kind_of(FACTS)}) == 6


def test_the_short_form_says_that_servers_do_not_come_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build does not fail by it."""
    for variable, url in (
        ("RELATUM_TEST_AMQP_URL", "amqp://127.0.0.1:1/"),
        ("RELATUM_TEST_STREAM_URL", "rabbitmq-stream://127.0.0.1:1/"),
        ("RELATUM_TEST_DATABASE_URL", "postgresql://127.0.0.1:1/none"),
    ):
        monkeypatch.setenv(variable, url)
    results = tmp_path / "results.json"
    assert _command.run("bench", {}, results, ["lookups"], ["--short"]) == 0
    assert "not measured: " in capsys.readouterr().out
    assert not results.exists()


def test_the_short_form_ends_whatever_it_is_at() -> None:
    """Nothing that goes on after errors keeps it."""

    def try_for_ever() -> None:
        with _command.ended_after(0.01):
            while True:
                with suppress(Exception):
                    raise ValueError

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(_command.OutOfTime):
        try_for_ever()
    assert signal.getsignal(signal.SIGALRM) is before
