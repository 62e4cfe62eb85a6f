"""`relatum affinity`: the affinity sets of a super stream: listed, shown, closed and moved."""

from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from relatum.contexts import AffinitySet, AffinitySets
from relatum.contexts.commands._contexts_shown import (
    LIST_MAX,
    ContextsOptions,
    ContextsServers,
    LimitOption,
    PartitionOption,
)
from relatum.errors import InvalidInput
from relatum.terminal import (
    SuperStreamArgument,
    argument,
    console,
    moment_text,
    option,
    parse_span,
    print_facts,
    print_json,
    print_rows,
    spread,
)

affinity = typer.Typer(
    help="List, show, close and move affinity sets.", no_args_is_help=True, rich_markup_mode="markdown"
)

NamesArgument: TypeAlias = Annotated[list[str] | None, argument("[NAME]…", "The sets' names.")]


@affinity.command("list")
@spread
def list_sets(
    super_stream: SuperStreamArgument,
    prefix: Annotated[str, option("Only sets whose names begin so.")] = "",
    partition: PartitionOption = None,
    limit: LimitOption = LIST_MAX,
    *,
    given: ContextsOptions,
) -> None:
    """List the open sets, by name. The broker's URL only tells the virtual host. `--json` prints a list."""
    with given.looking(AffinitySets, super_stream) as sets:
        found = sets.list(prefix, partition=partition, limit=limit)
    if given.as_json:
        print_json([asdict(each) for each in found])
    elif found:
        columns = {
            "set": "name",
            "partition": "partition",
            "state": _state,
            "opened": "opened_at",
            "last used": "used_at",
        }
        print_rows(found, columns)
    else:
        console.print("No such set is open.")


@affinity.command()
@spread
def show(
    super_stream: SuperStreamArgument,
    name: Annotated[str, argument("NAME", "The set's name.")],
    *,
    given: ContextsOptions,
) -> None:
    """Show one open set. `--json` prints one document."""
    with given.looking(AffinitySets, super_stream) as sets:
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


@affinity.command()
@spread
def close(
    super_stream: SuperStreamArgument,
    names: NamesArgument = None,
    idle: Annotated[
        str | None,
        option("Close all sets that no publisher used for so long: seconds, or 90s, 15m, 6h, 2d.", metavar="SPAN"),
    ] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Close sets, by name or because nobody uses them; what is published under their names then begins new ones.

    `--json` prints one document: the number of closed sets.
    """
    if bool(names) == (idle is not None):
        raise typer.BadParameter("give names, or --idle")
    with given.looking(AffinitySets, super_stream) as sets:
        if idle is not None:
            closed = sets.close_idle(parse_span(idle))
        else:
            closed = len([sets.close_set(name) for name in dict.fromkeys(names or ())])
    if given.as_json:
        print_json({"closed": closed})
    else:
        console.print(f"{closed:,} closed")


@affinity.command()
@spread
def move(
    super_stream: SuperStreamArgument,
    names: NamesArgument = None,
    to: Annotated[str, option("The partition they are to go to.", "--to", metavar="STREAM")] = "",
    source: Annotated[str | None, option("Move all sets of this partition.", "--from", metavar="STREAM")] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Move sets to another partition; their messages wait meanwhile, and consumers see them in order.

    `--json` prints one document: the list of the moves.
    """
    if not to or bool(names) == (source is not None):
        raise typer.BadParameter("give names, or --from, and --to")
    with given.moving(AffinitySets, super_stream) as sets:
        if source is not None:
            given.show_moves(sets.consolidate, source, to, what="set")
        else:
            given.show_moves(sets.move, names, to, what="set")


@affinity.command()
@spread
def weight(
    super_stream: SuperStreamArgument,
    weights: Annotated[list[str], argument("STREAM=WEIGHT…", "Partitions and their weights.")],
    *,
    given: ContextsServers,
) -> None:
    """Set the weights of partitions, for routers that balance by weight; with 0 no new set is placed there."""
    by_stream = dict(map(_weight, weights))
    with given.looking(AffinitySets, super_stream) as sets:
        sets.set_weights(by_stream)


def _state(found: AffinitySet) -> str:
    return found.state if found.move_id is None else f"{found.state} (move {found.move_id})"


def _weight(text: str) -> tuple[str, float]:
    stream, _, number = text.rpartition("=")
    try:
        return stream, float(number)
    except ValueError:
        raise InvalidInput(f"{text!r} is no weight: write STREAM=WEIGHT, such as orders-0=2.5") from None
