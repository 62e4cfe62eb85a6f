"""`relatum missing`: the messages that nothing has followed in time."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from relatum import metrics
from relatum.terminal import (
    ExitCode,
    JsonOption,
    LogLevel,
    ServerOptions,
    SinceOption,
    UntilOption,
    console,
    moment_text,
    plain_text,
    print_json,
    spread,
)
from relatum_consumer.command import LogLevelOption, open_relations

if TYPE_CHECKING:
    from relatum_consumer import MissingReport, Relations, UnmetExpectation

__all__ = ["missing"]

_CODES: Final = {
    "absent": ExitCode.OK,
    "unproven": ExitCode.UNPROVEN,
    "not_recorded_yet": ExitCode.NOT_YET,
    "found": ExitCode.UNSUCCESSFUL,
}
"""What it ends with, and of several expectations the last of these that one has."""


@spread
def missing(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The expectation; all of them where left out.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Show at most so many of each kind.", min=1)] = 20,
    timeout: Annotated[
        float, typer.Option(help="Seconds for each expectation; what is much takes longer.", min=1)
    ] = 60.0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on, and tell of each as soon as it is late or missing.")
    ] = False,
    metrics_port: Annotated[
        int,
        typer.Option(help="With --follow: serve Prometheus metrics on this port; 0 does not.", min=0, max=65535),
    ] = 0,
    metrics_host: Annotated[str, typer.Option(help="The address the metrics are served on.")] = "127.0.0.1",
    log_level: LogLevelOption = None,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """List the messages that nothing has followed in time, as the expectation NAME has it; or all expectations.

    Ends with 0 (nothing is missing or late), 10 (something is), 8 (a recorder is behind with what was due) or 11 (a
    part of it can never be known); messages that are not due yet change nothing. `--follow` goes on until Ctrl-C.
    `--json` prints one document, a list with a report for each expectation; with `--follow` JSON lines, one message
    each.
    """
    if follow and (name is None or until is not None):
        raise typer.BadParameter("--follow takes the NAME of one expectation, and no --until")
    if metrics_port and not follow:
        raise typer.BadParameter("--metrics-port is for --follow")
    if follow:
        # What is away, and that it is back, is said on stderr.
        log_level = log_level or LogLevel.INFO
    with open_relations(servers, log_level, timeout_s=timeout) as relations:
        if follow and name is not None:
            if metrics_port:
                metrics.serve(metrics_port, metrics_host)
            _follow(relations, name, since, as_json)
            return
        names = [each.name for each in relations.expectations()] if name is None else [name]
        reports = [relations.missing(each, since=since, until=until, limit=limit) for each in names]
    if as_json:
        print_json(reports)
    else:
        _print(reports)
    code = max((_CODES[report.status] for report in reports), key=list(_CODES.values()).index, default=ExitCode.OK)
    if code:
        raise typer.Exit(code)


def _follow(relations: "Relations", name: str, since: datetime | None, as_json: bool) -> None:
    with closing(relations.watch_missing(name, since=since)) as found:
        for unmet in found:
            if as_json:
                print_json(unmet, one_line=True)
            else:
                console.print(plain_text(" ".join(_cells(unmet))))


# --- as people read it ------------------------------------------------------------------------------------


def _print(reports: Sequence["MissingReport"]) -> None:
    if not reports:
        console.print("Nothing is expected. `relatum expect add NAME` says what is.")
    for report in reports:
        expectation = report.expectation
        console.print(plain_text(f"{expectation.name}: {expectation.meaning}"))
        found = [*report.late, *report.missing, *report.not_known]
        if found:
            table = Table("", "stream", "offset", expectation.by, "time", "due", "came")
            for unmet in found:
                table.add_row(*(plain_text(cell) for cell in _cells(unmet)))
            console.print(table)
        for line in _lines(report):
            console.print(Text(line))


def _cells(unmet: "UnmetExpectation") -> Iterable[str]:
    word = str(unmet.finding) if unmet.why is None else f"not known: {unmet.why}"
    came = "–" if unmet.came is None else f"{moment_text(unmet.came_at)}, {unmet.came}"
    times = moment_text(unmet.time), moment_text(unmet.due)
    return word.replace("_", " "), unmet.id.stream, str(unmet.id.offset), unmet.value, *times, came


def _lines(report: "MissingReport") -> Iterable[str]:
    yield report.words
    counts = f"{report.checked:,} messages: {report.late_count:,} late, {report.missing_count:,} missing"
    span = f"from {moment_text(report.since)} to {moment_text(report.until)}"
    yield f"{counts}, {report.not_known_count:,} not known (yet); {span}"
    if report.without_value:
        yield f"{report.without_value:,} more have no value of {report.expectation.by}: nothing is expected of them"
    if report.unreadable:
        yield f"{report.unreadable:,} batches cannot be unpacked"
    if report.unrecorded_streams:
        names = report.unrecorded_streams
        yield f"nobody records {', '.join(names)}: relatum record {' '.join(names)}"
