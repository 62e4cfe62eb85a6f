"""`relatum contexts`: where the serialization contexts of a super stream are, and all that is done with them."""

from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer
from rich.text import Text

from relatum.contexts import Assignment
from relatum.contexts.commands import _moves_command as moving
from relatum.contexts.commands._consumers_command import consumers, forget
from relatum.contexts.commands._contexts_options import ContextsOptions
from relatum.contexts.commands._contexts_shown import move_document, print_moves, print_status, status_document
from relatum.contexts.commands._order_verify_command import verify
from relatum.terminal import SuperStreamArgument, console, print_json, spread, table_of

contexts = typer.Typer(
    help="Place serialization contexts, move them between partitions in order, and verify it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

LIST_MAX = 1_000
"""Contexts listed unless more are asked for."""


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


for _name, _command in (
    ("move", moving.move),
    ("consolidate", moving.consolidate),
    ("rebalance", moving.rebalance),
    ("resume", moving.resume),
    ("abort", moving.abort),
    ("add-partition", moving.add_partition),
    ("retire", moving.retire),
    ("consumers", consumers),
    ("forget", forget),
    ("verify", verify),
):
    contexts.command(_name)(_command)


def _print_assignments(found: list[Assignment], *, as_json: bool) -> None:
    if as_json:
        for each in found:
            print_json(asdict(each), one_line=True)
        return
    table = table_of("context", "partition", "epoch", "move")
    for each in found:
        move = "–" if each.move_id is None else str(each.move_id)
        table.add_row(Text(each.context), Text(each.partition), str(each.epoch), move)
    console.print(table)
