"""`relatum affinity`: the affinity sets of a super stream: listed, shown, closed and moved."""

from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer
from rich.text import Text

from relatum.contexts import AffinitySet, AffinitySets, MoveProgress
from relatum.contexts.commands._contexts_options import ContextsOptions, SetsOptions
from relatum.errors import InvalidInput
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    SuperStreamArgument,
    console,
    errors,
    moment_text,
    parse_span,
    print_facts,
    print_json,
    spread,
    table_of,
)

affinity = typer.Typer(
    help="List, show, close and move affinity sets.", no_args_is_help=True, rich_markup_mode="markdown"
)

NamesArgument: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]…", help="The sets' names.", show_default=False)
]


@affinity.command("list")
@spread
def list_sets(
    super_stream: SuperStreamArgument,
    prefix: Annotated[str, typer.Option(help="Only sets whose names begin so.", show_default=False)] = "",
    partition: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Only sets in this partition.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 1_000,
    *,
    given: SetsOptions,
) -> None:
    """List the open sets, by name. The broker's URL only tells the virtual host. `--json` prints a list."""
    with given.sets(super_stream) as sets:
        found = sets.list(prefix, partition=partition, limit=limit)
    if given.as_json:
        print_json([asdict(each) for each in found])
        return
    if not found:
        console.print("No such set is open.")
        return
    table = table_of("set", "partition", "state", "opened", "last used")
    for each in found:
        state = each.state if each.move_id is None else f"{each.state} (move {each.move_id})"
        cells = (each.name, each.partition, state, moment_text(each.opened_at), moment_text(each.used_at))
        table.add_row(*map(Text, cells))
    console.print(table)


@affinity.command("show")
@spread
def show(
    super_stream: SuperStreamArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The set's name.", show_default=False)],
    *,
    given: SetsOptions,
) -> None:
    """Show one open set. `--json` prints one document."""
    with given.sets(super_stream) as sets:
        found = sets.inspect(name)
    if given.as_json:
        print_json(asdict(found))
        return
    print_facts(found.name, _facts(found))


@affinity.command("close")
@spread
def close(
    super_stream: SuperStreamArgument,
    names: NamesArgument = None,
    idle: Annotated[
        str | None,
        typer.Option(
            metavar="SPAN",
            help="Close all sets that no publisher used for so long: seconds, or 90s, 15m, 6h, 2d.",
            show_default=False,
        ),
    ] = None,
    *,
    given: SetsOptions,
) -> None:
    """Close sets, by name or because nobody uses them; what is published under their names then begins new ones.

    `--json` prints one document: the number of closed sets.
    """
    if bool(names) == (idle is not None):
        raise typer.BadParameter("give names, or --idle")
    with given.sets(super_stream) as sets:
        if idle is not None:
            closed = sets.close_idle(parse_span(idle))
        else:
            closed = len([sets.close_set(name) for name in dict.fromkeys(names or ())])
    if given.as_json:
        print_json({"closed": closed})
        return
    console.print(f"{closed:,} closed")


@affinity.command("move")
@spread
def move(
    super_stream: SuperStreamArgument,
    names: NamesArgument = None,
    to: Annotated[
        str, typer.Option("--to", metavar="STREAM", help="The partition they are to go to.", show_default=False)
    ] = "",
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="STREAM", help="Move all sets of this partition.", show_default=False),
    ] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Move sets to another partition; their messages wait meanwhile, and consumers see them in order.

    `--json` prints one document: the list of the moves.
    """
    if not to or bool(names) == (source is not None):
        raise typer.BadParameter("give names, or --from, and --to")
    with AffinitySets(super_stream, given.database_url, broker=given.broker_url, stream_url=given.stream_url) as sets:
        wanted = list(names or ()) or [each.name for each in sets.list(partition=source, limit=None)]
        moves = sets.move(wanted, to, progress=_tell) if wanted else ()
    if given.as_json:
        print_json([asdict(each) for each in moves])
        return
    moved = sum(each.contexts for each in moves)
    pause = max((each.pause_s or 0.0 for each in moves), default=0.0)
    console.print(f"{moved:,} moved to {to}; the longest pause was {pause * 1e3:,.0f} ms")


@affinity.command("weight")
def weight(
    super_stream: SuperStreamArgument,
    weights: Annotated[
        list[str], typer.Argument(metavar="STREAM=WEIGHT…", help="Partitions and their weights.", show_default=False)
    ],
    *,
    broker: BrokerOption = None,
    database: DatabaseOption = None,
) -> None:
    """Set the weights of partitions, for routers that balance by weight; with 0 no new set is placed there."""
    with SetsOptions(broker, database).sets(super_stream) as sets:
        sets.set_weights(dict(map(_weight, weights)))


def _weight(text: str) -> tuple[str, float]:
    stream, _, number = text.rpartition("=")
    try:
        return stream, float(number)
    except ValueError:
        raise InvalidInput(f"{text!r} is no weight: write STREAM=WEIGHT, such as orders-0=2.5") from None


def _tell(progress: MoveProgress) -> None:
    move = progress.move
    errors.print(
        f"move {move.move_id}, {move.contexts:,} sets from {move.source} to {move.target}: {move.state}; "
        f"{progress.contexts_done:,} of {progress.contexts_all:,} done",
    )


def _facts(found: AffinitySet) -> list[tuple[str, str]]:
    return [
        ("partition", found.partition),
        ("state", found.state if found.move_id is None else f"{found.state} (move {found.move_id})"),
        ("epoch", f"{found.epoch:,}"),
        ("opened", moment_text(found.opened_at)),
        ("last used", moment_text(found.used_at)),
    ]
