"""Output of commands: data goes to stdout; errors and progress go to stderr.

If stdout is not a terminal, tables are tab-separated, and nothing is cut, folded, boxed or coloured: a program may read
the output, or a person on another terminal.
"""

import base64
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from relatum.common.documents import document
from relatum.errors import UndecodableMessage
from relatum_cli.exits import ExitCode

if TYPE_CHECKING:
    from relatum.reading import Message

BODY_CHARACTERS_SHOWN: Final = 80
"""Maximum number of characters of a body in a table; `--json` has the whole body."""

_LINE_BREAKS: Final = str.maketrans({"\t": " ", "\n": " ", "\r": " "})
"""Replaces the characters that separate rows and cells in tab-separated output."""

Cells: TypeAlias = Mapping[str, str | Callable[[Any], Any]]
"""A table's columns: for each heading an attribute's name, or a function of a row."""


class _Console(Console):
    """Prints text without markup and emoji, and with dots for control characters, which can move the cursor."""

    def __init__(self, **options: Any) -> None:
        # https://no-color.org
        options |= {"color_system": None} if os.environ.get("NO_COLOR") else {}
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as `rich.console.Console` does, with dots for control characters."""
        for each in super().render(renderable, options):
            yield each if each.control or each.text.isprintable() else each._replace(text=_printable(each.text))


console: Final = _Console()
errors: Final = _Console(stderr=True)

say = partial(console.print, soft_wrap=True)
"""Print text to stdout. Only the terminal wraps long lines, so that users can copy whole names."""

note = partial(errors.print, soft_wrap=True)
"""Print text to stderr; otherwise like `say`."""


def print_error(message: str) -> None:
    note(f"error: {message}", style="red")


def show(
    found: Iterable[Any],
    columns: Cells | str | Callable[[Any], None],
    *,
    as_json: bool = False,
    empty: str = "",
    whole: Collection[str] = (),
    document_of: Callable[[Any], Any] = document,
    json_lines: bool = False,
    json_value: Any = None,
) -> None:
    """Print a list as JSON, as a table on a terminal, or as tab-separated lines.

    `columns`: A mapping; or attributes' names separated by spaces; or a function that prints a row without a table.
    `empty`: Printed if there are no rows. `whole`: Columns whose cells do not wrap. `document_of`: Converts a row.
    `json_value`: Printed as JSON instead of the list.
    """
    rows = list(found)
    if as_json and json_lines:
        for row in rows:
            print_json(document_of(row), one_line=True)
    elif as_json:
        print_json([document_of(row) for row in rows] if json_value is None else json_value)
    elif empty and not rows:
        say(empty)
    elif callable(columns):
        for row in rows:
            columns(row)
    else:
        named = columns if isinstance(columns, Mapping) else {each.replace("_", " "): each for each in columns.split()}
        cells = [attrgetter(each) if isinstance(each, str) else each for each in named.values()]
        print_table(([cell(row) for cell in cells] for row in rows), named, whole=whole)


def print_table(
    rows: Iterable[Iterable[Any]], columns: Collection[str] = (), *, title: str = "", whole: Collection[str] = ()
) -> None:
    """Print a table. Numbers have thousands separators; long cells wrap, except in the columns `whole`."""
    texts = [[_cell(value) for value in row] for row in rows]
    if title:
        say(title, style="bold")
    if not console.is_terminal:
        # Written without rich, which replaces tabs by spaces.
        for line in ([*columns], *texts) if columns else texts:
            console.file.write("\t".join(_printable(cell.translate(_LINE_BREAKS)) for cell in line) + "\n")
    elif texts or columns:
        headings = columns or [""] * len(texts[0])
        table = Table(
            *(Column(each, overflow="fold", no_wrap=each in whole) for each in headings), show_header=bool(columns)
        )
        for cells in texts:
            table.add_row(*map(Text, cells))
        console.print(table)


def answer(value: Any, *lines: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        say("\n".join(lines))


def print_json(value: Any, *, one_line: bool = False) -> None:
    text = json.dumps(document(value), indent=None if one_line else 2, ensure_ascii=not _is_unicode(sys.stdout))
    # An argument that is not UTF-8 has lone surrogates, which JSON can only escape.
    print(text.encode(errors="backslashreplace").decode(), flush=True)


def with_properties(value: Any, *names: str) -> dict[str, Any]:
    """Return a dataclass as a JSON document, with the named properties in addition to its fields."""
    return {**document(value), **{name: getattr(value, name) for name in names}}


def message_document(message: "Message") -> dict[str, Any]:
    """Return a message as a JSON document, with `body` if the body is UTF-8, else with `body_base64`.

    If the body cannot be unpacked, `body` is None, and `error` is the reason.
    """
    shown = {name: getattr(message, name) for name in ("stream", "offset", "time", "time_source", "headers")}
    shown["properties"] = {name: value for name, value in document(message.properties).items() if value is not None}
    try:
        return shown | {"body": message.body.decode()}
    except UnicodeDecodeError:
        return shown | {"body_base64": base64.b64encode(message.body).decode()}
    except UndecodableMessage as error:
        return shown | {"body": None, "error": str(error)}


def print_messages(messages: "Iterable[Message]") -> None:
    """Print messages as a table; long bodies are cut."""
    columns: Cells = {
        "stream": "stream",
        "offset": "offset",
        "time": lambda message: message.time.isoformat(sep=" ") if message.time else None,
        "headers": lambda message: "\n".join(f"{name}={value}" for name, value in message.headers.items()),
        "body": _body_text,
    }
    show(messages, columns)


def _body_text(message: "Message") -> str:
    try:
        text = message.body.decode("utf-8", "backslashreplace")
    except UndecodableMessage as error:
        return str(error)
    return text if len(text) <= BODY_CHARACTERS_SHOWN else text[: BODY_CHARACTERS_SHOWN - 1] + "…"


def _cell(value: object) -> str:
    if value is None or isinstance(value, datetime):
        return moment_text(value)
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() or each == "\n" else "·" for each in text)


def moment_text(at: datetime | None) -> str:
    """Return a time in UTC: the database returns times in its session's zone."""
    return "–" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S %Z}"


