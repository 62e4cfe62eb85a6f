"""`relatum forget`: all that was recorded of streams."""

from typing import Annotated

import typer

from relatum.terminal import BrokerOption, DatabaseOption, JsonOption, confirm, console, print_json, require_database


def forget(
    streams: Annotated[
        list[str], typer.Argument(metavar="STREAM…", help="Streams and super streams.", show_default=False)
    ],
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Only forget which broker they were recorded from.")] = False,
    batch_rows: Annotated[int, typer.Option(help="Rows deleted in one transaction.", min=1, max=1_000_000)] = 10_000,
    broker: BrokerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete all that was recorded of streams, in bounded batches; the streams themselves are left alone.

    It asks first. No broker is asked: `--broker` only tells the virtual host. Stop who records the streams first. Ends
    with code 6 where nothing of a name is recorded, with 7 where somebody still needs a stream; nothing is deleted
    then. `--dry-run` shows the rows of that one, too. One that was killed is finished by repeating it.

    `--origin` deletes nothing, and does not ask: where a broker has taken another one's place, the next recorder takes
    the streams for that broker's, and begins those anew that are not what was recorded.

    `--json` prints one document, the list of streams with the rows of each table, and who needs a stream; it needs
    `--yes` or `--dry-run`.
    """
    from relatum.reading import BrokerAddress
    from relatum.recording import forget as run_forget
    from relatum.recording import forget_origin
    from relatum.recording._forget import check_free

    url = require_database(database)
    vhost = "/" if broker is None else BrokerAddress.parse(broker).vhost
    if origin:
        forgotten = forget_origin(url, streams, vhost=vhost)
        print_json(forgotten) if as_json else console.print(f"Taken for no broker's: {', '.join(forgotten)}.")
        return
    if not (sure or dry_run):
        if as_json:
            raise typer.BadParameter("--json deletes without asking, so it needs --yes")
        found = run_forget(url, streams, vhost=vhost, dry_run=True)
        for each in found:
            check_free(each.stream, each.needed)
        rows = sum(each.total for each in found)
        confirm(f"Forget {', '.join(each.stream for each in found)}: about {rows:,} rows?")
    done = run_forget(url, streams, vhost=vhost, dry_run=dry_run, batch_rows=batch_rows)
    if as_json:
        named = ("stream", "super_stream", "rows", "needed")
        print_json([{name: getattr(each, name) for name in named} for each in done])
    else:
        what = "about {:,} rows would be deleted" if dry_run else "{:,} rows deleted"
        for each in done:
            console.print(f"{each.stream}: {what.format(each.total)}.")
    for each in done:
        check_free(each.stream, each.needed)
