"""`relatum contexts`: where the serialization contexts of a super stream are, and all that is done with them."""

from dataclasses import asdict
from itertools import islice
from typing import Annotated, Final

import typer
from rich.progress import Progress, TextColumn

from relatum.contexts import Assignment, HoldStatus, SerialReport, SerialStatus, forget_consumer
from relatum.contexts import consumers as read_consumers
from relatum.contexts import verify as run_verify
from relatum.contexts.commands import _moves_command as moving
from relatum.contexts.commands._contexts_shown import (
    ContextsOptions,
    move_document,
    print_moves,
    print_rows,
    print_status,
    status_document,
)
from relatum.reading import BrokerAddress
from relatum.superstreams import describe_super_stream
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    ExitCode,
    SuperStreamArgument,
    console,
    errors,
    print_error,
    print_json,
    require_database,
    spread,
)

contexts = typer.Typer(
    help="Place serialization contexts, move them between partitions in order, and verify it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

LIST_MAX: Final = 1_000
"""Contexts listed unless more are asked for."""

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


@contexts.command("status")
@spread
def status(
    super_stream: SuperStreamArgument,
    *,
    given: ContextsOptions,
) -> None:
    """Show the partitions with their contexts, and the moves under way. `--json` prints one document."""
    with given.looked_at(super_stream) as opened:
        found = opened.status()
    if given.as_json:
        print_json(status_document(found))
    else:
        print_status(found)


@contexts.command("list")
@spread
def list_contexts(
    super_stream: SuperStreamArgument,
    partition: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Only contexts in this partition.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = LIST_MAX,
    *,
    given: ContextsOptions,
) -> None:
    """List contexts by name, each with its partition. `--json` prints JSON lines."""
    with given.looked_at(super_stream) as opened:
        _print_assignments(list(islice(opened.assignments(partition), limit)), as_json=given.as_json)


@contexts.command("show")
@spread
def show(
    super_stream: SuperStreamArgument,
    names: Annotated[list[str], typer.Argument(metavar="CONTEXT…", help="The contexts' names.", show_default=False)],
    *,
    given: ContextsOptions,
) -> None:
    """Show where contexts are. Ends with code 6 where one is nowhere. `--json` prints JSON lines."""
    with given.looked_at(super_stream) as opened:
        _print_assignments([opened.assignment_of(name) for name in names], as_json=given.as_json)


@contexts.command("assign")
@spread
def assign(
    super_stream: SuperStreamArgument,
    to: moving.ToOption,
    names: Annotated[list[str], typer.Argument(metavar="CONTEXT…", help="The contexts' names.", show_default=False)],
    *,
    given: ContextsOptions,
) -> None:
    """Assign contexts to a partition before their first messages. Those in another are not moved by it: code 7.

    `--json` prints JSON lines.
    """
    with given.contexts(super_stream) as opened:
        _print_assignments(opened.assign(names, to), as_json=given.as_json)


@contexts.command("moves")
@spread
def moves(
    super_stream: SuperStreamArgument,
    latest: Annotated[
        int | None,
        typer.Option(min=1, help="The latest of all moves, so many, ended ones included.", show_default=False),
    ] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Show the moves that have not ended, and whether somebody goes on with each. `--json` prints one document."""
    with given.looked_at(super_stream) as opened:
        found = opened.moves(latest=latest)
    if given.as_json:
        print_json([move_document(move) for move in found])
    elif found:
        print_moves(found)
    else:
        console.print("No move is under way.")


@contexts.command("consumers")
@spread
def consumers(
    super_stream: SuperStreamArgument,
    *,
    given: ContextsOptions,
) -> None:
    """Show how far each serial consumer is in each partition, and what it holds back until a source is consumed.

    `--json` prints JSON lines: consumer, lag, and its partitions with their holds.
    """
    url = given.broker_url
    found = read_consumers(super_stream, database=given.database_url, broker=url, stream_url=given.stream_url)
    if not found:
        # Nobody consumes what is not there, either: a name that is spelled wrong is an error.
        describe_super_stream(url, super_stream, stream_url=given.stream_url)
    if given.as_json:
        for name, status in found.items():
            partitions = [asdict(partition) for partition in status.partitions]
            print_json({"consumer": name, "lag": status.lag, "partitions": partitions}, one_line=True)
    elif found:
        _print_consumers(found)
    else:
        console.print("Nobody consumes it in order.")


@contexts.command("forget")
def forget(
    super_stream: SuperStreamArgument,
    name: Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.", show_default=False)],
    broker: BrokerOption = None,
    database: DatabaseOption = None,
) -> None:
    """Forget a name that nobody consumes by any more, so that partitions can be retired without it.

    Ends with code 6 where there is none of that name, with code 7 where members of it are up.
    """
    vhost = "/" if broker is None else BrokerAddress.parse(broker).vhost
    if not forget_consumer(super_stream, name, database=require_database(database), vhost=vhost):
        print_error(f"no consumer {name!r} of {super_stream!r} is known")
        raise typer.Exit(ExitCode.NOT_THERE)


@contexts.command("verify")
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
        _print_report(report)
    if not report.ok:
        raise typer.Exit(ExitCode.DIFFERENT)


for _name, _command in (
    ("move", moving.move),
    ("consolidate", moving.consolidate),
    ("rebalance", moving.rebalance),
    ("resume", moving.resume),
    ("abort", moving.abort),
    ("add-partition", moving.add_partition),
    ("retire", moving.retire),
):
    contexts.command(_name)(_command)


def _print_assignments(found: list[Assignment], *, as_json: bool) -> None:
    if as_json:
        for each in found:
            print_json(asdict(each), one_line=True)
        return
    rows = [(each.context, each.partition, str(each.epoch), str(each.move_id or "–")) for each in found]
    print_rows(("context", "partition", "epoch", "move"), rows)


def _print_consumers(found: dict[str, SerialStatus]) -> None:
    rows = [
        (name, each.stream, "–" if each.position is None else each.position, each.lag, each.holder or "nobody", held)
        for name, status in found.items()
        for each in status.partitions
        for held in ["; ".join(map(_held, each.holds))]
    ]
    print_rows(("consumer", "partition", "position", "lag", "member", "held back"), rows)


def _held(hold: HoldStatus) -> str:
    held = f"{hold.held:,} of move {hold.move_id} for {hold.seconds:,.1f} s"
    if hold.is_over:
        return f"{held}: go on once a member consumes here"
    return f"{held}, until {hold.source} is consumed past {hold.fence_offset}"


def _print_report(report: SerialReport) -> None:
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
    shown = sorted(report.findings, key=lambda each: each.kind.is_notice)[:FINDINGS_SHOWN]
    rows = [(each.kind, each.stream, each.offset, each.context or "–", each.text) for each in shown]
    print_rows(("what", "partition", "offset", "context", "found"), rows)
    more = sum(report.counts.values()) - FINDINGS_SHOWN
    if more > 0:
        console.print(f"and {more:,} more; --json lists up to 1,000 of a kind.")
