"""What the commands for contexts and affinity sets share: the super stream's options, and the output of moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from relatum.contexts import Move, MoveProgress, SerializationContexts
from relatum_cli.options import Json, ServerOptions, argument, shared
from relatum_cli.show import Cells, counted, progress_bars, say, show, with_properties

T = TypeVar("T", bound=SerializationContexts)

LIST_MAX: Final = 1_000
"""How many contexts or sets are listed by default."""

Partition = Annotated[str | None, shared("Only in this partition.", metavar="STREAM")]
Limit = Annotated[int, shared("The most to list.", min=1, shown=True)]


@dataclass(frozen=True)
class Place(ServerOptions):
    """The super stream of a command for contexts or affinity sets."""

    super_stream: str = argument("The super stream's name.", "SUPER_STREAM")

    def looking(self, kind: type[T]) -> T:
        """Open the contexts or sets in the database. The broker's URL is used only for its virtual host."""
        return kind(self.super_stream, self.database_url, vhost=self.vhost)

    def moving(self, kind: type[T]) -> T:
        """Open the contexts or sets with the broker, which moves need."""
        return kind(self.super_stream, self.database_url, broker=self.broker)


@dataclass(frozen=True)
class SuperStreamOptions(Place):
    """The super stream of a command, and `--json`."""

    as_json: Json = False

    def show_moves(self, move: Callable[..., Sequence[Move]], *arguments: Any, what: str = "context") -> None:
        """Call a function that moves contexts or sets, and print the result."""
        with progress_bars(f"{what}s") as update:

            def on_progress(progress: MoveProgress) -> None:
                update("moving", progress.contexts_done, progress.contexts_all)

            moves = move(*arguments, progress=on_progress)
        print_moves(moves, as_json=self.as_json, empty="Nothing had to move.")
        if moves and not self.as_json:
            say(f"{counted(sum(each.contexts for each in moves), what)} in {counted(len(moves), 'move')}.")


def move_document(move: Move) -> dict[str, Any]:
    return with_properties(move, "pause_s", "is_attended")


def print_moves(moves: Sequence[Move], *, as_json: bool = False, empty: str = "No move is in progress.") -> None:
    columns: Cells = {
        "move": lambda move: str(move.move_id),
        "contexts": "contexts",
        "from": "source",
        "to": "target",
        "state": lambda move: str(move.state) + (", going back" if move.aborting and not move.state.is_ended else ""),
        "started": "started_at",
        "pause": lambda move: None if move.pause_s is None else f"{move.pause_s * 1e3:,.0f} ms",
        "held by": _holder_text,
    }
    whole = ("move", "contexts", "state", "pause")
    show(moves, columns, as_json=as_json, empty=empty, whole=whole, document_of=move_document)


def _holder_text(move: Move) -> str | None:
    if move.state.is_ended:
        return None
    return move.holder if move.is_attended else "none"
