"""`relatum affinity`: list, show, close and move the affinity sets of a super stream."""

from typing import Annotated, Final

import typer

from relatum.contexts import AffinitySets
from relatum.errors import InvalidInput
from relatum_cli.contexts import LIST_MAX, Limit, Partition, PlacementOptions, SuperStreamOptions, one_by_one
from relatum_cli.options import Commands, argument, option, span
from relatum_cli.show import Cells, answer, show

affinity = Commands()

IDLE: Final = "Close all sets that no publisher has used for this long: seconds, or 90s, 15m, 6h, 2d."

Names = Annotated[list[str] | None, argument("The sets' names.", "[NAME]…")]


@affinity.command("list")
def list_sets(
    *,
    prefix: str = option("", "Only sets whose names begin with this prefix."),
    partition: Partition = None,
    limit: Limit = LIST_MAX,
    given: SuperStreamOptions,
) -> None:
    """List the open sets by name. The broker's URL is used only for its virtual host. `--json` prints a list."""
    with given.open_stored(AffinitySets) as sets:
        found = sets.list(prefix, partition=partition, limit=limit)
    show(found, _COLUMNS, as_json=given.as_json, empty="No such set is open.")


_COLUMNS: Final[Cells] = {
    "set": "name",
    "partition": "partition",
    "state": lambda each: each.state if each.move_id is None else f"{each.state} (move {each.move_id})",
    "opened": "opened_at",
    "last used": "used_at",
}


@affinity.command("show")
def show_set(*, name: str = argument("The set's name.", "NAME"), given: SuperStreamOptions) -> None:
    """Show one open set. `--json` prints one document."""
    with given.open_stored(AffinitySets) as sets:
        found = sets.inspect(name)
    show([found], _COLUMNS, as_json=given.as_json, json_value=found)


@affinity.command()
def close(*, names: Names = None, idle: float | None = span(None, IDLE), given: SuperStreamOptions) -> None:
    """Close sets by name, or unused sets. A later message with the same set name opens a new set.

    `--json` prints one document: the number of closed sets.
    """
    if bool(names) == (idle is not None):
        raise typer.BadParameter("give either names or --idle")
    with given.open_stored(AffinitySets) as sets:
        if idle is not None:
            closed = sets.close_idle(idle)
        else:
            closed = len(one_by_one(sets.close_set, list(dict.fromkeys(names or ()))))
    answer({"closed": closed}, f"{closed:,} closed", as_json=given.as_json)


@affinity.command()
def move(
    *,
    names: Names = None,
    to: str = option("", "The target partition.", "--to", metavar="STREAM"),
    source: str | None = option(None, "Move all sets of this partition.", "--from", metavar="STREAM"),
    given: SuperStreamOptions,
) -> None:
    """Move sets to another partition. During the move their messages wait, so that consumers read them in order.

    `--json` prints one document: the list of the moves.
    """
    if not to or bool(names) == (source is not None):
        raise typer.BadParameter("give --to, and either names or --from")
    with given.open_with_broker(AffinitySets) as sets:
        if source is not None:
            given.show_moves(sets.consolidate, source, to, noun="set")
        else:
            given.show_moves(sets.move, names, to, noun="set")


@affinity.command()
def weight(
    *, weights: list[str] = argument("Partitions and their weights.", "STREAM=WEIGHT…"), given: PlacementOptions
) -> None:
    """Set the weights of partitions, for routers that balance by weight. A partition of weight 0 gets no new sets."""
    by_stream = dict(map(_weight, weights))
    with given.open_stored(AffinitySets) as sets:
        sets.set_weights(by_stream)


def _weight(text: str) -> tuple[str, float]:
    stream, _, number = text.rpartition("=")
    try:
        return stream, float(number)
    except ValueError:
        raise InvalidInput(f"{text!r} is not a weight: give STREAM=WEIGHT, such as orders-0=2.5") from None
