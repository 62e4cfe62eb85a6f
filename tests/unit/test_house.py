"""What `tools/measure-house` counts, on houses small enough to count by eye."""

from pathlib import Path
from textwrap import dedent

import pytest

from tools.house import arrows, mechanisms, picture, report
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


def test_rooms(tmp_path: Path):
    """A room is a folder or a module of the kernel, a folder of the consumer, or a whole package."""
    for place in (
        "plugin/relatum/__init__.py",
        "plugin/relatum/errors.py",
        "plugin/relatum/store/_rows.py",
        "plugin/relatum/contexts/serial/_log.py",
        "consumer_api/relatum_consumer/_relations.py",
        "consumer_api/relatum_consumer/groups/sharing/_claims.py",
        "spark_connectors/relatum_spark/source/_rows.py",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    assert {name: module.room for name, module in read_product(tmp_path).items()} == {
        "relatum": "relatum",
        "relatum.errors": "relatum.errors",
        "relatum.store._rows": "relatum.store",
        "relatum.contexts.serial._log": "relatum.contexts",
        "relatum_consumer._relations": "relatum_consumer",
        "relatum_consumer.groups.sharing._claims": "relatum_consumer.groups",
        "relatum_spark.source._rows": "relatum_spark",
    }


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


def test_mechanisms(house):
    """Each mechanism is counted where it is, and what only looks like it is not."""
    modules = house(
        steps__driver="""
            def run(steps):
                try:
                    while True:
                        steps.send(None)
                except StopIteration as end:
                    return end.value
        """,
        store___engine="def ask(connection): connection.execute('select 1')\n",
        recording___tail="""
            def follow(reader, connection):
                connection.execute(update.values(lease_expires_at=soon))
                connection.execute(update.values(lease_expires_at=None))
                for batch in reader.batches("stream", 0, follow=True): ...
                for batch in reader.batches("stream", 0, follow=False): ...
        """,
        recording___free="def free(): update.values(lease_expires_at=None)\n",
        reading___plan="def plan() -> 'x': ...\ndef steps() -> Generator[Command, Answer, None]: ...\n",
    )
    assert mechanisms.step_drivers(modules) == ["relatum.steps.driver"]
    assert mechanisms.step_protocols(modules) == ["relatum.reading: Command"]
    assert mechanisms.sql_runners(modules) == ["relatum.recording._tail"]
    assert mechanisms.leases(modules) == ["relatum.recording._tail"]
    assert mechanisms.followers(modules) == ["relatum.recording._tail"]


def test_protocols_of_steps(house):
    """Whatever asks by requests has one protocol, also for some of them, and where it gives something on the way."""
    modules = house(
        steps___request="class Request: ...\ndef run(steps: Generator[Kind, Any, Result]) -> Result: ...\n",
        reading___asking="""
            class Find(Request[int]): ...
            class Pause(Request[None]): ...
            Asked: TypeAlias = Find | Pause
            def found() -> Generator[Asked, Any, int]: ...
            def chunks() -> Generator[Find | bytes | None, Any, None]: ...
        """,
        wire___bytes="def exchanged() -> Generator[None | bytes, list[bytes], int]: ...\n",
        store___rows="def rows() -> Generator[str, None, None]: ...\n",
    )
    assert mechanisms.step_protocols(modules) == ["relatum.steps: Request", "relatum.wire: None | bytes"]


def test_twins(house):
    """Twins are pairs by name or by class, and one that is generated makes no pair."""
    modules = house(
        reading___reader="class Reader: ...\n",
        reading___over_asyncio="class AsyncReader: ...\n",
        reading___socket_blocking="",
        reading___socket_asyncio="",
        store___ask="class Ask: ...\n",
        store___ask_async="# Generated by tools/unasync: edit _ask.py.\nclass AsyncAsk: ...\n",
    )
    assert mechanisms.twins(modules) == [
        "relatum.reading._reader | relatum.reading._over_asyncio",
        "relatum.reading._socket_blocking | relatum.reading._socket_asyncio",
    ]


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