def lease_text(member: Any) -> str:
    """Return when a member's lease expires or has expired."""
    return f"{'until' if member.is_alive else 'expired at'} {moment_text(member.lease_expires_at)}"


def ranges_text(ranges: Sequence[tuple[int, int]], most: int | None = 3) -> str:
    """Return ranges [from, to) as text: the first and the last number of each range."""
    shown = [f"{start:,}" if start == end - 1 else f"{start:,}–{end - 1:,}" for start, end in ranges[:most]]
    more = len(ranges) - len(shown)
    return (", ".join(shown) or "–") + (f" and {more:,} more" if more else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def progress_bars(unit: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a function that updates a named progress bar on stderr, if that is a terminal: name, done, total."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def update(name: str, done: int, total: int | None = None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None)
            bars.update(tasks[name], completed=done, total=total)

        yield update


def confirm(question: str) -> None:
    """Ask a question on stderr, and end the command unless the answer on stdin is yes."""
    # Click's `confirm` would write a blank to stdout, and exit with code 1.
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    reply = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
    if not (reply and sys.stdin.isatty()):
        # End the line: only a terminal echoes the newline that the user types.
        typer.echo(err=True)
    if reply.strip().lower() not in ("y", "yes"):
        typer.echo("nothing was done", err=True)
        raise typer.Exit(ExitCode.DECLINED)


class _Stdout(io.FileIO):
    """The file behind stdout. If a write fails, the command ends with code 13, or 141 if the reader closed the pipe."""

    is_lost = False

    def write(self, data: Any) -> int:
        if self.is_lost:
            return len(data)  # drops output while the interpreter ends
        try:
            return super().write(data)
        except OSError as error:
            self.is_lost = True
            if error.errno == errno.EPIPE:
                raise SystemExit(ExitCode.CLOSED) from None
            print_error(f"stdout cannot be written: {error.strerror}")
            raise SystemExit(ExitCode.OUTPUT) from None


def guard_stdout() -> None:
    """Replace `sys.stdout` by one whose failed writes end the process; see `_Stdout`."""
    original = sys.stdout
    if isinstance(original, io.TextIOWrapper):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(original.fileno(), "w", closefd=False)),
            original.encoding,
            # If the terminal's encoding lacks a character, such as a dash, print a replacement.
            original.errors if _is_unicode(original) else "replace",
            line_buffering=original.line_buffering,
            write_through=original.write_through,
        )


def _is_unicode(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
