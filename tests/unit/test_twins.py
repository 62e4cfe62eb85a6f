"""What tools/make-twins makes of an asyncio source."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tools.blocking_faces import NoTwin, blocking_face

TOOL = Path(__file__).parents[2] / "tools" / "make-twins"
FIRST_LINE = "# The blocking face of this, _face.py, is made by tools/make-twins.\n"

FACES = {
    "a call": ("async def ask() -> int:\n    return await answer()\n", "def ask() -> int:\n    return answer()\n"),
    "loops and blocks": (
        "async with turn() as one, other:\n    async for each in one:\n        await each.read()\n",
        "with turn() as one, other:\n    for each in one:\n        each.read()\n",
    ),
    "a comprehension": ("found = [each async for each in many()]\n", "found = [each for each in many()]\n"),
    "what an awaited call gives": ("size = len((await self.reach(it)).rows)\n", "size = len(self.reach(it).rows)\n"),
    "an awaited argument": ("take((await one()).two, f(await x).y)\n", "take(one().two, f(x).y)\n"),
    "an awaited sum": ("total = (await one + two).real\n", "total = (one + two).real\n"),
    "names": (
        "from a._async_reader import AsyncReader, async_agreement\nfrom b._stream_asyncio import _AsyncLine\n",
        "from a._reader import Reader, agreement\nfrom b._stream_blocking import _Line\n",
    ),
    "a name in quotation marks": ('made: "WeakSet[AsyncGroups]"\n', 'made: "WeakSet[Groups]"\n'),
    "methods of protocols": (
        "class A:\n    async def __aenter__(self) -> Self: ...\n    async def __anext__(self) -> int: ...\n",
        "class A:\n    def __enter__(self) -> Self: ...\n    def __next__(self) -> int: ...\n",
    ),
    "closing": (
        "async with aclosing(it) as each:\n    await each.aclose()\n",
        "with closing(it) as each:\n    each.close()\n",
    ),
    "what asyncio offers": (
        "import asyncio\n\nlock = asyncio.Lock()\nawait asyncio.sleep(left_s(1))\n",
        "import threading\nimport time\nimport asyncio\n\nlock = threading.Lock()\ntime.sleep(left_s(1))\n",
    ),
    "a thread for the event loop's sake": (
        "x = await asyncio.to_thread(self.ask, one, two=[1, 2])\ny = await asyncio.to_thread(end)\n",
        "x = self.ask(one, two=[1, 2])\ny = end()\n",
    ),
    "a thread of its own": (
        "await in_thread(\n    self._threads,\n    ask(1).now,\n    await one(),\n)\n",
        "ask(1).now(one(),\n)\n",
    ),
    "types": (
        "Run = Callable[[Any], Awaitable[list[int]]]\ndef a() -> AsyncGenerator[Message | None, None]: ...\n",
        "Run = Callable[[Any], list[int]]\ndef a() -> Generator[Message | None, None, None]: ...\n",
    ),
    "a coroutine's type": ("def run(it: Coroutine[Any, Any, T]) -> T: ...\n", "def run(it: T) -> T: ...\n"),
    "docstrings": (
        'class AsyncA:\n    """An asynchronous block; tasks share it.\n\n    See `AsyncB.aclose`.\n    """\n',
        'class A:\n    """A block; threads share it.\n\n    See `B.close`.\n    """\n',
    ),
    "comments": (
        "x = 1  # Another task awaits it, with asyncio; `asyncio` itself stays.\n",
        "x = 1  # Another thread awaits it, blocking; `asyncio` itself stays.\n",
    ),
    "what a program says": ('raise E("a task of asyncio")\n', 'raise E("a task of asyncio")\n'),
    "an f-string": (
        'who = f"{await_s} {AsyncA.name} of {x!r:>{width}}"\n',
        'who = f"{await_s} {A.name} of {x!r:>{width}}"\n',
    ),
    "marked lines": (
        "def f() -> None:\n    # asyncio only:\n    asyncio.gather(one)\n    # blocking only:\n    # # Both at once.\n"
        "    # if one:\n    #     one.wait()\n    #\n    # two.wait()\n    # both:\n    three()\n",
        "def f() -> None:\n    # Both at once.\n    if one:\n        one.wait()\n\n    two.wait()\n    three()\n",
    ),
    "lines for the blocking face alone": (
        "import os\n# blocking only:\n\n# one = threading.Lock()\n# both:\nx = 1\n",
        "import threading\nimport os\n\none = threading.Lock()\nx = 1\n",
    ),
}


@pytest.mark.parametrize("name", FACES)
def test_a_source_gives_its_blocking_face(name: str) -> None:
    """Each thing of asyncio becomes what threads have in its place; all else stays as it was written."""
    source, face = FACES[name]
    assert blocking_face(source) == face


REFUSED = {
    "no counterpart": ("x = asyncio.gather(one, two)\n", "asyncio.gather has no counterpart"),
    "no meaning": ('"""Reads in the event loop."""\n', "'event loop' means nothing"),
    "no end": ("# asyncio only:\nx = 1\n", "have no end"),
    "no beginning": ("x = 1\n# both:\n", "line 2: nothing was marked"),
    "no comment": ("# blocking only:\nx = 1\n# both:\n", "line 2: a line for the blocking face alone is a comment"),
    "no name": ("async_is = 1\n", "'async_is' would be called 'is'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_threads_cannot_say_is_refused(name: str) -> None:
    """A source that says something of asyncio alone, outside marked lines, gives no face, and the error says where."""
    source, message = REFUSED[name]
    with pytest.raises(NoTwin, match=message):
        blocking_face(source)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source in a tree of its own."""
    path = tmp_path / "plugin" / "_async_face.py"
    path.parent.mkdir()
    path.write_text(
        FIRST_LINE
        + dedent('''\
        """The asyncio face."""

        import asyncio
        from contextlib import aclosing, closing


        async def ask(one: "AsyncOne") -> None:
            """Ask it."""
            async with aclosing(one):
                # A moment of rest.
                with closing(one.two):
                    await asyncio.sleep(1)
        ''')
    )
    return path


