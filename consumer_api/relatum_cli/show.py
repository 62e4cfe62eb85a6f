"""What goes to the terminal: data to stdout, everything else to stderr.

Where stdout is a pipe or a file, nothing is cut, folded, boxed or coloured, and tables are tab-separated: the other end
is a program, or somebody who reads it later, whatever the width of the terminal was.
"""

import errno
import io
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, Literal

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from relatum.documents import document
from relatum.terminal._exits import ExitCode

_LINE_BREAKS: Final = str.maketrans({"\t": " ", "\n": " ", "\r": " "})
"""A row is a line and a tab ends a cell: neither may stand in a cell."""


def _colors() -> Literal["auto"] | None:
    """None, for no escape sequences at all, where NO_COLOR is set to anything.

    Source: https://no-color.org
    """
    return None if os.environ.get("NO_COLOR") else "auto"


class _PlainConsole(Console):
    """Shows what others wrote as it is, without markup and emoji; control characters, which move cursors, as dots."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, "color_system": _colors(), **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """As `rich.console.Console.render`."""
        for each in super().render(renderable, options):
            yield each if each.control or each.text.isprintable() else each._replace(text=_shown(each.text))


class _DataConsole(_PlainConsole):
    """A console whose tables are tab-separated lines and whose lines are whole, where it is no terminal."""

    def on_broken_pipe(self) -> None:
        """Leave it to `ending_with_output`: rich would end the process with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def print(self, *objects: Any, **options: Any) -> None:
        """As `rich.console.Console.print`."""
        if self.is_terminal or self.quiet:
            super().print(*objects, **options)
            return
        for each in objects:
            if isinstance(each, Table):
                # Not by rich, which makes spaces of tabs.
                self.file.writelines(f"{line}\n" for line in tab_separated(each))
        rest = [each for each in objects if not isinstance(each, Table)]
        if rest or not objects:
            super().print(*rest, **{"soft_wrap": True, **options})


def tab_separated(table: Table) -> Iterator[str]:
    """A table's lines as programs read them: its title where it has one, its columns' names, a line for each row."""
    if table.title is not None:
        yield _plain_text([table.title])
    if table.show_header:
        yield _plain_text(column.header for column in table.columns)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield _plain_text(cells)


def _plain_text(cells: Iterable[RenderableType]) -> str:
    return "\t".join(_shown(str(cell).translate(_LINE_BREAKS)) for cell in cells)


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() or each == "\n" else "·" for each in text)


console: Console = _DataConsole()
"""Data for people; for programs where stdout is no terminal."""

errors: Console = _PlainConsole(stderr=True)
"""Errors and progress."""


def table_of(*columns: str, whole: Collection[str] = ()) -> Table:
    """A table whose cells go on in the next line where they are too long: a name that is cut off names nothing.

    `whole`: Those with cells that are short, and stay in one line.
    """
    return Table(*(Column(column, overflow="fold", no_wrap=column in whole) for column in columns))


def print_rows(rows: Iterable[Any], columns: Mapping[str, Any], *, whole: Collection[str] = ()) -> None:
    """Print a table with a row for each thing.

    Args:
        rows: The things.
        columns: By heading, an attribute's name, or a function of a row. Numbers have their thousands apart.
        whole: Columns whose cells are short, and stay in one line.
    """
    table = table_of(*columns, whole=whole)
    for row in rows:
        values = (getattr(row, each) if isinstance(each, str) else each(row) for each in columns.values())
        table.add_row(*(Text(_cell(value)) for value in values))
    console.print(table)


def _cell(value: object) -> str:
    if value is None or isinstance(value, datetime):
        return moment_text(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Print what is known of one thing: its name, and a line for each fact."""
    table = Table(title=Text(title, style="bold"), title_justify="left", show_header=False)
    for label, value in facts:
        table.add_row(Text(label), Text(value))
    console.print(table)


def plain_text(text: str, style: str = "") -> Text:
    """Text of others in a style."""
    return Text(_shown(text), style)


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print a value as one JSON document."""
    is_ascii = not _is_unicode(sys.stdout)
    print(json.dumps(document(value), indent=None if one_line else 2, ensure_ascii=is_ascii), flush=True)


def print_error(message: str) -> None:
    """Print one error for people."""
    errors.print(f"error: {message}", style="red", soft_wrap=True)


_OF_OUTPUT: Final = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to stdout fails with. Errors of connections are Relatum's own by then, and those of files name them."""


@contextmanager
def ending_with_output() -> Iterator[None]:
    """End the process, with a code of its own, where stdout cannot be written or nobody reads it any more."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper) and not _is_unicode(sys.stdout):
            # A dash that such a terminal lacks is no reason to show nothing.
            sys.stdout.reconfigure(errors="replace")
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit as ended:
        # Of rich, which ends the process with 1 by itself where a console of Typer's meets a closed pipe.
        if isinstance(ended.__context__, BrokenPipeError):
            raise SystemExit(int(ExitCode.CLOSED)) from None
        raise
    except OSError as error:
        if error.errno not in _OF_OUTPUT or error.filename is not None:
            raise
        _drop_output()
        if error.errno == errno.EPIPE:
            raise SystemExit(int(ExitCode.CLOSED)) from None
        print_error(f"stdout cannot be written: {error.strerror}")
        raise SystemExit(int(ExitCode.OUTPUT)) from None


def _is_unicode(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _drop_output() -> None:
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def ranges_text(ranges: list[tuple[int, int]], *, most: int = 3) -> str:
    """Offset ranges [from, to) as people read them: first to last offset."""
    shown = [f"{start:,}–{end - 1:,}" for start, end in ranges[:most]]
    more = len(ranges) - most
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "") if shown else "–"


def moment_text(at: datetime | None) -> str:
    """A moment as people read it."""
    return "–" if at is None else f"{at:%Y-%m-%d %H:%M:%S %Z}"


def size_text(count: float | None) -> str:
    """A number of bytes as people read it."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def confirm(question: str) -> None:
    """Ask on stderr, and end the command unless the answer is yes; nobody to answer is no."""
    # Not by click, which writes a blank to stdout and ends with code 1.
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    answer = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
    if not (answer and sys.stdin.isatty()):
        # A terminal has shown the end of the line that was typed; nothing else has.
        typer.echo(err=True)
    if answer.strip().lower() not in ("y", "yes"):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(ExitCode.DECLINED)
