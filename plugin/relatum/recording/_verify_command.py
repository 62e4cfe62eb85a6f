"""`relatum verify`: the streams and the table compared in both directions."""

from typing import Annotated

import typer

from relatum.terminal import JsonOption, ServerOptions, console, print_json, spread


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
    repair_rows: Annotated[bool, typer.Option("--repair", help="Say what would mend the differences.")] = False,
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
    from relatum.recording._reports_shown import exit_with, print_verified, verified_document

    address, url = servers.address, servers.database_url
    report = run_verify(address, url, streams or None, sample=sample, seed=seed)
    done = repair(report, url, vhost=address.vhost, dry_run=dry_run) if repair_rows and not report.ok else None
    if as_json:
        document = verified_document(report)
        print_json(document if done is None else {**document, "dry_run": dry_run, "repaired": done})
    else:
        print_verified(report)
        for line in done or ():
            console.print(f"{'would be done' if dry_run else 'done'}: {line}")
    exit_with(report, streams or ())
