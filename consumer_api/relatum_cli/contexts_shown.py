"""What the commands of contexts and of affinity sets share: where these are, and how they are shown."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from relatum.contexts import Move, MoveProgress, Progress, SerializationContexts
from relatum.terminal import JsonOption, ServerOptions, console, errors, option, print_json, print_rows

T = TypeVar("T", bound=SerializationContexts)

LIST_MAX: Final = 1_000
"""Contexts, or sets, listed unless more are asked for."""

PartitionOption: TypeAlias = Annotated[str | None, option("Only those in this partition.", metavar="STREAM")]
LimitOption: TypeAlias = Annotated[int, typer.Option(min=1, help="How many at most.")]


@dataclass(frozen=True, slots=True)
class ContextsServers(ServerOptions):
    """Where a super stream's contexts, or affinity sets, are."""

    def looking(self, kind: type[T], super_stream: str) -> T:
        """The contexts or sets as the database has them; the broker's URL only tells the virtual host."""
        return kind(super_stream, self.database_url, vhost="/" if self.broker is None else self.address.vhost)

    def moving(self, kind: type[T], super_stream: str) -> T:
        """The contexts or sets of a super stream, with the broker that moving them needs."""
        return kind(super_stream, self.database_url, broker=self.broker_url, stream_url=self.stream_url)


@dataclass(frozen=True, slots=True)
class ContextsOptions(ContextsServers):
    """Where a super stream's contexts, or affinity sets, are, and whether to print JSON."""

    as_json: JsonOption = False

    def show_moves(self, move: Callable[..., Sequence[Move]], *arguments: Any, what: str = "context") -> None:
        """Call what moves contexts, or sets, and print what came of it."""
        with _shown_progress(is_quiet=self.as_json, what=what) as progress:
            moves = move(*arguments, progress=progress)
        if self.as_json:
            print_json([move_document(each) for each in moves])
            return
        if not moves:
            console.print("Nothing had to move.")
            return
        pauses = sorted(each.pause_s or 0.0 for each in moves)
        console.print(
            f"{counted(sum(each.contexts for each in moves), what)} in {counted(len(moves), 'move')}; they stood still "
            f"for {pauses[len(pauses) // 2] * 1e3:,.0f} ms (median), at most {pauses[-1] * 1e3:,.0f} ms."
        )
        for each in moves:
            if each.aborting:
                console.print(f"Move {each.move_id} was taken back: its {what}s are in {each.source}.")


def move_document(move: Move) -> dict[str, Any]:
    """A move for `--json`."""
    return {**asdict(move), "pause_s": move.pause_s, "is_attended": move.is_attended}


def print_moves(moves: Sequence[Move]) -> None:
    """Print moves for people."""
    columns = {
        "move": lambda move: str(move.move_id),
        "contexts": "contexts",
        "from": "source",
        "to": "target",
        "state": state_text,
        "started": "started_at",
        "pause": pause_text,
        "held by": _holder_text,
    }
    print_rows(moves, columns, whole=("move", "contexts", "state", "pause"))


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def state_text(move: Move) -> str:
    """A move's state in words."""
    return f"{move.state}, going back" if move.aborting and not move.state.is_ended else str(move.state)


def pause_text(move: Move) -> str:
    """How long a move's contexts stood still."""
    return "–" if move.pause_s is None else f"{move.pause_s * 1e3:,.0f} ms"


def _holder_text(move: Move) -> str:
    if move.state.is_ended:
        return "–"
    return (move.holder or "–") if move.is_attended else "nobody"


@contextmanager
def _shown_progress(*, is_quiet: bool, what: str) -> Iterator[Progress]:
    """A function to call with progress: it moves a bar on stderr, and prints a line for each move that has ended."""
    if is_quiet:
        yield lambda progress: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{what}s"),
    )
    with Bar(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("moving", total=None)

        def tell(progress: MoveProgress) -> None:
            bar.update(task, total=progress.contexts_all, completed=progress.contexts_done)
            move = progress.move
            if move.state.is_ended:
                line = f"move {move.move_id}: {counted(move.contexts, what)}, {move.source} to {move.target}"
                bar.console.print(f"{line}, {move.state}, {pause_text(move)}")

        yield tell
