"""The project's tools: what measure-house complains of, what benchmarks are compared with."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from benchmarks import _command
from benchmarks._kept import fallen, keep, kept_in, kind_of, path_of
from benchmarks._results import Row
from tools.house import arrows, picture, report
from tools.house.sources import Module, read_product


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def house(tmp_path: Path):
    """Write files of the kernel, `recording___tail` as `recording/_tail`, and read them."""

    def built(**files: str) -> dict[str, Module]:
        for name, text in {"__init__": "", **files}.items():
            place = name if name.startswith("__") else name.replace("__", "/", 1)
            written(tmp_path / f"plugin/relatum/{place}.py", dedent(text))
        return read_product(tmp_path)

    return built


def test_private_crossings(house):
    """What a package lists is public, and so are its modules without an underscore; what is behind one is not."""
    modules = house(
        store____init__="from relatum.store._rows import copy, spare\n__all__ = ['copy']\n",
        store___rows="copy = spare = 1\n",
        store__tails="open = _end = 1\n",
        errors="class Wrong(Exception): ...\n",
        recording___tail="""
            from relatum.errors import Wrong
            from relatum.store import copy, spare
            from relatum.store._rows import copy as again
            from relatum.store.tails import _end, open
            def late():
                from ..store import _rows
        """,
    )
    assert sorted(map(str, arrows.private_crossings(modules))) == [
        "relatum.recording <- relatum.store._rows",
        "relatum.recording <- relatum.store._rows.copy",
        "relatum.recording <- relatum.store.spare",
        "relatum.recording <- relatum.store.tails._end",
    ]


def test_floors():
    """Floors are the longest chain of subsystems, and a cycle is one floor."""
    graph = {"top": {"left", "right"}, "left": {"right", "ground"}, "right": {"left"}, "ground": set(), "alone": set()}
    assert arrows.floors(graph) == ([("top",), ("left", "right"), ("ground",)], [("left", "right")])


def test_picture():
    """The picture and the imports are compared both ways."""
    page = "# House\n\n```text\nsubsystems\nground: errors\nrecording -> store\nstore ->\nattic -> store\n```\n"
    graph = {
        "relatum.recording": {"relatum.errors", "relatum.reading"},
        "relatum.store": {"relatum.errors"},
        "relatum.reading": set(),
        "relatum.errors": {"relatum.store"},
    }
    assert list(picture.differences(page, graph)) == [
        "docs/architecture.md draws attic, which does not exist",
        "docs/architecture.md does not draw reading",
        "recording imports reading: not in docs/architecture.md",
        "docs/architecture.md: recording -> store is not imported",
        "docs/architecture.md: errors belongs to the ground and imports store, which does not",
    ]


def test_exceptions(house, tmp_path: Path):
    """An import of a private name is reported until it is excepted, and a stale exception until it is removed."""
    modules = house(store___rows="copy = 1\n", recording___tail="from relatum.store._rows import copy\n")
    exceptions = written(tmp_path / report.EXCEPTIONS, "# Why.\n")
    (told,) = report.complaints(modules, tmp_path)
    assert told.endswith("relatum.recording <- relatum.store._rows.copy")
    exceptions.write_text(
        "# Why.\nrelatum.recording <- relatum.store._rows.copy\nrelatum.recording <- relatum.store._gone\n"
    )
    (told,) = report.complaints(modules, tmp_path)
    assert told.endswith("relatum.recording <- relatum.store._gone")
    assert (report.shorten(modules, tmp_path), list(report.complaints(modules, tmp_path))) == (1, [])
    assert exceptions.read_text().startswith("# Why.\n")


def test_private_modules_that_tests_import(house, tmp_path: Path):
    """A test's import of a private module is reported until it is listed; public names and pure cores are free."""
    modules = house(store="", recording___tail="")
    imports = (
        "from relatum.store import Tail\nfrom relatum.wire.frames import Code\n"
        "from relatum.recording._tail import a, b\nfrom relatum.recording import _tail\nimport relatum._start\n"
    )
    test = written(tmp_path / "tests/unit/test_tail.py", imports)
    told = list(report.complaints(modules, tmp_path))
    assert told == [
        "a test imports a private module: tests/unit/test_tail.py <- relatum._start",
        "a test imports a private module: tests/unit/test_tail.py <- relatum.recording._tail",
    ]
    lines = "".join(f"{line.rpartition(': ')[2]}\n" for line in told)
    seams = written(tmp_path / report.SEAMS, "# Why.\n" + lines)
    assert list(report.complaints(modules, tmp_path)) == []
    test.unlink()
    assert (len(list(report.complaints(modules, tmp_path))), report.shorten(modules, tmp_path)) == (2, 0)
    assert seams.read_text() == "# Why.\n"


def test_words(house, tmp_path: Path):
    """Each use of a listed word needs an exception; code, blocks and links are not prose, and all help is one place."""
    modules = house(
        command___find='def find() -> None:\n    """A look-up."""\n',
        recording___tail="text = 'Who asks lies.'",
    )
    text = "It stands [here](#who-asks), is told `apart`, and lies.\nIt Lies.\n```\nlies\n```\n"
    page = written(tmp_path / "docs/tap.md", text)
    told = list(report.complaints(modules, tmp_path))
    assert [line.rpartition(": ")[2] for line in told] == [
        "docs/tap.md <- is told 1",
        "docs/tap.md <- lies 1",
        "docs/tap.md <- lies 2",
        "docs/tap.md <- stands 1",
        "help <- look-up 1",
    ]
    words = written(tmp_path / report.WORDS, "".join(f"{line.rpartition(': ')[2]}\n" for line in told))
    assert list(report.complaints(modules, tmp_path)) == []
    page.write_text("It lies.\n")
    assert report.shorten(modules, tmp_path) == 2
    assert words.read_text() == "docs/tap.md <- lies 1\nhelp <- look-up 1\n"


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
    assert (path.stem, kept_in(path)) == ("x86_64-2-cores-rabbitmq-3.10-compiled-1000000", {})
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
