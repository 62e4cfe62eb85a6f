"""`relatum contexts consumers` and `relatum contexts forget`: the names that consume a super stream in order."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from relatum.contexts import HoldStatus, SerialStatus, forget_consumer
from relatum.contexts import consumers as read_consumers
from relatum.contexts.commands._contexts_options import ContextsOptions
from relatum.reading import BrokerAddress
from relatum.superstreams import describe_super_stream
from relatum.terminal import (
    BrokerOption,
    DatabaseOption,
    ExitCode,
    SuperStreamArgument,
    console,
    print_error,
    print_json,
    require_database,
    spread,
    table_of,
)


@spread
def consumers(
    super_stream: SuperStreamArgument,
    *,
    given: ContextsOptions,
) -> None:
    """Show how far each serial consumer is in each partition, and what it holds back until a source is consumed.

    `--json` prints JSON lines: consumer, lag, and its partitions with their holds.
    """
    url = given.broker_url
    found = read_consumers(super_stream, database=given.database_url, broker=url, stream_url=given.stream_url)
    if not found:
        # Nobody consumes what is not there, either: a name that is spelled wrong is an error.
        describe_super_stream(url, super_stream, stream_url=given.stream_url)
    if given.as_json:
        for name, status in found.items():
            partitions = [asdict(partition) for partition in status.partitions]
            print_json({"consumer": name, "lag": status.lag, "partitions": partitions}, one_line=True)
    elif found:
        _print(found)
    else:
        console.print("Nobody consumes it in order.")


def forget(
    super_stream: SuperStreamArgument,
    name: Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name.", show_default=False)],
    broker: BrokerOption = None,
    database: DatabaseOption = None,
) -> None:
    """Forget a name that nobody consumes by any more, so that partitions can be retired without it.

    Ends with code 6 where there is none of that name, with code 7 where members of it are up.
    """
    vhost = "/" if broker is None else BrokerAddress.parse(broker).vhost
    if not forget_consumer(super_stream, name, database=require_database(database), vhost=vhost):
        print_error(f"no consumer {name!r} of {super_stream!r} is known")
        raise typer.Exit(ExitCode.NOT_THERE)


def _print(found: dict[str, SerialStatus]) -> None:
    table = table_of("consumer", "partition", "position", "lag", "member", "held back")
    for name, status in found.items():
        for partition in status.partitions:
            position = "–" if partition.position is None else f"{partition.position:,}"
            held = "; ".join(map(_held, partition.holds))
            cells = (name, partition.stream, position, f"{partition.lag:,}", partition.holder or "nobody", held)
            table.add_row(*map(Text, cells))
    console.print(table)


def _held(hold: HoldStatus) -> str:
    held = f"{hold.held:,} of move {hold.move_id} for {hold.seconds:,.1f} s"
    if hold.is_over:
        return f"{held}: go on once a member consumes here"
    return f"{held}, until {hold.source} is consumed past {hold.fence_offset}"
