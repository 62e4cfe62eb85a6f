"""`relatum missing` lists the messages that were not followed in time; `relatum expect` manages expectations."""

import shlex
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import typer

from relatum_cli.exits import ExitCode
from relatum_cli.options import CommandOptions, Commands, Level, ServerOptions, Since, Until, argument, option, span
from relatum_cli.show import answer, counted, moment_text, print_table, say, show
from relatum_consumer import MissingReport, UnmetExpectation
from relatum_consumer.expectations import (
    GRACE_S,
    Expectation,
    add_expectations,
    defined_expectations,
    exact_span,
    remove_expectation,
)

_CODES: Final = {
    "absent": ExitCode.OK,
    "unproven": ExitCode.UNPROVEN,
    "not_recorded_yet": ExitCode.NOT_YET,
    "found": ExitCode.UNSUCCESSFUL,
}
"""The exit code for each status. With several expectations, the last of their codes in this order is used."""

NOTHING_EXPECTED: Final = "No expectation is defined. `relatum expect add NAME` defines one."


def missing(
    *,
    name: str | None = argument("The expectation; all by default.", "[NAME]", default=None),
    since: Since = None,
    until: Until = None,
    limit: int = option(20, "Show at most this many messages of each kind.", "--limit", "-n", min=1),
    timeout: float = option(60.0, "The time limit for each expectation, in seconds.", min=1),
    log_level: Level = None,
    given: CommandOptions,
) -> None:
    """Checks the expectation NAME, or all expectations. Exits with 0 (no message is late or missing), 10 (some are), 8
    (due messages are not recorded yet) or 11 (some cannot be known). Messages that are not due yet do not count.
    `--json` prints one document, a list with a report for each expectation.
    """
    with given.relations(log_level, timeout_s=timeout) as relations:
        names = [each.name for each in relations.expectations()] if name is None else [name]
        reports = [relations.missing(each, since=since, until=until, limit=limit) for each in names]
    show(reports, _print, as_json=given.as_json, empty=NOTHING_EXPECTED)
    codes = [_CODES[report.status] for report in reports]
    raise typer.Exit(max(codes, key=list(_CODES.values()).index, default=ExitCode.OK))


def _print(report: MissingReport) -> None:
    expectation = report.expectation
    say(f"{expectation.name}: {expectation.meaning}")
    found = [*report.late, *report.missing, *report.not_known]
    if found:
        print_table(map(_cells, found), ("", "stream", "offset", expectation.by, "time", "due", "came"))
    say("\n".join(_lines(report)))


def _cells(unmet: UnmetExpectation) -> Iterable[str]:
    word = str(unmet.finding) if unmet.why is None else f"not known: {unmet.why}"
    came = "–" if unmet.came is None else f"{moment_text(unmet.came_at)}, {unmet.came}"
    times = moment_text(unmet.time), moment_text(unmet.due)
    return word.replace("_", " "), unmet.id.stream, str(unmet.id.offset), unmet.value, *times, came


def _lines(report: MissingReport) -> Iterator[str]:
    yield report.words
    counts = f"{counted(report.checked, 'message')}: {report.late_count:,} late, {report.missing_count:,} missing"
    span = f"from {moment_text(report.since)} to {moment_text(report.until)}"
    yield f"{counts}, {report.not_known_count:,} not known ({report.not_due_count:,} not due yet); {span}"
    if report.without_value:
        yield f"{counted(report.without_value, 'more message')} without a value of {report.expectation.by}: not checked"
    if report.unreadable:
        yield f"{report.unreadable:,} batches cannot be unpacked"
    if report.unrecorded_streams:
        names = report.unrecorded_streams
        yield f"no recorder runs for {', '.join(names)}: {shlex.join(['relatum', 'record', *names])}"


expect = Commands()

WITHIN: Final = "The time limit for the following message: seconds, or 90s, 15m, 6h, 2d."

Name = Annotated[str, argument("The expectation's name.")]


@expect.command("add")
def add(
    *,
    name: Name,
    of: str = option(..., "The stream or super stream whose messages must be followed.", metavar="STREAM"),
    by: str = option(..., "The key whose value both messages share.", metavar="KEY"),
    follows: str = option(..., "The stream or super stream of the following messages.", metavar="STREAM"),
    within: float = span(..., WITHIN),
    grace: float = span(f"{GRACE_S:g}s", "By how much clocks may differ."),
    given: CommandOptions,
) -> None:
    """Define an expectation: each message of a stream must be followed in time by another with the same key's value.

    An identical expectation that is already defined stays. `--json` prints one document: the expectation.
    """
    wanted = Expectation(name, of=of, by=by, follows=follows, within_s=within, grace_s=grace)
    add_expectations(given.database_url, wanted, vhost=given.vhost)
    answer(wanted, f"{name}: {wanted.meaning}", as_json=given.as_json)


@expect.command("list")
def list_expectations(*, given: CommandOptions) -> None:
    """List the expectations of the broker's virtual host. `--json` prints one document, the list."""
    found = defined_expectations(given.database_url, vhost=given.vhost)
    names = {name: name for name in ("name", "of", "by", "follows")}
    times = {"within": lambda each: exact_span(each.within_s), "clocks": lambda each: f"± {exact_span(each.grace_s)}"}
    show(found, {**names, **times}, as_json=given.as_json, empty=NOTHING_EXPECTED)


@expect.command("remove")
def remove(*, name: Name, servers: ServerOptions) -> None:
    """Remove an expectation. Exits with code 6 if no expectation of that name is defined."""
    remove_expectation(servers.database_url, name, vhost=servers.vhost)
    say(f"{name} is removed.")
