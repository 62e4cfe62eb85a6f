"""What the commands of contexts and of affinity sets share: where these are, and how they are shown."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from relatum.contexts import AffinitySets, ContextsStatus, Move, MoveProgress, SerializationContexts
from relatum.terminal import JsonOption, ServerOptions, console, errors, moment_text, print_json, table_of


@dataclass(frozen=True, slots=True)
class ContextsServers(ServerOptions):
    """Where a super stream's contexts, or affinity sets, are."""

    def contexts(self, super_stream: str) -> SerializationContexts:
        """The contexts of a super stream; a broker is only asked where the database does not know it yet."""
        return SerializationContexts(super_stream, self.database_url, broker=self.broker, stream_url=self.stream_url)

    def looked_at(self, super_stream: str) -> SerializationContexts:
        """The contexts as the database has them, and nothing is written; the broker only tells the virtual host."""
        return SerializationContexts(super_stream, self.database_url, vhost=self._vhost)

    def moving(self, super_stream: str) -> SerializationContexts:
        """The contexts of a super stream, with a broker."""
        url, database = self.broker_url, self.database_url
        return SerializationContexts(super_stream, database, broker=url, stream_url=self.stream_url)

    def sets(self, super_stream: str) -> AffinitySets:
        """The sets of a super stream; the broker only tells the virtual host."""
        return AffinitySets(super_stream, self.database_url, vhost=self._vhost)

    @property
    def _vhost(self) -> str:
        return "/" if self.broker is None else self.address.vhost


@dataclass(frozen=True, slots=True)
class ContextsOptions(ContextsServers):
    """Where a super stream's contexts, or affinity sets, are, and whether to print JSON."""

    as_json: JsonOption = False


def print_rows(columns: Collection[str], rows: Iterable[Iterable[object]], *, whole: Collection[str] = ()) -> None:
    """Print a table; numbers have their thousands apart."""
    table = table_of(*columns, whole=whole)
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    console.print(table)


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
    columns = ("partition", "contexts", "state", "weight", "binding key")
    rows = [(row.stream, row.open_sets, row.state, f"{row.weight:g}", row.binding_key) for row in status.partitions]
    print_rows(columns, rows)
    console.print(f"Contexts are named by the header {status.header}.")
    if status.moves:
        print_moves(status.moves)


def print_moves(moves: Sequence[Move]) -> None:
    """Print moves for people."""
    columns = ("move", "contexts", "from", "to", "state", "started", "pause", "held by")
    rows = []
    for move in moves:
        holder = (move.holder or "–") if move.is_attended else "nobody"
        ends = (pause_text(move), "–" if move.state.is_ended else holder)
        places = (move.source, move.target, state_text(move))
        rows.append((str(move.move_id), move.contexts, *places, moment_text(move.started_at), *ends))
    print_rows(columns, rows, whole=("move", "contexts", "state", "pause"))


def print_ended(moves: Sequence[Move], *, as_json: bool, what: str = "context") -> None:
    """Print what moves of contexts, or of sets, came to."""
    if as_json:
        print_json([move_document(move) for move in moves])
        return
    if not moves:
        console.print("Nothing had to move.")
        return
    moved = sum(move.contexts for move in moves)
    pauses = sorted(move.pause_s or 0.0 for move in moves)
    console.print(
        f"{counted(moved, what)} in {counted(len(moves), 'move')}; they stood still for "
        f"{pauses[len(pauses) // 2] * 1e3:,.0f} ms (median), at most {pauses[-1] * 1e3:,.0f} ms."
    )
    for move in moves:
        if move.aborting:
            console.print(f"Move {move.move_id} was taken back: its {what}s are in {move.source}.")


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def state_text(move: Move) -> str:
    """A move's state in words."""
    return f"{move.state}, going back" if move.aborting and not move.state.is_ended else str(move.state)


def pause_text(move: Move) -> str:
    """How long a move's contexts stood still."""
    return "–" if move.pause_s is None else f"{move.pause_s * 1e3:,.0f} ms"


@contextmanager
def shown_progress(*, is_quiet: bool, what: str = "context") -> Iterator[Callable[[MoveProgress], None]]:
    """Something to be told of progress: a bar on stderr, and a line for each move that has ended."""
    if is_quiet:
        yield lambda progress: None
        return
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{what}s"),
    ]
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("moving", total=None)

        def tell(progress: MoveProgress) -> None:
            bar.update(task, total=progress.contexts_all, completed=progress.contexts_done)
            move = progress.move
            if move.state.is_ended:
                line = f"move {move.move_id}: {counted(move.contexts, what)}, {move.source} to {move.target}"
                bar.console.print(f"{line}, {move.state}, {pause_text(move)}")

        yield tell
