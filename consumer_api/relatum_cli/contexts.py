"""`relatum contexts`: where the serialization contexts of a super stream are, and all that is done with them."""

import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer
from rich.progress import Progress as Bar
from rich.progress import TextColumn

from relatum.contexts import (
    Assignment,
    HoldStatus,
    Move,
    Progress,
    SerializationContexts,
    SerialReport,
    SerialStatus,
    forget_consumer,
)
from relatum.contexts import consumers as read_consumers
from relatum.contexts import verify as run_verify
from relatum.contexts.commands._contexts_shown import (
    LIST_MAX,
    ContextsOptions,
    ContextsServers,
    LimitOption,
    PartitionOption,
    counted,
    move_document,
    print_moves,
)
from relatum.reading import BrokerAddress
from relatum.superstreams import describe_super_stream
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    ExitCode,
    SuperStreamArgument,
    argument,
    console,
    errors,
    option,
    print_error,
    print_json,
    print_rows,
    require_database,
    spread,
)

contexts = typer.Typer(
    help="Place serialization contexts, move them between partitions in order, and verify it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

FINDINGS_SHOWN: Final = 20
"""Findings shown on the terminal."""

HeaderOption: TypeAlias = Annotated[
    str | None,
    option(
        "The header that names contexts; by default the database's word for it, or serialization_context.",
        metavar="NAME",
    ),
]
NamesArgument: TypeAlias = Annotated[list[str], argument("CONTEXT…", "The contexts' names.")]
ToOption: TypeAlias = Annotated[str, typer.Option("--to", metavar="STREAM", help="The partition they are to go to.")]


@contexts.command()
@spread
def status(super_stream: SuperStreamArgument, *, given: ContextsOptions) -> None:
    """Show the partitions with their contexts, and the moves under way. `--json` prints one document."""
    with given.looking(SerializationContexts, super_stream) as opened:
        found = opened.status()
    if given.as_json:
        print_json(asdict(found) | {"moves": [move_document(move) for move in found.moves]})
        return
    columns = {
        "partition": "stream",
        "contexts": "open_sets",
        "state": "state",
        "weight": lambda row: f"{row.weight:g}",
        "binding key": "binding_key",
    }
    print_rows(found.partitions, columns)
    console.print(f"Contexts are named by the header {found.header}.")
    if found.moves:
        print_moves(found.moves)


@contexts.command("list")
@spread
def list_contexts(
    super_stream: SuperStreamArgument,
    partition: PartitionOption = None,
    limit: LimitOption = LIST_MAX,
    *,
    given: ContextsOptions,
) -> None:
    """List contexts by name, each with its partition. `--json` prints JSON lines."""
    with given.looking(SerializationContexts, super_stream) as opened:
        _print_assignments(list(islice(opened.assignments(partition), limit)), as_json=given.as_json)


@contexts.command()
@spread
def show(super_stream: SuperStreamArgument, names: NamesArgument, *, given: ContextsOptions) -> None:
    """Show where contexts are. Ends with code 6 where one is nowhere. `--json` prints JSON lines."""
    with given.looking(SerializationContexts, super_stream) as opened:
        _print_assignments([opened.assignment_of(name) for name in names], as_json=given.as_json)


@contexts.command()
@spread
def assign(super_stream: SuperStreamArgument, to: ToOption, names: NamesArgument, *, given: ContextsOptions) -> None:
    """Assign contexts to a partition before their first messages. Those in another are not moved by it: code 7.

    `--json` prints JSON lines.
    """
    # The broker is asked only where the database does not know the super stream yet.
    broker, stream_url = given.broker, given.stream_url
    with SerializationContexts(super_stream, given.database_url, broker=broker, stream_url=stream_url) as opened:
        _print_assignments(opened.assign(names, to), as_json=given.as_json)


@contexts.command()
@spread
def move(
    super_stream: SuperStreamArgument,
    to: ToOption,
    names: Annotated[list[str] | None, argument("[CONTEXT]…", "The contexts' names.")] = None,
    file: Annotated[Path | None, option("Names from a file, one a line; - reads them from stdin.", "--file")] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Move contexts to a partition, while publishers publish and consumers consume.

    `--json` prints one document: the list of the moves.
    """
    wanted = _names_of(names, file)
    with given.moving(SerializationContexts, super_stream) as opened:
        given.show_moves(opened.move, wanted, to)


def _names_of(given: list[str] | None, file: Path | None) -> list[str]:
    """The names a command was given.

    Raises:
        typer.BadParameter: none, or both ways.
    """
    if bool(given) == (file is not None):
        raise typer.BadParameter("give names, or --file")
    if file is None:
        return list(given or ())
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise typer.BadParameter(f"{str(file)!r} cannot be read: {why}") from error
    return [line for line in text.splitlines() if line]


@contexts.command()
@spread
def consolidate(
    super_stream: SuperStreamArgument,
    sources: Annotated[list[str], argument("STREAM…", "The partitions to be emptied.")],
    to: ToOption,
    *,
    given: ContextsOptions,
) -> None:
    """Move all contexts of some partitions to one. `--json` prints one document: the list of the moves."""
    with given.moving(SerializationContexts, super_stream) as opened:
        given.show_moves(opened.consolidate, sources, to)


@contexts.command()
@spread
def rebalance(
    super_stream: SuperStreamArgument,
    over: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STREAM…]", help="The partitions to spread over; all where left out."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how many contexts would move where.")] = False,
    *,
    given: ContextsOptions,
) -> None:
    """Spread contexts evenly over partitions.

    `--json` prints one document: the list of the moves, or with `--dry-run` the contexts by the partition they would
    go to.
    """
    with given.moving(SerializationContexts, super_stream) as opened:
        planned = opened.plan(over or None)
        if not dry_run:
            given.show_moves(opened.rebalance, planned)
        elif given.as_json:
            print_json(planned.moves)
        else:
            for stream, names in planned.moves.items():
                console.print(f"{counted(len(names), 'context')} would go to {stream}.")
            if not len(planned):
                console.print("They are spread evenly.")


@contexts.command()
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
    with given.looking(SerializationContexts, super_stream) as opened:
        found = opened.moves(latest=latest)
    if given.as_json:
        print_json([move_document(move) for move in found])
    elif found:
        print_moves(found)
    else:
        console.print("No move is under way.")


@contexts.command()
@spread
def resume(
    super_stream: SuperStreamArgument,
    moves: Annotated[
        list[int] | None,
        typer.Argument(metavar="[MOVE…]", help="The moves' numbers; all that have not ended where left out."),
    ] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Go on with moves whose mover died. Whoever does so, and how many, makes no difference.

    `--json` prints one document: the list of the moves as they ended.
    """
    with given.moving(SerializationContexts, super_stream) as opened:

        def resume_all(progress: Progress) -> list[Move]:
            wanted = moves or [move.move_id for move in opened.moves()]
            return [opened.resume(move_id, progress=progress) for move_id in wanted]

        given.show_moves(resume_all)


@contexts.command()
@spread
def abort(
    super_stream: SuperStreamArgument,
    moves: Annotated[list[int], argument("MOVE…", "The moves' numbers.")],
    reason: Annotated[str | None, option("Kept with the move.")] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Take moves back: their contexts go on where they were. `--json` prints one document, the list of the moves."""
    with given.moving(SerializationContexts, super_stream) as opened:

        def abort_all(progress: Progress) -> list[Move]:
            return [opened.abort(move_id, reason=reason, progress=progress) for move_id in moves]

        given.show_moves(abort_all)


@contexts.command()
@spread
def add_partition(
    super_stream: SuperStreamArgument,
    count: Annotated[int, typer.Option(help="How many.", min=1, max=1_000)] = 1,
    binding_key: Annotated[
        list[str] | None,
        typer.Option(help="A binding key of the new partition, for each one.", show_default="the next number"),
    ] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Add empty partitions. No context moves by that; `rebalance` spreads them.

    `--json` prints one document: the list of the new streams.
    """
    with given.moving(SerializationContexts, super_stream) as opened:
        added = opened.add_partitions(count, binding_keys=binding_key or None)
    if given.as_json:
        print_json(added)
    else:
        console.print(f"Added {', '.join(added)}.")


@contexts.command()
@spread
def retire(
    super_stream: SuperStreamArgument,
    partition: Annotated[str, argument("STREAM", "The partition.")],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the stream, too, once all consumers have read everything.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="With --delete, seconds to wait for consumers.", min=0)] = 30.0,
    *,
    given: ContextsServers,
) -> None:
    """Take a partition without contexts out of use. Ends with code 7 while something needs it."""
    with given.moving(SerializationContexts, super_stream) as opened:
        opened.retire(partition, delete=delete, timeout_s=timeout_s)
    console.print(f"{partition} is {'deleted' if delete else 'retired; its messages stay'}.")


@contexts.command()
@spread
def consumers(super_stream: SuperStreamArgument, *, given: ContextsOptions) -> None:
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


@contexts.command()
def forget(
    super_stream: SuperStreamArgument,
    name: Annotated[str, argument("CONSUMER", "The consumer's name.")],
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


@contexts.command()
@spread
def verify(super_stream: SuperStreamArgument, header: HeaderOption = None, *, given: ContextsOptions) -> None:
    """Read all partitions and check: each context's messages count once, in the order in which they were published.

    Without a database the streams are read alone: partitions that were retired are left out, and where retention has
    dropped fences, what they made strays seems to count. Ends with code 7 where the order is broken. Strays that nobody
    adopted are shown and break nothing. `--json` prints one document: ok, what was
    counted, partitions (from and to offset), counts by kind, findings.
    """
    url = given.broker_url
    with Bar(TextColumn("{task.fields[read]:,} messages"), console=errors, transient=True) as bar:
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


def _print_assignments(found: list[Assignment], *, as_json: bool) -> None:
    if as_json:
        for each in found:
            print_json(asdict(each), one_line=True)
        return
    columns = {
        "context": "context",
        "partition": "partition",
        "epoch": lambda each: str(each.epoch),
        "move": lambda each: str(each.move_id or "–"),
    }
    print_rows(found, columns)


def _print_consumers(found: dict[str, SerialStatus]) -> None:
    columns = {
        "consumer": lambda row: row[0],
        "partition": lambda row: row[1].stream,
        "position": lambda row: row[1].position,
        "lag": lambda row: row[1].lag,
        "member": lambda row: row[1].holder or "nobody",
        "held back": lambda row: "; ".join(map(_held, row[1].holds)),
    }
    print_rows([(name, each) for name, status in found.items() for each in status.partitions], columns)


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
    columns = {"what": "kind", "partition": "stream", "offset": "offset", "context": "context", "found": "text"}
    print_rows(shown, columns)
    more = sum(report.counts.values()) - FINDINGS_SHOWN
    if more > 0:
        console.print(f"and {more:,} more; --json lists up to 1,000 of a kind.")
