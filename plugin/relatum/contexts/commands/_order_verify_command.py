"""`relatum contexts verify`: the order of contexts, read out of the streams."""

from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.progress import Progress, TextColumn
from rich.text import Text

from relatum.contexts import SerialReport
from relatum.contexts import verify as run_verify
from relatum.contexts.commands._contexts_options import ContextsOptions
from relatum.terminal import (
    ExitCode,
    SuperStreamArgument,
    console,
    errors,
    print_json,
    spread,
    table_of,
)

FINDINGS_SHOWN: Final = 20
"""Findings shown on the terminal."""

HeaderOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default=False,
        help="The header that names contexts; by default the database's word for it, or serialization_context.",
    ),
]


@spread
def verify(
    super_stream: SuperStreamArgument,
    header: HeaderOption = None,
    *,
    given: ContextsOptions,
) -> None:
    """Read all partitions and check: each context's messages count once, in the order in which they were published.

    Without a database the streams are read alone: partitions that were retired are left out, and where retention has
    dropped fences, what they made strays seems to count. Ends with code 7 where the order is broken. Strays that nobody
    adopted are shown and break nothing. `--json` prints one document: ok, what was
    counted, partitions (from and to offset), counts by kind, findings.
    """
    url = given.broker_url
    with Progress(TextColumn("{task.fields[read]:,} messages"), console=errors, transient=True) as bar:
        task = bar.add_task("", total=None, read=0)
        report = run_verify(
            super_stream,
            broker=url,
            database=given.database,
            stream_url=given.stream_url,
            header=header,
            progress=lambda report: bar.update(task, read=report.messages),
        )
    if given.as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(ExitCode.DIFFERENT)


def _print(report: SerialReport) -> None:
    broken = sum(count for kind, count in report.counts.items() if not kind.is_notice)
    console.print(
        f"{report.super_stream}: {report.messages:,} messages of {report.contexts:,} contexts in "
        f"{len(report.partitions)} partitions, {report.moves:,} moves, {report.strays:,} strays "
        f"({report.adopted:,} adopted): {f'{broken:,} faults' if broken else 'in order'}.",
    )
    if report.unplaced:
        console.print(f"{report.unplaced:,} of the messages were published by no router: they have no order.")
    if not report.findings:
        return
    table = table_of("what", "partition", "offset", "context", "found")
    for each in sorted(report.findings, key=lambda each: each.kind.is_notice)[:FINDINGS_SHOWN]:
        table.add_row(
            *(Text(cell) for cell in (each.kind, each.stream, f"{each.offset:,}", each.context or "–", each.text))
        )
    console.print(table)
    more = sum(report.counts.values()) - FINDINGS_SHOWN
    if more > 0:
        console.print(f"and {more:,} more; --json lists up to 1,000 of a kind.")
