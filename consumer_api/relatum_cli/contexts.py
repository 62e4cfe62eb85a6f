"""`relatum contexts`: shows, assigns, moves and verifies a super stream's contexts; options shared with `affinity`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

import typer

from relatum.contexts import HoldStatus, Move, SerializationContexts, SerialReport, forget_consumer
from relatum.contexts import consumers as read_consumers
from relatum.contexts import verify as run_verify
from relatum.errors import NotFound, RelatumError
from relatum.superstreams import describe_super_stream
from relatum_cli.exits import ExitCode
from relatum_cli.options import Commands, Json, ServerOptions, argument, option, shared
from relatum_cli.show import Cells, answer, counted, note, print_json, progress_bars, say, show, with_properties

contexts = Commands()

T = TypeVar("T", bound=SerializationContexts)

LIST_MAX: Final = 1_000
"""Default number of contexts or sets to list."""

FINDINGS_SHOWN: Final = 20
"""Maximum number of findings printed as text."""

HEADER: Final = "The header that names contexts; by default that in the database, or serialization_context."

Partition = Annotated[str | None, shared("Only those in this partition.", metavar="STREAM")]
Limit = Annotated[int, shared("The maximum number to list.", min=1, shown=True)]
Names = Annotated[list[str], argument("The contexts' names.", "CONTEXT…")]
To = Annotated[str, shared("The target partition.", "--to", metavar="STREAM")]


@dataclass(frozen=True)
class PlacementOptions(ServerOptions):
    """The options of a command for contexts or affinity sets: servers and super stream."""

    super_stream: str = argument("The super stream's name.", "SUPER_STREAM")

    def open_stored(self, kind: type[T]) -> T:
        """Open the contexts or sets in the database. The broker's URL is used only for its virtual host."""
        return kind(self.super_stream, self.database_url, vhost=self.vhost)

    def open_with_broker(self, kind: type[T]) -> T:
        """Open the contexts or sets with the broker, which moves need."""
        return kind(self.super_stream, self.database_url, broker=self.broker)


@dataclass(frozen=True)
class SuperStreamOptions(PlacementOptions):
    """`PlacementOptions`, and `--json`."""

    as_json: Json = False

    def show_moves(self, move: Callable[..., Sequence[Move]], *arguments: Any, noun: str = "context") -> None:
        """Call a function that moves contexts or sets, and print the result."""
        with progress_bars(f"{noun}s") as update:
            moves = move(*arguments, progress=lambda each: update("moving", each.contexts_done, each.contexts_all))
        print_moves(moves, as_json=self.as_json, empty="Nothing had to move.")
        if moves and not self.as_json:
            say(f"{counted(sum(each.contexts for each in moves), noun)} in {counted(len(moves), 'move')}.")


