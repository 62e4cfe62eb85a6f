"""Serialization contexts on the terminal and as JSON: partitions, moves, and how far they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from relatum.contexts import ContextsStatus, Move, MoveProgress
from relatum.terminal import console, errors, moment_text, print_json, table_of


def move_document(move: Move) -> dict[str, Any]:
    """A move for `--json`."""
    return {**asdict(move), "pause_s": move.pause_s, "is_attended": move.is_attended}


def status_document(status: ContextsStatus) -> dict[str, Any]:
    """A super stream's contexts for `--json`."""
    return {
        "super_stream": status.super_stream,
        "header": status.header,
        "generation": status.generation,
        "partitions": [asdict(row) for row in status.partitions],
        "moves": [move_document(move) for move in status.moves],
    }


def print_status(status: ContextsStatus) -> None:
    """Print the partitions of a super stream and the moves under way."""
    table = table_of("partition", "contexts", "state", "weight", "binding key")
    for row in status.partitions:
        table.add_row(Text(row.stream), f"{row.open_sets:,}", str(row.state), f"{row.weight:g}", Text(row.binding_key))
    console.print(table)
    console.print(f"Contexts are named by the header {status.header}.")
    if status.moves:
        print_moves(status.moves)


def print_moves(moves: Sequence[Move]) -> None:
    """Print moves for people."""
    columns = ("move", "contexts", "from", "to", "state", "started", "pause", "held by")
    table = table_of(*columns, whole=("move", "contexts", "state", "pause"))
    for move in moves:
        cells = (str(move.move_id), f"{move.contexts:,}", move.source, move.target, state_text(move))
        holder = (move.holder or "–") if move.is_attended else "nobody"
        table.add_row(
            *map(Text, (*cells, moment_text(move.started_at), pause_text(move), "–" if move.state.is_ended else holder))
        )
    console.print(table)


def print_ended(moves: Sequence[Move], *, as_json: bool) -> None:
    """Print what moves came to."""
    if as_json:
        print_json([move_document(move) for move in moves])
        return
    if not moves:
        console.print("Nothing had to move.")
        return
    moved = sum(move.contexts for move in moves)
    pauses = sorted(move.pause_s or 0.0 for move in moves)
    console.print(
        f"{counted(moved, 'context')} in {counted(len(moves), 'move')}; they stood still for "
        f"{pauses[len(pauses) // 2] * 1e3:,.0f} ms (median), at most {pauses[-1] * 1e3:,.0f} ms."
    )
    for move in moves:
        if move.aborting:
            console.print(f"Move {move.move_id} was taken back: its contexts are in {move.source}.")


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def state_text(move: Move) -> str:
    """A move's state in words, and whom it waits for."""
    text = f"{move.state}, going back" if move.aborting and not move.state.is_ended else str(move.state)
    return f"{text}, waits for {', '.join(move.waits_for)}" if move.waits_for else text


def pause_text(move: Move) -> str:
    """How long a move's contexts stood still."""
    return "–" if move.pause_s is None else f"{move.pause_s * 1e3:,.0f} ms"


@contextmanager
def shown_progress(*, is_quiet: bool) -> Iterator[Callable[[MoveProgress], None]]:
    """Something to be told of progress: a bar on stderr, and a line for each move that has ended."""
    if is_quiet:
        yield lambda progress: None
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("contexts"),
    ]
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("moving", total=None)

        def tell(progress: MoveProgress) -> None:
            bar.update(task, total=progress.contexts_all, completed=progress.contexts_done)
            move = progress.move
            if move.state.is_ended:
                line = f"move {move.move_id}: {counted(move.contexts, 'context')}, {move.source} to {move.target}"
                bar.console.print(f"{line}, {move.state}, {pause_text(move)}")

        yield tell
