"""`relatum backfill`: what lies in a stream and is not recorded yet, for keys that came later."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from relatum.terminal import JsonOption, ServerOptions, spread, stop_signals

if TYPE_CHECKING:
    from rich.progress import Progress

    from relatum.recording import BackfillProgress


@spread
def backfill(
    stream: Annotated[str, typer.Argument(help="The stream or super stream.", show_default=False)],
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
    """Read a stream again and record what is not recorded yet. Stop it whenever you like: it goes on from there.

    `--json` prints one document, a list of the streams: stream, messages, rows, from_offset, to_offset, seconds.
    """
    from relatum.reading import StreamReader
    from relatum.recording import backfill as run_backfill
    from relatum.recording import offsets_bar, print_backfilled

    address, url = servers.address, servers.database_url
    with StreamReader.open(address) as reader:
        partitions = reader.partitions(stream)
    with stop_signals() as stop, offsets_bar() as bar:
        reports = [
            run_backfill(
                address,
                url,
                name,
                keys=keys or None,
                super_stream=stream if partitions else None,
                progress=_shown(bar, name),
                stop=stop,
            )
            for name in partitions or [stream]
            if not stop.is_set()
        ]
    print_backfilled(reports, as_json=as_json)


def _shown(bar: "Progress", stream: str) -> "Callable[[BackfillProgress], None]":
    """What shows the progress of one stream."""
    task = bar.add_task(stream, total=None)

    def show(progress: "BackfillProgress") -> None:
        whole = progress.to_offset - progress.from_offset
        bar.update(task, total=whole, completed=progress.at_offset - progress.from_offset)

    return show
