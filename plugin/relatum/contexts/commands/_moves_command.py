"""`relatum contexts`: what moves contexts and changes partitions."""

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from relatum.contexts import Plan
from relatum.contexts.commands._contexts_shown import (
    ContextsOptions,
    ContextsServers,
    counted,
    print_ended,
    shown_progress,
)
from relatum.terminal import SuperStreamArgument, console, print_json, spread

ContextsArgument: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[CONTEXT]…", help="The contexts' names.", show_default=False)
]
FileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--file", help="Names from a file, one a line; - reads them from stdin.", show_default=False),
]
ToOption: TypeAlias = Annotated[str, typer.Option("--to", metavar="STREAM", help="The partition they are to go to.")]
OverArgument: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[STREAM…]", help="The partitions to spread over; all where left out.")
]
MovesArgument: TypeAlias = Annotated[
    list[int], typer.Argument(metavar="MOVE…", help="The moves' numbers.", show_default=False)
]


def names_of(given: list[str] | None, file: Path | None) -> list[str]:
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


@spread
def move(
    super_stream: SuperStreamArgument,
    to: ToOption,
    names: ContextsArgument = None,
    file: FileOption = None,
    *,
    given: ContextsOptions,
) -> None:
    """Move contexts to a partition, while publishers publish and consumers consume.

    `--json` prints one document: the list of the moves.
    """
    wanted = names_of(names, file)
    with given.moving(super_stream) as contexts, shown_progress(is_quiet=given.as_json) as tell:
        moves = contexts.move(wanted, to, progress=tell)
    print_ended(moves, as_json=given.as_json)


@spread
def consolidate(
    super_stream: SuperStreamArgument,
    sources: Annotated[
        list[str], typer.Argument(metavar="STREAM…", help="The partitions to be emptied.", show_default=False)
    ],
    to: ToOption,
    *,
    given: ContextsOptions,
) -> None:
    """Move all contexts of some partitions to one. `--json` prints one document: the list of the moves."""
    with given.moving(super_stream) as contexts, shown_progress(is_quiet=given.as_json) as tell:
        moves = contexts.consolidate(sources, to, progress=tell)
    print_ended(moves, as_json=given.as_json)


@spread
def rebalance(
    super_stream: SuperStreamArgument,
    over: OverArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how many contexts would move where.")] = False,
    *,
    given: ContextsOptions,
) -> None:
    """Spread contexts evenly over partitions.

    `--json` prints one document: the list of the moves, or with `--dry-run` the contexts by the partition they would
    go to.
    """
    with given.moving(super_stream) as contexts, shown_progress(is_quiet=given.as_json or dry_run) as tell:
        planned = contexts.plan(over or None)
        if dry_run:
            _print_plan(planned, as_json=given.as_json)
            return
        moves = contexts.rebalance(planned, progress=tell)
    print_ended(moves, as_json=given.as_json)


def _print_plan(planned: Plan, *, as_json: bool) -> None:
    if as_json:
        print_json(planned.moves)
        return
    for stream, names in planned.moves.items():
        console.print(f"{counted(len(names), 'context')} would go to {stream}.")
    if not len(planned):
        console.print("They are spread evenly.")


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
    with given.moving(super_stream) as contexts, shown_progress(is_quiet=given.as_json) as tell:
        wanted = moves or [move.move_id for move in contexts.moves()]
        ended = [contexts.resume(move_id, progress=tell) for move_id in wanted]
    print_ended(ended, as_json=given.as_json)


@spread
def abort(
    super_stream: SuperStreamArgument,
    moves: MovesArgument,
    reason: Annotated[str | None, typer.Option(help="Kept with the move.", show_default=False)] = None,
    *,
    given: ContextsOptions,
) -> None:
    """Take moves back: their contexts go on where they were. `--json` prints one document, the list of the moves."""
    with given.moving(super_stream) as contexts, shown_progress(is_quiet=given.as_json) as tell:
        ended = [contexts.abort(move_id, reason=reason, progress=tell) for move_id in moves]
    print_ended(ended, as_json=given.as_json)


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
    with given.moving(super_stream) as contexts:
        added = contexts.add_partitions(count, binding_keys=binding_key or None)
    if given.as_json:
        print_json(added)
    else:
        console.print(f"Added {', '.join(added)}.")


@spread
def retire(
    super_stream: SuperStreamArgument,
    partition: Annotated[str, typer.Argument(metavar="STREAM", help="The partition.", show_default=False)],
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the stream, too, once all consumers have read everything.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="With --delete, seconds to wait for consumers.", min=0)] = 30.0,
    *,
    given: ContextsServers,
) -> None:
    """Take a partition without contexts out of use. Ends with code 7 while something needs it."""
    with given.moving(super_stream) as contexts:
        contexts.retire(partition, delete=delete, timeout_s=timeout_s)
    console.print(f"{partition} is {'deleted' if delete else 'retired; its messages stay'}.")
