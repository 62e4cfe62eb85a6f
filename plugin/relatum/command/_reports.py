"""What back-fills and comparisons found, on the terminal and as JSON: the same from one process and from Spark."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from relatum.command._output import console, errors, print_json
from relatum.recording import BackfillReport, StreamVerified, VerifyReport

DIFFERENCES_SHOWN: Final = 20
"""Differing rows shown for each stream."""


def offsets_bar() -> Progress:
    """A bar a stream that counts offsets, on stderr; gone at the end."""
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("offsets")]
    return Progress(*columns, TimeRemainingColumn(), console=errors, transient=True)


def print_backfilled(reports: Sequence[BackfillReport], *, as_json: bool) -> None:
    """Print what was recorded of each stream."""
    if as_json:
        print_json([asdict(report) for report in reports])
        return
    for report in reports:
        console.print(
            f"{report.stream}: {report.messages:,} messages read again, {report.rows:,} rows written "
            f"in {report.seconds:,.1f} s.",
            markup=False,
        )


def verified_document(report: VerifyReport) -> dict[str, Any]:
    """A comparison for `--json`."""
    return {"ok": report.ok, "exact": report.exact, "streams": [asdict(stream) for stream in report.streams]}


def print_verified(report: VerifyReport) -> None:
    """Print a comparison for people."""
    how = "every recorded message" if report.exact else "a sample"
    for stream in report.streams:
        found = f"{stream.difference_count:,} differences" if stream.difference_count else "no difference"
        console.print(
            f"{stream.stream}: {how} compared, {stream.messages:,} messages, {stream.rows:,} rows: {found}.",
            markup=False,
        )
        if stream.differences:
            _print_differences(stream)


def _print_differences(stream: StreamVerified) -> None:
    table = Table("kind", "offset", "key", "value", "time (µs)")
    for each in stream.differences[:DIFFERENCES_SHOWN]:
        time_us = "–" if each.time_us is None else str(each.time_us)
        table.add_row(*(Text(cell) for cell in (each.kind, f"{each.offset:,}", each.key, each.value, time_us)))
    console.print(table)
    if stream.difference_count > DIFFERENCES_SHOWN:
        console.print(f"and {stream.difference_count - DIFFERENCES_SHOWN:,} more; --json lists up to 1,000 a stream.")
