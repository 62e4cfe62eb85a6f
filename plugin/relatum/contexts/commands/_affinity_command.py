"""`relatum affinity`: the affinity sets of a super stream: listed, shown, closed and moved."""

from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from relatum.contexts import AffinitySet, AffinitySets
from relatum.contexts.commands._contexts_shown import (
    ContextsOptions,
    ContextsServers,
    print_ended,
    print_rows,
    shown_progress,
)
from relatum.errors import InvalidInput
from relatum.terminal import (
    SuperStreamArgument,
    console,
    moment_text,
    parse_span,
    print_facts,
    print_json,
    spread,
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
    given: ContextsOptions,
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
    rows = [
        (each.name, each.partition, _state(each), *map(moment_text, (each.opened_at, each.used_at))) for each in found
    ]
    print_rows(("set", "partition", "state", "opened", "last used"), rows)


@affinity.command("show")
@spread
def show(
    super_stream: SuperStreamArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The set's name.", show_default=False)],
    *,
    given: ContextsOptions,
) -> None:
    """Show one open set. `--json` prints one document."""
    with given.sets(super_stream) as sets:
        found = sets.inspect(name)
    if given.as_json:
        print_json(asdict(found))
        return
    facts = {
        "partition": found.partition,
        "state": _state(found),
        "epoch": f"{found.epoch:,}",
        "opened": moment_text(found.opened_at),
        "last used": moment_text(found.used_at),
    }
    print_facts(found.name, facts.items())


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
    given: ContextsOptions,
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
    url, database = given.broker_url, given.database_url
    with (
        AffinitySets(super_stream, database, broker=url, stream_url=given.stream_url) as sets,
        shown_progress(is_quiet=given.as_json, what="set") as tell,
    ):
        moves = sets.consolidate(source, to, progress=tell) if source else sets.move(names or (), to, progress=tell)
    print_ended(moves, as_json=given.as_json, what="set")


@affinity.command("weight")
@spread
def weight(
    super_stream: SuperStreamArgument,
    weights: Annotated[
        list[str], typer.Argument(metavar="STREAM=WEIGHT…", help="Partitions and their weights.", show_default=False)
    ],
    *,
    given: ContextsServers,
) -> None:
    """Set the weights of partitions, for routers that balance by weight; with 0 no new set is placed there."""
    with given.sets(super_stream) as sets:
        sets.set_weights(dict(map(_weight, weights)))


def _state(found: AffinitySet) -> str:
    return found.state if found.move_id is None else f"{found.state} (move {found.move_id})"


def _weight(text: str) -> tuple[str, float]:
    stream, _, number = text.rpartition("=")
    try:
        return stream, float(number)
    except ValueError:
        raise InvalidInput(f"{text!r} is no weight: write STREAM=WEIGHT, such as orders-0=2.5") from None
