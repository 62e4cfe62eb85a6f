"""`relatum backfill`: what lies in a stream and is not recorded yet, for keys that came later."""

from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relatum.command._options import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    StreamUrlOption,
    require_broker,
    require_database,
)
from relatum.command._output import console, errors, print_json
from relatum.command._record import stop_signals
from relatum.reading import BrokerAddress
from relatum.recording import BackfillProgress
from relatum.recording import backfill as run_backfill


def backfill(
    stream: Annotated[str, typer.Argument(help="The stream or super stream.", show_default=False)],
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys", "-k", metavar="NAME", help="Only this key; repeatable. All where left out.", show_default=False
        ),
    ] = None,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read a stream again and record what is not recorded yet. Stop it whenever you like: it goes on from there.

    `--json` prints one document: stream, messages, rows, from_offset, to_offset, seconds.
    """
    address = BrokerAddress.parse(require_broker(broker), stream_url)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("offsets"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with stop_signals() as stop, Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(stream, total=None)

        def show(progress: BackfillProgress) -> None:
            bar.update(
                task,
                description=progress.stream,
                total=progress.to_offset - progress.from_offset,
                completed=progress.at_offset - progress.from_offset,
            )

        report = run_backfill(address, require_database(database), stream, keys=keys or None, progress=show, stop=stop)
    if as_json:
        print_json(
            {
                name: getattr(report, name)
                for name in ("stream", "messages", "rows", "from_offset", "to_offset", "seconds")
            }
        )
        return
    console.print(
        f"{report.stream}: {report.messages:,} messages read again, {report.rows:,} rows written "
        f"in {report.seconds:,.1f} s.",
        markup=False,
    )
