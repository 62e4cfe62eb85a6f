"""`relatum prune`: rows of messages that the streams have dropped."""

from typing import Annotated

import typer

from relatum.collecting import forget_finished
from relatum.contexts import forget_placements
from relatum.recording import prune as run_prune
from relatum.store.database import as_engine
from relatum.terminal import JsonOption, ServerOptions, console, errors, print_json, spread


@spread
def prune(
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="[STREAM…]", help="Streams and super streams; all where left out.")
    ] = None,
    batch_rows: Annotated[int, typer.Option(help="Rows deleted in one transaction.", min=1, max=1_000_000)] = 10_000,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Delete the rows of messages that retention has dropped, and those of removed keys, in bounded batches.

    Without names also what is over in no stream: messages that collectors finished, sets that were released, moves.

    A stream that cannot be read is named and stops no other; the command then ends with the code of that error. A name
    that is not recorded ends it with code 6, before anything is deleted.

    `--json` prints one document: rows deleted by stream; "" stands for what belongs to no recorded stream.
    """
    address = servers.address
    report = run_prune(address, servers.database_url, streams or None, batch_rows=batch_rows)
    if not streams:
        with as_engine(servers.database_url) as engine:
            forgotten = forget_finished(engine, batch_rows=batch_rows, seconds=None)
            forgotten += forget_placements(engine, address, batch_rows=batch_rows)
        if forgotten:
            report.rows[""] += forgotten
    if as_json:
        print_json(dict(report.rows))
    else:
        for stream, rows in report.rows.items():
            what = stream or "removed keys, replaced streams, and what is over"
            console.print(f"{what}: {rows:,} rows deleted.")
        if not report.total:
            console.print("Nothing to delete.")
    for stream, error in report.failed.items():
        errors.print(f"{stream}: not pruned: {error}")
    for error in report.failed.values():
        raise error