def _made(root: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, TOOL, *options, root], capture_output=True, text=True, check=False)


def test_a_twin_is_written_formatted_with_its_source_named(source: Path) -> None:
    """What is written says of what it was made, imports what it needs and no more, and is formatted."""
    assert _made(source.parents[1]).returncode == 0
    assert source.with_name("_face.py").read_text() == dedent('''\
        # Generated from _async_face.py by tools/make-twins: edit that, then "make twins".
        """The blocking face."""

        import time
        from contextlib import closing


        def ask(one: "One") -> None:
            """Ask it."""
            with closing(one):
                # A moment of rest.
                with closing(one.two):
                    time.sleep(1)
        ''')
    assert _made(source.parents[1], "--check").returncode == 0


def test_the_check_refuses_what_was_edited(source: Path) -> None:
    """A twin that differs from what its source gives fails the check, which writes nothing."""
    _made(source.parents[1])
    twin = source.with_name("_face.py")
    twin.write_text(twin.read_text().replace("sleep(1)", "sleep(2)"))
    checked = _made(source.parents[1], "--check")
    assert checked.returncode == 1
    assert "not what _async_face.py gives" in checked.stderr
    assert "sleep(2)" in twin.read_text()


def test_the_check_refuses_a_twin_without_a_source(source: Path) -> None:
    """A file that says it was made, of a source that is not there, fails the check: nobody would keep it."""
    _made(source.parents[1])
    source.unlink()
    checked = _made(source.parents[1], "--check")
    assert checked.returncode == 1
    assert "no source names it" in checked.stderr


def test_a_source_without_a_face_is_named(source: Path) -> None:
    """Where no face can be made, the error names the file and the line."""
    source.write_text(source.read_text().replace("asyncio.sleep(1)", "asyncio.gather(one)"))
    made = _made(source.parents[1])
    assert made.returncode == 1
    assert "_async_face.py: at 'await asyncio.gather(one)'" in made.stderr


def test_the_twins_of_this_checkout_are_what_their_sources_give() -> None:
    """Nobody has edited a twin, or a source without making its twin anew."""
    checked = _made(TOOL.parents[1], "--check")
    assert (checked.returncode, checked.stderr) == (0, "")
