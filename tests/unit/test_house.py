"""What `tools/measure-house --check` complains of, on houses small enough to check by eye."""

from pathlib import Path
from textwrap import dedent

import pytest

from tools.house import arrows, picture, report
from tools.house.sources import Module, read_product


@pytest.fixture
def house(tmp_path: Path):
    """Write a house of the files that are given, and read it."""

    def built(**files: str) -> dict[str, Module]:
        for place, text in {"plugin/relatum/__init__": "", **_named(files)}.items():
            file = tmp_path / f"{place}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
        return read_product(tmp_path)

    return built


def _named(files: dict[str, str]) -> dict[str, str]:
    """`recording___tail` is `recording/_tail` of the kernel."""
    return {f"plugin/relatum/{name.replace('__', '/', 1)}": text for name, text in files.items()}


def test_private_crossings(house):
    """What a face lists is public, and everything behind it is not."""
    modules = house(
        store____init__="from relatum.store._rows import copy, spare\n__all__ = ['copy']\n",
        store___rows="copy = spare = 1\n",
        errors="class Wrong(Exception): ...\n",
        recording___tail="""
            from relatum.errors import Wrong
            from relatum.store import copy, spare
            from relatum.store._rows import copy as again
            def late():
                from ..store import _rows
        """,
    )
    assert sorted(map(str, arrows.private_crossings(modules))) == [
        "relatum.recording <- relatum.store._rows",
        "relatum.recording <- relatum.store._rows.copy",
        "relatum.recording <- relatum.store.spare",
    ]


def test_floors():
    """Floors are the longest chain of rooms, and a cycle is one floor."""
    graph = {"top": {"left", "right"}, "left": {"right", "ground"}, "right": {"left"}, "ground": set(), "alone": set()}
    assert arrows.floors(graph) == ([("top",), ("left", "right"), ("ground",)], [("left", "right")])


def test_picture():
    """The picture and the imports are compared both ways."""
    page = "# House\n\n```text\nrooms\nground: errors\nrecording -> store\nstore ->\nattic -> store\n```\n"
    graph = {
        "relatum.recording": {"relatum.errors", "relatum.reading"},
        "relatum.store": {"relatum.errors"},
        "relatum.reading": set(),
        "relatum.errors": {"relatum.store"},
    }
    assert list(picture.differences(page, graph)) == [
        "docs/architecture.md draws attic, which there is not",
        "docs/architecture.md does not draw reading",
        "recording imports reading: not in docs/architecture.md",
        "docs/architecture.md: recording -> store is not imported",
        "docs/architecture.md: errors is of the ground and imports store, which is not",
    ]


def test_exceptions(house, tmp_path: Path):
    """An import past a face is told until it is excepted, and an exception until it is dropped."""
    modules = house(store___rows="copy = 1\n", recording___tail="from relatum.store._rows import copy\n")
    exceptions = tmp_path / report.EXCEPTIONS
    exceptions.parent.mkdir(parents=True)
    exceptions.write_text("# Why.\n")
    (told,) = report.complaints(modules, tmp_path)
    assert told.endswith("relatum.recording <- relatum.store._rows.copy")
    exceptions.write_text(
        "# Why.\nrelatum.recording <- relatum.store._rows.copy\nrelatum.recording <- relatum.store._gone\n"
    )
    (told,) = report.complaints(modules, tmp_path)
    assert told.endswith("relatum.recording <- relatum.store._gone")
    assert report.shorten(modules, tmp_path) == 1
    assert list(report.complaints(modules, tmp_path)) == []
    assert exceptions.read_text().startswith("# Why.\n")


def test_private_modules_that_tests_import(house, tmp_path: Path):
    """A test's import of a private module is told until it is listed; public names and the pure cores are free."""
    modules = house(store="", recording___tail="")
    test = tmp_path / "tests/unit/test_tail.py"
    test.parent.mkdir(parents=True)
    test.write_text(
        "from relatum.store import Tail\nfrom relatum.wire._frames import Code\n"
        "from relatum.recording._tail import a, b\nfrom relatum.recording import _tail\nimport relatum._start\n"
    )
    told = list(report.complaints(modules, tmp_path))
    assert told == [
        "a test imports a private module: tests/unit/test_tail.py <- relatum._start",
        "a test imports a private module: tests/unit/test_tail.py <- relatum.recording._tail",
    ]
    seams = tmp_path / report.SEAMS
    seams.parent.mkdir(parents=True)
    seams.write_text("# Why.\n" + "".join(f"{line.rpartition(': ')[2]}\n" for line in told))
    assert list(report.complaints(modules, tmp_path)) == []
    test.unlink()
    assert len(list(report.complaints(modules, tmp_path))) == 2
    assert report.shorten(modules, tmp_path) == 0
    assert seams.read_text() == "# Why.\n"
