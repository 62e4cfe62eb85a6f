"""What commands say on the terminal: exit codes, log lines, questions, tables, names of others, and their own list."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from relatum import errors, terminal
from relatum.command import complete_app
from relatum.command._command_list import HELP
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.outcomes._outcome_command import print_outcomes
from relatum.reading import Message
from relatum.terminal import ExitCode, JsonFormatter, TextFormatter, exit_code_of, parse_span, ranges_text, size_text

DOCUMENT = Path(__file__).parents[2] / "docs" / "commands.md"


def subclasses(kind: type[errors.RelatumError]) -> Iterator[type[errors.RelatumError]]:
    """All classes below one."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_has_the_exit_code_of_what_can_be_done() -> None:
    """Never that of success or of the unforeseen; the leaf decides: no database is another code than no broker."""
    for kind in subclasses(errors.RelatumError):
        assert exit_code_of(kind("what failed")) not in (ExitCode.OK, ExitCode.FAILED), kind
    assert exit_code_of(errors.DatabaseUnavailable("")) is ExitCode.DATABASE
    assert exit_code_of(errors.BrokerUnavailable("")) is ExitCode.BROKER
    assert exit_code_of(errors.SchemaMissing("")) is ExitCode.CONFIGURATION
    assert exit_code_of(errors.OffsetExpired("", stream="s", offset=1, first=2)) is ExitCode.NOT_THERE
    assert exit_code_of(errors.KeyDefinitionConflict("", key="k")) is ExitCode.USAGE
    assert exit_code_of(errors.StreamReplaced("", stream="s")) is ExitCode.DIFFERENT


def test_exit_codes_are_documented_as_they_are() -> None:
    """The table in docs/commands.md has each exit code, once, and no other."""
    rows = (line.split("|") for line in DOCUMENT.read_text().splitlines())
    codes = [int(cells[1]) for cells in rows if len(cells) > 2 and cells[1].strip().isdecimal()]
    assert codes == sorted(int(code) for code in ExitCode)


def test_a_log_line_has_its_fields_and_its_error() -> None:
    """As JSON one object in one line, for people `name=value` behind the message."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        fields, error = {"stream": "orders", "to": 7}, sys.exc_info()
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "", 0, "recorded %d", (3,), error, extra=fields)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document = json.loads(line)
    assert "two" in document["error"]
    assert document | fields | {"message": "recorded 3", "level": "info"} == document
    assert "recorded 3 stream=orders to=7" in TextFormatter().format(record).splitlines()[0]


def test_messages_on_the_terminal_cannot_move_its_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of a body are shown as dots, and markup is shown as text."""
    terminal.print_messages([Message.from_record("s", 0, b"\x1b[2J[bold]x\x07", None)])
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "[bold]x" in shown


def test_outcomes_fit_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns ids are whole, nothing is cut, and what a message says cannot move the cursor."""
    monkeypatch.setenv("COLUMNS", "80")
    long_id = "0193-" * 20 + "\x1b[2J"
    taken = Outcome(long_id, OutcomeStatus.DEAD, "billing", "order", "s" * 100, 7, 3, "ValueError: " + "x" * 100)
    print_outcomes([replace(taken, others=(Outcome("unknown-one", OutcomeStatus.UNKNOWN),))])
    shown = capsys.readouterr().out
    assert "0193-" * 20 + "·[2J: dead" in shown
    assert "unknown-one: unknown" in shown
    assert "…" not in shown
    assert min(shown.count("s"), shown.count("x")) >= 100


def test_ranges_and_sizes_are_shown_as_people_read_them() -> None:
    """A range's end is its last offset; long lists are cut."""
    assert ranges_text([(0, 1000)]) == "0–999"
    assert ranges_text([]) == "–"
    assert ranges_text([(n, n + 1) for n in range(5)]) == "0–0, 1–1, 2–2 and 2 more"
    assert [size_text(size) for size in (None, 0, 999, 1500, 2_500_000)] == ["–", "0 B", "999 B", "1.5 kB", "2.5 MB"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("6h", 21_600), ("2d", 172_800)],
)
def test_spans_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    """A number is seconds; s, m, h and d are what they are everywhere."""
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "1w", "1 h", "inf", "nan", "1e9", "99999999999d"])
def test_what_is_no_span_is_refused(text: str) -> None:
    """One clear error of usage."""
    with pytest.raises(typer.BadParameter):
        parse_span(text)


