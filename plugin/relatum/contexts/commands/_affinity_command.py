"""`relatum affinity`: the affinity sets of a super stream: listed, counted, shown, closed and moved."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from relatum.contexts import AffinitySet, AffinitySets, MoveProgress
from relatum.errors import InvalidInput
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    StreamUrlOption,
    SuperStreamArgument,
    console,
    errors,
    parse_span,
    print_json,
    require_broker,
    require_database,
    table_of,
)

affinity = typer.Typer(
    help="List, count, show, close and move affinity sets.", no_args_is_help=True, rich_markup_mode="markdown"
)

NamesArgument: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]…", help="The sets' names.", show_default=False)
]


@contextmanager
def _opened(
    super_stream: str, database: str | None, broker: str | None, stream_url: str | None = None
) -> Iterator[AffinitySets]:
    with AffinitySets(super_stream, require_database(database), broker=broker, stream_url=stream_url) as sets:
        yield sets


@affinity.command("list")
def list_sets(
    super_stream: SuperStreamArgument,
    prefix: Annotated[str, typer.Option(help="Only sets whose names begin so.", show_default=False)] = "",
    partition: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Only sets in this partition.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 1_000,
    broker: BrokerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the open sets, by name. The broker's URL only tells the virtual host. `--json` prints a list."""
    with _opened(super_stream, database, broker) as sets:
        found = sets.list(prefix, partition=partition, limit=limit)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    if not found:
        console.print("No such set is open.")
        return
    table = table_of("set", "partition", "state", "opened", "last used")
    for each in found:
        state = each.state if each.move_id is None else f"{each.state} (move {each.move_id})"
        cells = (each.name, each.partition, state, _moment(each.opened_at), _moment(each.used_at))
        table.add_row(*map(Text, cells))
    console.print(table)


@affinity.command("count")
def count(
    super_stream: SuperStreamArgument,
    broker: BrokerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the open sets of each partition. `--json` prints one document: the number by partition."""
    with _opened(super_stream, database, broker) as sets:
        counts = sets.count()
    if as_json:
        print_json(counts)
        return
    table = table_of("partition", "open sets")
    for stream, number in counts.items():
        table.add_row(Text(stream), f"{number:,}")
    table.add_row("all", f"{sum(counts.values()):,}", style="bold")
    console.print(table)


@affinity.command("show")
def show(
    super_stream: SuperStreamArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The set's name.", show_default=False)],
    broker: BrokerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one open set. `--json` prints one document."""
    with _opened(super_stream, database, broker) as sets:
        found = sets.inspect(name)
    if as_json:
        print_json(asdict(found))
        return
    table = Table(title=Text(found.name, style="bold"), title_justify="left", show_header=False)
    for label, value in _facts(found):
        table.add_row(label, Text(value))
    console.print(table)


@affinity.command("close")
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
    broker: BrokerOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close sets, by name or because nobody uses them; what is published under their names then begins new ones.

    `--json` prints one document: the number of closed sets.
    """
    if bool(names) == (idle is not None):
        raise typer.BadParameter("give names, or --idle")
    with _opened(super_stream, database, broker) as sets:
        if idle is not None:
            closed = sets.close_idle(parse_span(idle))
        else:
            closed = len([sets.close_set(name) for name in dict.fromkeys(names or ())])
    if as_json:
        print_json({"closed": closed})
        return
    console.print(f"{closed:,} closed")


@affinity.command("move")
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
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move sets to another partition; their messages wait meanwhile, and consumers see them in order.

    `--json` prints one document: the list of the moves.
    """
    if not to or bool(names) == (source is not None):
        raise typer.BadParameter("give names, or --from, and --to")
    with _opened(super_stream, database, require_broker(broker), stream_url) as sets:
        wanted = list(names or ()) or [each.name for each in sets.list(partition=source, limit=None)]
        moves = sets.move(wanted, to, progress=_tell) if wanted else ()
    if as_json:
        print_json([asdict(each) for each in moves])
        return
    moved = sum(each.contexts for each in moves)
    pause = max((each.pause_s or 0.0 for each in moves), default=0.0)
    console.print(f"{moved:,} moved to {to}; the longest pause was {pause * 1e3:,.0f} ms", markup=False)


@affinity.command("weight")
def weight(
    super_stream: SuperStreamArgument,
    weights: Annotated[
        list[str], typer.Argument(metavar="STREAM=WEIGHT…", help="Partitions and their weights.", show_default=False)
    ],
    broker: BrokerOption = None,
    database: DatabaseOption = None,
) -> None:
    """Set the weights of partitions, for routers that balance by weight; with 0 no new set is placed there."""
    with _opened(super_stream, database, broker) as sets:
        sets.set_weights(dict(map(_weight, weights)))


def _weight(text: str) -> tuple[str, float]:
    stream, _, number = text.rpartition("=")
    try:
        return stream, float(number)
    except ValueError:
        raise InvalidInput(f"{text!r} is no weight: write STREAM=WEIGHT, such as orders-0=2.5") from None


def _tell(progress: MoveProgress) -> None:
    move = progress.move
    errors.print(
        f"move {move.move_id}, {move.contexts:,} sets from {move.source} to {move.target}: {move.state}; "
        f"{progress.contexts_done:,} of {progress.contexts_all:,} done",
        markup=False,
    )


def _facts(found: AffinitySet) -> list[tuple[str, str]]:
    return [
        ("partition", found.partition),
        ("state", found.state if found.move_id is None else f"{found.state} (move {found.move_id})"),
        ("epoch", f"{found.epoch:,}"),
        ("opened", _moment(found.opened_at)),
        ("last used", _moment(found.used_at)),
    ]


def _moment(moment: Any) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S %Z}" if isinstance(moment, datetime) else "–"
