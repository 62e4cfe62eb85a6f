"""`relatum backfill`: what lies in a stream and is not recorded yet, for keys that came later."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relatum.errors import AccessRefused, CoverageConflict, NotFound, RelatumError, StreamNotFound
from relatum.terminal import JsonOption, ServerOptions, console, errors, print_json, spread, stop_signals

if TYPE_CHECKING:
    from rich.progress import Progress

    from relatum.recording import BackfillProgress, BackfillReport


@spread
def backfill(
    streams: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STREAM…]", help="Streams and super streams. All recorded ones where left out.", show_default=False
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys", "-k", metavar="NAME", help="Only this key; repeatable. All where left out.", show_default=False
        ),
    ] = None,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Read streams again and record what is not recorded yet. Stop it whenever you like: it goes on from there.

    Where no stream is named, one that was deleted is passed over, and one that cannot be read, or was replaced, does
    not stop the others: the command ends with its error. `--json` prints one document, a list of the streams: stream,
    messages, rows, from_offset, to_offset, seconds.
    """
    from relatum.reading import StreamReader
    from relatum.recording import backfill as run_backfill
    from relatum.recording._verify import meant_streams
    from relatum.store.database import as_engine

    address, url = servers.address, servers.database_url
    with as_engine(url) as engine, StreamReader.open(address) as reader:
        meant = meant_streams(engine, reader, address.vhost, streams or None)
    failed: list[RelatumError] = []
    reports: list[BackfillReport] = []
    with stop_signals() as stop, _offsets_bar() as bar:
        for name, super_stream in meant:
            if stop.is_set():
                break
            options: dict[str, Any] = {"super_stream": super_stream, "progress": _shown(bar, name), "stop": stop}
            try:
                reports.append(run_backfill(address, url, name, keys=keys or None, **options))
            except StreamNotFound:
                if streams:
                    raise
                errors.print(f"{name}: the broker has no such stream any more", markup=False, soft_wrap=True)
            except (NotFound, AccessRefused, CoverageConflict) as error:
                if streams:
                    raise
                failed.append(error)
    if as_json:
        print_json(reports)
    elif not reports:
        console.print("No stream is recorded yet: relatum record STREAM")
    else:
        for report in reports:
            did = f"{report.messages:,} messages read again, {report.rows:,} rows written"
            console.print(f"{report.stream}: {did} in {report.seconds:,.1f} s.")
    for each in failed[1:]:
        errors.print(str(each), markup=False, soft_wrap=True)
    if failed:
        raise failed[0]


def _shown(bar: "Progress", stream: str) -> "Callable[[BackfillProgress], None]":
    """What shows the progress of one stream."""
    task = bar.add_task(stream, total=None)

    def show(progress: "BackfillProgress") -> None:
        whole = progress.to_offset - progress.from_offset
        bar.update(task, total=whole, completed=progress.at_offset - progress.from_offset)

    return show


def _offsets_bar() -> "Progress":
    """A bar a stream that counts offsets, on stderr; gone at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("offsets")]
    return Progress(*columns, TimeRemainingColumn(), console=errors, transient=True, disable=not errors.is_terminal)
