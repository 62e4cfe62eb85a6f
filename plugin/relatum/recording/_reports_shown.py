"""What back-fills and comparisons found, on the terminal and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from relatum.recording import BackfillReport, StreamVerified, VerifyReport
from relatum.terminal import ExitCode, console, errors, print_json

DIFFERENCES_SHOWN: Final = 20
"""Differing rows shown for each stream."""


def offsets_bar() -> Progress:
    """A bar a stream that counts offsets, on stderr; gone at the end."""
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("offsets")]
    return Progress(*columns, TimeRemainingColumn(), console=errors, transient=True, disable=not errors.is_terminal)


def print_backfilled(reports: Sequence[BackfillReport], *, as_json: bool) -> None:
    """Print what was recorded of each stream."""
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    for report in reports:
        console.print(
            f"{report.stream}: {report.messages:,} messages read again, {report.rows:,} rows written "
            f"in {report.seconds:,.1f} s.",
        )


def verified_document(report: VerifyReport) -> dict[str, Any]:
    """A comparison for `--json`."""
    streams = [asdict(stream) for stream in report.streams]
    document = {"ok": report.ok, "exact": report.exact, "seed": report.seed, "streams": streams}
    return document | {"failed": {name: str(error) for name, error in report.failed.items()}}


def exit_with(report: VerifyReport, names: Sequence[str]) -> None:
    """End with the code of what was found: different, a stream that cannot be read, or one that was never recorded."""
    if any(stream.difference_count for stream in report.streams):
        raise typer.Exit(ExitCode.DIFFERENT)
    for error in report.failed.values():
        raise error
    recorded = {name for each in report.streams if each.is_recorded for name in (each.stream, each.super_stream)}
    if not recorded.issuperset(names):
        raise typer.Exit(ExitCode.NOT_THERE)


def print_verified(report: VerifyReport) -> None:
    """Print a comparison for people."""
    for stream in report.streams:
        found = f"{stream.difference_count:,} differences" if stream.difference_count else "no difference"
        if not stream.stream:
            line = f"Rows of no stream: {found}."
        elif not stream.is_recorded and not stream.difference_count:
            line = f"{stream.stream}: never recorded, nothing to compare."
        else:
            how = "every recorded message"
            if not report.exact:
                how = f"a sample, {stream.windows:,} of {stream.windows_total:,} windows (--seed {report.seed}),"
            line = f"{stream.stream}: {how} compared, {stream.messages:,} messages, {stream.rows:,} rows: {found}."
        console.print(line)
        if stream.differences:
            _print_differences(stream)
        for what in stream.unproven:
            console.print(f"{stream.stream}: {what}.")
    for name, error in report.failed.items():
        errors.print(f"{name}: not compared: {error}")


def _print_differences(stream: StreamVerified) -> None:
    kinds = Counter(each.kind for each in stream.differences)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    console.print(f"{stream.stream or 'rows of no stream'}: {shown}")
    table = Table("kind", "table", "offset", "key", "value", "time (µs)")
    for each in stream.differences[:DIFFERENCES_SHOWN]:
        time_us = "–" if each.time_us is None else str(each.time_us)
        place = f"{each.offset:,}" if each.to_offset is None else f"{each.offset:,} to {each.to_offset - 1:,}"
        value = each.value or each.detail
        table.add_row(*(Text(cell) for cell in (each.kind, each.table, place, each.key, value, time_us)))
    console.print(table)
    if stream.difference_count > DIFFERENCES_SHOWN:
        console.print(f"and {stream.difference_count - DIFFERENCES_SHOWN:,} more; --json lists up to 1,000 a stream.")
