"""`relatum verify`: the streams and the table compared in both directions."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from relatum.terminal import ExitCode, JsonOption, ServerOptions, console, errors, print_json, spread

if TYPE_CHECKING:
    from relatum.recording import StreamVerified, VerifyReport

DIFFERENCES_SHOWN: Final = 20
"""Differing rows shown for each stream."""


@spread
def verify(
    streams: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STREAM…]", help="Streams and super streams; all that are recorded where left out."),
    ] = None,
    sample: Annotated[
        float | None,
        typer.Option(
            help="Compare this share of each stream only, 0 to 1, a window at least; all of it where left out.",
            min=0,
            max=1,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --sample: choose the same sample again.", show_default=False)
    ] = None,
    repair_rows: Annotated[bool, typer.Option("--repair", help="Say what would be recorded again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="With --repair: only say it, or do it.")
    ] = True,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Read the streams and compare: every message's keys have their rows, every row's message has that key.

    Ends with code 7 where they differ, also after a repair: verify again; with 6 where a stream that is named was never
    recorded, with 3 where all are meant and none is recorded. One
    that cannot be read stops no other: it is named, and the command ends with the code of that.
    `--json` prints one document: ok, exact, seed, streams (each with its differences), and with --repair dry_run and
    repaired (what was or would be done).
    """
    from relatum.recording import repair
    from relatum.recording import verify as run_verify

    address, url = servers.address, servers.database_url
    report = run_verify(address, url, streams or None, sample=sample, seed=seed)
    done = repair(report, url, vhost=address.vhost, dry_run=dry_run) if repair_rows and not report.ok else None
    if as_json:
        document: dict[str, Any] = {"ok": report.ok, "exact": report.exact, "seed": report.seed}
        document["streams"] = report.streams
        document["failed"] = {name: str(error) for name, error in report.failed.items()}
        print_json(document if done is None else {**document, "dry_run": dry_run, "repaired": done})
    else:
        _print_verified(report)
        for line in done or ():
            console.print(f"{'would be done' if dry_run else 'done'}: {line}")
    _exit_with(report, streams or ())


def _exit_with(report: "VerifyReport", names: Sequence[str]) -> None:
    """End with the code of what was found: different, a stream that cannot be read, or one that was never recorded."""
    if any(stream.difference_count for stream in report.streams):
        raise typer.Exit(ExitCode.DIFFERENT)
    for error in report.failed.values():
        raise error
    recorded = {name for each in report.streams if each.is_recorded for name in (each.stream, each.super_stream)}
    if not recorded.issuperset(names):
        raise typer.Exit(ExitCode.NOT_THERE)


def _print_verified(report: "VerifyReport") -> None:
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


def _print_differences(stream: "StreamVerified") -> None:
    kinds = Counter(each.kind for each in stream.differences)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    console.print(f"{stream.stream or 'rows of no stream'}: {shown}")
    # Imported where something is shown: a command's help needs none of it.
    from rich.table import Table
    from rich.text import Text

    table = Table("kind", "table", "offset", "key", "value", "time (µs)")
    for each in stream.differences[:DIFFERENCES_SHOWN]:
        time_us = "–" if each.time_us is None else str(each.time_us)
        place = f"{each.offset:,}" if each.to_offset is None else f"{each.offset:,} to {each.to_offset - 1:,}"
        value = each.value or each.detail
        table.add_row(*(Text(cell) for cell in (each.kind, each.table, place, each.key, value, time_us)))
    console.print(table)
    if stream.difference_count > DIFFERENCES_SHOWN:
        console.print(f"and {stream.difference_count - DIFFERENCES_SHOWN:,} more; --json lists up to 1,000 a stream.")
