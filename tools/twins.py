"""Writes the blocking faces that are made of asyncio ones: one source is kept by hand, its twin is made.

A source names its twin in its first line:

    # The blocking face of this, _reader.py, is made by tools/make-twins.

How the one becomes the other, and how a source marks what they do differently, is told in `blocking_faces`.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Final

from blocking_faces import NoTwin, blocking_face

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("plugin", "consumer_api", "spark_connectors", "migrations", "tests", "benchmarks")

SOURCE: Final = re.compile(r"# The blocking face of this, (\S+\.py), is made by tools/make-twins\.\n")
MADE: Final = '# Generated from {source} by tools/make-twins: edit that, then "make twins".\n'
IS_MADE: Final = re.compile(r"# Generated from (\S+\.py) by tools/make-twins")

LOOPS: Final = ("UP028", "C416")
"""Loops that only `async` made necessary: `yield from` and `list()` do the same in a blocking face."""


def twin_of(source: Path) -> Path | None:
    """The blocking face that is made of a file; None where it is no source."""
    with source.open(encoding="utf-8") as lines:
        found = SOURCE.match(lines.readline())
    return source.with_name(found[1]) if found else None


def made_of(source: Path, twin: Path) -> str:
    """The blocking face of a source, as it is written.

    Raises:
        NoTwin: none can be made.
    """
    text = SOURCE.sub("", source.read_text(encoding="utf-8"), count=1)
    face = MADE.format(source=source.name) + blocking_face(text)
    # Imports that are not needed any more go, and blocks that became one are written as one.
    mended = _ruff(face, twin, "check", "--quiet", "--fix-only", "--config", f"lint.extend-safe-fixes = {list(LOOPS)}")
    return _ruff(mended, twin, "format", "--quiet")


def _ruff(text: str, name: Path, *command: str) -> str:
    arguments = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(name), "-"]
    done = subprocess.run(  # noqa: S603 - ruff, with arguments of ours
        arguments, input=text, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise NoTwin(f"ruff refuses what was made: {done.stderr.strip()}")
    return done.stdout


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return lines.readline()


def main() -> int:
    """Write the twins, or check them; what the process ends with."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a twin differs")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="where to look (default: this checkout)")
    asked = parser.parse_args()
    files = [path for folder in FOLDERS for path in sorted((asked.root / folder).rglob("*.py"))]
    twins = {twin: path for path in files if (twin := twin_of(path)) is not None}
    wrong = [
        f"{path}: it says it was generated, but no source names it"
        for path in files
        if IS_MADE.match(_first_line(path)) and path not in twins
    ]
    for twin, source in twins.items():
        try:
            made = made_of(source, twin)
        except NoTwin as error:
            wrong.append(f"{source}: {error}")
            continue
        if twin.exists() and twin.read_text(encoding="utf-8") == made:
            continue
        if asked.check:
            wrong.append(f'{twin}: not what {source.name} gives: "make twins" writes it')
        else:
            twin.write_text(made, encoding="utf-8")
            print(f"wrote {twin}")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0
