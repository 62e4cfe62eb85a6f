"""The command's own small parts: exit codes, log lines, and text on the terminal."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import typer

from relatum import errors
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.outcomes._outcome_command import print_outcomes
from relatum.reading import Message
from relatum.terminal import (
    ExitCode,
    JsonFormatter,
    TextFormatter,
    confirm,
    exit_code_of,
    parse_span,
    print_messages,
    ranges_text,
    size_text,
)


def subclasses(kind: type[errors.RelatumError]) -> Iterator[type[errors.RelatumError]]:
    """All classes below one."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize("kind", sorted(set(subclasses(errors.RelatumError)), key=lambda kind: kind.__name__))
def test_every_error_has_an_exit_code_of_its_own_kind(kind: type[errors.RelatumError]) -> None:
    """No error of Relatum ends as something nobody foresaw, nor as done."""
    assert exit_code_of(kind("what failed")) not in (ExitCode.OK, ExitCode.FAILED)


def test_exit_codes_follow_what_can_be_done() -> None:
    """The leaf decides, not its parent: a database that is away is not a broker that is away."""
    assert exit_code_of(errors.DatabaseUnavailable("")) is ExitCode.DATABASE
    assert exit_code_of(errors.BrokerUnavailable("")) is ExitCode.BROKER
    assert exit_code_of(errors.SchemaMissing("")) is ExitCode.CONFIGURATION
    assert exit_code_of(errors.OffsetExpired("", stream="s", offset=1, first=2)) is ExitCode.NOT_THERE
    assert exit_code_of(errors.KeyDefinitionConflict("", key="k")) is ExitCode.USAGE
    assert exit_code_of(errors.StreamReplaced("", stream="s")) is ExitCode.DIFFERENT


def record(**extra: object) -> logging.LogRecord:
    """A log record with fields of its own and an error."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made = logging.getLogger("relatum.test").makeRecord(
            "relatum.test", logging.INFO, "", 0, "recorded %d", (3,), sys.exc_info(), extra=extra
        )
    return made


def test_json_log_lines_are_one_object_each() -> None:
    """A record, its fields and its traceback are one line of JSON."""
    line = JsonFormatter().format(record(stream="orders", to=7))
    assert "\n" not in line
    document = json.loads(line)
    assert (document["message"], document["level"], document["stream"], document["to"]) == (
        "recorded 3",
        "info",
        "orders",
        7,
    )
    assert "two" in document["error"]


def test_text_log_lines_name_their_fields() -> None:
    """For people, fields follow the message as name=value."""
    assert "recorded 3 stream=orders to=7" in TextFormatter().format(record(stream="orders", to=7)).splitlines()[0]


def test_messages_on_the_terminal_cannot_move_its_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of a body are shown as dots, and markup as it stands there."""
    print_messages([Message.from_record("s", 0, b"\x1b[2J[bold]x\x07", None)])
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
    assert shown.count("s") >= 100
    assert shown.count("x") >= 100


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


@pytest.mark.parametrize("answer", ["n\n", "\n", ""], ids=["no", "default", "nobody"])
def test_a_question_that_is_not_answered_by_yes_ends_the_command_on_a_line_of_its_own(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with the code of that, and says that nothing was done."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(typer.Exit) as ended:
        confirm("Forget it all?")
    assert ended.value.exit_code == ExitCode.DECLINED
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "Forget it all? [y/N]: \nnothing was done\n")


def test_a_question_that_is_answered_by_yes_lets_the_command_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yes, and nothing else, returns."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    confirm("Forget it all?")