@pytest.mark.parametrize("answer", ["y\n", "n\n", "\n", ""], ids=["yes", "no", "default", "nobody"])
def test_only_yes_lets_a_command_go_on(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other answer ends it with a code of its own, and it says that nothing was done."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    if answer == "y\n":
        terminal.confirm("Forget it all?")
        return
    with pytest.raises(typer.Exit) as ended:
        terminal.confirm("Forget it all?")
    assert ended.value.exit_code == ExitCode.DECLINED
    assert tuple(capsys.readouterr()) == ("", "Forget it all? [y/N]: \nnothing was done\n")


# --- tables -----------------------------------------------------------------------------------------------


def printed(*what: object, **options: Any) -> str:
    """What Relatum's console prints, into a pipe unless the options say otherwise."""
    out = io.StringIO()
    type(terminal.console)(file=out, **({"width": 100} | options)).print(*what)
    return out.getvalue()


def test_names_are_never_cut_off() -> None:
    """A long name goes on in the next line; what is short stays whole."""
    table = terminal.table_of("from", "to", "state", whole=("state",))
    table.add_row("orders-of-last-year-0", "orders-of-last-year-1", "switched")
    out = io.StringIO()
    Console(file=out, width=36).print(table)
    assert "…" not in out.getvalue()
    assert "switched" in out.getvalue()
    rows = [line.split("│")[1:4] for line in out.getvalue().splitlines() if line.startswith("│")]
    joined = ["".join(row[column].strip() for row in rows) for column in (0, 1)]
    assert joined == ["orders-of-last-year-0", "orders-of-last-year-1"]


def test_a_piped_table_is_tab_separated_and_whole() -> None:
    """Where stdout is no terminal, a row is a line, without boxes, cut cells or markup; without rows a header is left.

    A quiet console prints no table: where a command prints one JSON document, nothing stands before it.
    """
    table = terminal.table_of("stream", "body")
    assert printed(table).splitlines() == ["stream\tbody"]
    table.title = Text("what was found", style="bold")
    long = "x" * 300
    table.add_row("orders", Text(f"[red]{long}"))
    table.add_row("a name", Text("two\nlines\tand a tab"))
    lines = ["what was found", "stream\tbody", f"orders\t[red]{long}", "a name\ttwo lines and a tab"]
    assert printed(table).splitlines() == lines
    assert printed("word " * 60).splitlines() == ["word " * 60]
    assert not printed(table, quiet=True)


@pytest.mark.parametrize(("no_color", "is_plain"), [("1", True), ("", False)])
def test_no_color_leaves_no_escape_sequences(no_color: str, is_plain: bool) -> None:
    """With NO_COLOR set, neither colours nor bold type are printed, also on a terminal."""
    program = "from relatum.terminal import console; console.print('x', style='bold')"
    environment = {**os.environ, "NO_COLOR": no_color, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert (b"\x1b" not in done.stdout) == is_plain


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_of_others_are_shown_as_they_are(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """In lines, tables and errors, as text or as rich's: no markup, no emoji, no control characters."""
    hostile, escapes, harmless = "[bold]a[/bold] :warning: b", "\x1b[2Jred\x9b", "·[2Jred·"
    table = terminal.table_of("name")
    for cell in (hostile, escapes, Text(hostile), Text(escapes)):
        table.add_row(cell)
    options = {"force_terminal": is_terminal, "color_system": None}
    shown = printed(hostile, escapes, **options) + printed(table, **options)
    assert shown.count(hostile) == shown.count(harmless) == 3
    assert not {"\x1b", "\x9b"} & set(shown)
    terminal.errors.print(f"{hostile} {escapes}", soft_wrap=True)
    assert capsys.readouterr().err == f"{hostile} {harmless}\n"


# --- the list of commands --------------------------------------------------------------------------------

POINTS = {point.name: point for point in entry_points(group="relatum.commands")}


def test_the_list_says_what_the_commands_say() -> None:
    """Each command that is installed is in it, with the first paragraph of its own help, and nothing else is."""
    said = {}
    for name, point in POINTS.items():
        command = point.load()
        help_ = command.info.help if isinstance(command, typer.Typer) else command.__doc__
        said[name] = " ".join(help_.strip().split("\n\n")[0].split())
    assert said == HELP


NEEDLESS = "sqlalchemy,pyspark,pandas,aio_pika,alembic"
NAMED = "print(*(needless & set(sys.modules)), file=sys.stderr)"
RUN = f"from relatum.command import main\ntry:\n    main()\nfinally:\n    {NAMED}"
LOAD = (
    "from importlib.metadata import entry_points\nfor point in entry_points(group='relatum.commands'):\n"
    "    if point.name in ('backfill', 'forget', 'keys', 'record', 'verify'):\n        point.load()\n"
    f"{NAMED}"
)


@pytest.mark.parametrize(
    ("program", "arguments", "needless"),
    [
        (RUN, ["--help"], f"{NEEDLESS},pika,relatum.reading"),
        (RUN, ["--version"], f"{NEEDLESS},pika,relatum.reading"),
        (RUN, ["read", "--help"], NEEDLESS),
        (LOAD, [], "sqlalchemy,psycopg,pika,relatum.reading,relatum.store"),
    ],
    ids=["help", "version", "read", "commands of recording"],
)
def test_a_command_imports_what_it_needs_and_no_more(program: str, arguments: list[str], needless: str) -> None:
    """Lists and helps start without a client of either server; what a command is made of is imported as it runs."""
    words = [sys.executable, "-c", f"import sys\nneedless = set(sys.argv.pop().split(','))\n{program}"]
    ended = subprocess.run([*words, *arguments, needless], capture_output=True, text=True, timeout=90, check=True)
    assert ended.stderr.strip() == ""


def test_a_name_that_is_misspelt_is_an_error_of_use() -> None:
    """What is no command ends with the code of wrong usage, and names what is alike."""
    ended = CliRunner().invoke(complete_app(), ["super-streams"])
    assert ended.exit_code == ExitCode.USAGE
    assert "super-stream" in ended.output


def test_a_command_that_cannot_be_imported_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of another package that lacks something is named, and the list goes on."""
    package = tmp_path / "elsewhere-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[relatum.commands]\nbroken = elsewhere.command:broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    listed = CliRunner().invoke(complete_app(), ["--help"])
    assert listed.exit_code == ExitCode.OK
    assert "record" in listed.stdout
    assert "the command 'broken' cannot be loaded: No module named 'elsewhere'" in capfd.readouterr().err
