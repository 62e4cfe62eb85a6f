"""Tables on the terminal, where it is narrow."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from rich.text import Text

from relatum.terminal import console, table_of


def test_names_are_never_cut_off() -> None:
    """A long name goes on in the next line; what is short stays whole."""
    table = table_of("from", "to", "state", whole=("state",))
    table.add_row("orders-of-last-year-0", "orders-of-last-year-1", "switched")
    out = io.StringIO()
    Console(file=out, width=36).print(table)
    shown = out.getvalue()
    assert "…" not in shown
    assert "switched" in shown
    rows = [line.split("│")[1:4] for line in shown.splitlines() if line.startswith("│")]
    assert ["".join(row[column].strip() for row in rows) for column in (0, 1)] == [
        "orders-of-last-year-0",
        "orders-of-last-year-1",
    ]


def piped(table: object, *more: object) -> str:
    """What goes into a pipe."""
    out = io.StringIO()
    type(console)(file=out, width=80).print(table, *more)
    return out.getvalue()


def test_a_piped_table_is_tab_separated_and_whole() -> None:
    """Where stdout is no terminal, a row is a line, without boxes, cut cells or markup."""
    table = table_of("stream", "body")
    table.title = Text("what was found", style="bold")
    long = "x" * 300
    table.add_row("orders", Text(f"[red]{long}"))
    table.add_row("a name", Text("two\nlines\tand a tab"))
    lines = ["what was found", "stream\tbody", f"orders\t[red]{long}", "a name\ttwo lines and a tab"]
    assert piped(table).splitlines() == lines


def test_a_piped_line_is_not_wrapped() -> None:
    """Where stdout is no terminal, a long line stays one."""
    assert piped("word " * 60).splitlines() == ["word " * 60]


def test_an_empty_piped_table_has_its_header() -> None:
    """A table without rows still says what its columns are."""
    assert piped(table_of("stream", "offset")).splitlines() == ["stream\toffset"]


def test_a_quiet_console_prints_no_table() -> None:
    """Where a command prints one JSON document, nothing stands before it."""
    out = io.StringIO()
    type(console)(file=out, quiet=True).print(table_of("stream"))
    assert not out.getvalue()


@pytest.mark.parametrize(("no_color", "is_plain"), [("1", True), ("", False)])
def test_no_color_leaves_no_escape_sequences(no_color: str, is_plain: bool) -> None:
    """With NO_COLOR set, neither colours nor bold type are printed, also on a terminal."""
    program = "from relatum.terminal import console; console.print('x', style='bold')"
    environment = {**os.environ, "NO_COLOR": no_color, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert (b"\x1b" not in done.stdout) == is_plain
