"""What tools/make-twins makes of an asyncio source."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.blocking_faces import NoTwin, blocking_face

TOOL = Path(__file__).parents[2] / "tools" / "make-twins"

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


def test_a_twin_is_written_with_its_source_named_and_checked(tmp_path: Path) -> None:
    """It says of what it was made and imports what it needs; one that was edited, or has no source, is refused."""
    source, twin = tmp_path / "plugin" / "_async_face.py", tmp_path / "plugin" / "_face.py"
    source.parent.mkdir()
    source.write_text(
        "# The blocking face of this, _face.py, is made by tools/make-twins.\n"
        "import asyncio\n\n\nasync def ask() -> None:\n    await asyncio.sleep(1)\n"
    )

    def made(*options: str) -> int:
        return subprocess.run([sys.executable, TOOL, *options, tmp_path], capture_output=True, check=False).returncode

    assert made() == 0
    written = (
        '# Generated from _async_face.py by tools/make-twins: edit that, then "make twins".\n'
        "import time\n\n\ndef ask() -> None:\n    time.sleep(1)\n"
    )
    assert twin.read_text() == written
    twin.write_text(written.replace("sleep(1)", "sleep(2)"))
    assert made("--check") == 1
    assert made() == 0
    source.unlink()
    assert made("--check") == 1