def one_by_one(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return the function's result for each item. If one raises an error, stderr says which items were done before."""
    results: list[Any] = []
    for item in items:
        try:
            results.append(function(item))
        except RelatumError:
            if results:
                note(f"done before the error: {', '.join(map(str, items[: len(results)]))}")
            raise
    return results


def move_document(move: Move) -> dict[str, Any]:
    return with_properties(move, "pause_s", "is_attended")


def print_moves(moves: Sequence[Move], *, as_json: bool = False, empty: str = "No move is in progress.") -> None:
    columns: Cells = {
        "move": lambda move: str(move.move_id),
        "contexts": "contexts",
        "from": "source",
        "to": "target",
        "state": lambda move: str(move.state) + (", aborting" if move.aborting and not move.state.is_ended else ""),
        "started": "started_at",
        "pause": lambda move: None if move.pause_s is None else f"{move.pause_s * 1e3:,.0f} ms",
        "held by": lambda move: None if move.state.is_ended else move.holder if move.is_attended else "none",
    }
    whole = ("move", "contexts", "state", "pause")
    show(moves, columns, as_json=as_json, empty=empty, whole=whole, document_of=move_document)


@contexts.command()
def status(*, given: SuperStreamOptions) -> None:
    """Show the partitions with their contexts, and the moves in progress. `--json` prints one document."""
    with given.open_stored(SerializationContexts) as opened:
        found = opened.status()
    if given.as_json:
        print_json(asdict(found) | {"moves": [move_document(move) for move in found.moves]})
        return
    names = {"partition": "stream", "contexts": "open_sets", "state": "state", "binding key": "binding_key"}
    show(found.partitions, {**names, "weight": lambda row: f"{row.weight:g}"})
    say(f"Contexts are named by the header {found.header}.")
    if found.moves:
        print_moves(found.moves)


@contexts.command("list")
def list_contexts(*, partition: Partition = None, limit: Limit = LIST_MAX, given: SuperStreamOptions) -> None:
    """List contexts by name, each with its partition. `--json` prints JSON lines."""
    with given.open_stored(SerializationContexts) as opened:
        show(islice(opened.assignments(partition), limit), _ASSIGNED, as_json=given.as_json, json_lines=True)


@contexts.command("show")
def show_contexts(*, names: Names, given: SuperStreamOptions) -> None:
    """Show the partitions of contexts. Exits with code 6 if a context has no partition. `--json` prints JSON lines."""
    with given.open_stored(SerializationContexts) as opened:
        found = [opened.assignment_of(name) for name in names]
    show(found, _ASSIGNED, as_json=given.as_json, json_lines=True)


@contexts.command()
def assign(*, to: To, names: Names, given: SuperStreamOptions) -> None:
    """Assign contexts to a partition before their first messages.

    Does not move a context that has another partition: exits with code 7. `--json` prints JSON lines.
    """
    # The broker is queried only if the super stream is not in the database yet.
    broker = given.broker if given.broker_url else None
    with SerializationContexts(given.super_stream, given.database_url, broker=broker) as opened:
        show(opened.assign(names, to), _ASSIGNED, as_json=given.as_json, json_lines=True)


_ASSIGNED: Final[Cells] = {
    "context": "context",
    "partition": "partition",
    "epoch": lambda each: str(each.epoch),
    "move": lambda each: str(each.move_id or "–"),
}


@contexts.command()
def move(
    *,
    to: To,
    names: list[str] | None = argument("The contexts' names.", "[CONTEXT]…", default=None),
    file: typer.FileText | None = option(None, "A file with one name per line; - is stdin.", encoding="utf-8"),
    given: SuperStreamOptions,
) -> None:
    """Move contexts to another partition. Publishers and consumers continue during the move.

    `--json` prints one document: the list of the moves.
    """
    if bool(names) == (file is not None):
        raise typer.BadParameter("give either names or --file")
    try:
        wanted = names if file is None else [line for line in file.read().split("\n") if line]
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{str(file)!r} cannot be read: it is not UTF-8 text") from error
    with given.open_with_broker(SerializationContexts) as opened:
        given.show_moves(opened.move, wanted, to)


@contexts.command()
def consolidate(
    *, sources: list[str] = argument("The partitions to empty.", "STREAM…"), to: To, given: SuperStreamOptions
) -> None:
    """Move all contexts of some partitions to one partition. `--json` prints one document: the list of the moves."""
    with given.open_with_broker(SerializationContexts) as opened:
        given.show_moves(opened.consolidate, sources, to)


@contexts.command()
def rebalance(
    *,
    over: list[str] | None = argument("The target partitions; all by default.", "[STREAM…]", default=None),
    dry_run: bool = option(False, "Only show how many contexts would move to which partition.", "--dry-run"),
    given: SuperStreamOptions,
) -> None:
    """Spread contexts evenly over partitions.

    `--json` prints one document: the list of the moves, or with `--dry-run` the contexts by target partition.
    """
    with given.open_with_broker(SerializationContexts) as opened:
        planned = opened.plan(over or None)
        if not dry_run:
            given.show_moves(opened.rebalance, planned)
            return
    lines = [f"{counted(len(names), 'context')} would move to {stream}." for stream, names in planned.moves.items()]
    answer(planned.moves, *(lines or ["The contexts are spread evenly."]), as_json=given.as_json)


@contexts.command("moves")
def list_moves(
    *,
    latest: int | None = option(None, "Show this many of the latest moves, including ended moves.", min=1),
    given: SuperStreamOptions,
) -> None:
    """Show the moves in progress, and the process that runs each. `--json` prints one document."""
    with given.open_stored(SerializationContexts) as opened:
        found = opened.moves(latest=latest)
    print_moves(found, as_json=given.as_json)


@contexts.command()
def resume(
    *,
    moves: list[int] | None = argument(
        "The moves' numbers; all moves in progress by default.", "[MOVE…]", default=None
    ),
    given: SuperStreamOptions,
) -> None:
    """Resume moves whose process died. Safe to run several times concurrently.

    `--json` prints one document: the list of the moves as they ended.
    """
    with given.open_with_broker(SerializationContexts) as opened:
        wanted = moves or [move.move_id for move in opened.moves()]
        given.show_moves(lambda progress: one_by_one(partial(opened.resume, progress=progress), wanted))


@contexts.command()
def abort(
    *,
    moves: list[int] = argument("The moves' numbers.", "MOVE…"),
    reason: str | None = option(None, "The reason, which is stored with the move."),
    given: SuperStreamOptions,
) -> None:
    """Abort moves: their contexts stay in their partitions. `--json` prints one document, the list of the moves."""
    with given.open_with_broker(SerializationContexts) as opened:
        given.show_moves(lambda progress: one_by_one(partial(opened.abort, reason=reason, progress=progress), moves))


@contexts.command()
def add_partition(
    *,
    count: int = option(1, "Number of partitions to add.", min=1, max=1_000),
    binding_key: list[str] | None = option(None, "A new partition's binding key; the next number by default."),
    given: SuperStreamOptions,
) -> None:
    """Add empty partitions. Contexts stay where they are; `rebalance` spreads them.

    `--json` prints one document: the list of the new streams.
    """
    with given.open_with_broker(SerializationContexts) as opened:
        added = opened.add_partitions(count, binding_keys=binding_key or None)
    answer(added, f"Added {', '.join(added)}.", as_json=given.as_json)


@contexts.command()
def retire(
    *,
    partition: str = argument("The partition.", "STREAM"),
    delete: bool = option(False, "Also delete the stream, after all consumers have read all partitions.", "--delete"),
    timeout_s: float = option(30.0, "With --delete, seconds to wait for consumers.", min=0),
    given: PlacementOptions,
) -> None:
    """Retire a partition that has no contexts. Exits with code 7 while the partition is needed."""
    with given.open_with_broker(SerializationContexts) as opened:
        opened.retire(partition, delete=delete, timeout_s=timeout_s)
    say(f"{partition} is {'deleted' if delete else 'retired; its messages stay'}.")


@contexts.command()
def consumers(*, given: SuperStreamOptions) -> None:
    """Show each serial consumer's position in each partition, and the messages that it holds back for moves.

    `--json` prints JSON lines: consumer, lag, and its partitions with their holds.
    """
    broker = given.broker
    found = read_consumers(given.super_stream, broker=broker, database=given.database_url)
    if not found:
        # This raises an error for a misspelled name, which has no consumers either.
        describe_super_stream(broker, given.super_stream)
    if given.as_json:
        for name, each in found.items():
            print_json({"consumer": name, "lag": each.lag, "partitions": each.partitions}, one_line=True)
        return
    columns: Cells = {
        "consumer": lambda row: row[0],
        "partition": lambda row: row[1].stream,
        "position": lambda row: row[1].position,
        "lag": lambda row: row[1].lag,
        "member": lambda row: row[1].holder or "none",
        "held back": lambda row: "; ".join(map(_held_text, row[1].holds)),
    }
    rows = [(name, each) for name, status in found.items() for each in status.partitions]
    show(rows, columns, empty="The super stream has no serial consumers.")


def _held_text(hold: HoldStatus) -> str:
    held = f"{hold.held:,} of move {hold.move_id} for {hold.seconds:,.1f} s"
    if hold.is_over:
        return f"{held}, until a member consumes this partition"
    return f"{held}, until {hold.source} is consumed past {hold.fence_offset}"


@contexts.command()
def forget(*, name: str = argument("The consumer's name.", "CONSUMER"), given: PlacementOptions) -> None:
    """Forget a consumer that is no longer used: partitions can then be retired without waiting for it.

    Exits with code 6 if there is no consumer of that name, and with code 7 while its members run.
    """
    if not forget_consumer(given.super_stream, name, database=given.database_url, vhost=given.vhost):
        raise NotFound(f"{given.super_stream!r} has no consumer {name!r}: `relatum contexts consumers` lists them")
    say(f"{name} is forgotten.")


@contexts.command()
def verify(*, header: str | None = option(None, HEADER, metavar="NAME"), given: SuperStreamOptions) -> None:
    """Read all partitions, and check that each context's messages count once, in the order of publishing.

    Without a database it reads only the streams: it leaves out retired partitions, and if retention has dropped a
    fence, it counts strays behind that fence as valid. Exits with code 7 if the order is broken. Strays that no process
    adopted are shown, but are not a fault. `--json` prints one document: ok, totals, partitions (from and to offset),
    counts by kind, findings.
    """
    broker = given.broker
    with progress_bars("messages") as update:
        report = run_verify(
            given.super_stream,
            broker=broker,
            database=given.database,
            header=header,
            progress=lambda report: update("reading", report.messages, None),
        )
    if given.as_json:
        print_json(with_properties(report, "ok"))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(ExitCode.DIFFERENT)


def _print_report(report: SerialReport) -> None:
    broken = sum(count for kind, count in report.counts.items() if not kind.is_notice)
    say(
        f"{report.super_stream}: {counted(report.messages, 'message')} of {counted(report.contexts, 'context')} in "
        f"{counted(len(report.partitions), 'partition')}, {counted(report.moves, 'move')}, "
        f"{counted(report.strays, 'stray')} "
        f"({report.adopted:,} adopted): {f'{broken:,} faults' if broken else 'in order'}."
    )
    if report.unplaced:
        say(f"{report.unplaced:,} of the messages were published without a router, so their order is not checked.")
    if report.findings:
        found = sorted(report.findings, key=lambda each: each.kind.is_notice)[:FINDINGS_SHOWN]
        columns = {"what": "kind", "partition": "stream", "offset": "offset", "context": "context", "found": "text"}
        show(found, columns)
        more = sum(report.counts.values()) - FINDINGS_SHOWN
        if more > 0:
            say(f"and {more:,} more; --json lists up to 1,000 of a kind.")
