"""`relatum super-stream`: make, describe and delete super streams, and tell where keys go."""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

import typer

from relatum.superstreams import Layout, StreamOptions, declare_super_stream, delete_super_stream, describe_super_stream
from relatum.terminal import (
    BrokerOptions,
    JsonOption,
    argument,
    confirm,
    console,
    option,
    parse_span,
    print_json,
    print_rows,
    spread,
)

super_stream = typer.Typer(
    help="Make, describe and delete super streams, and tell where keys go.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_NameArgument = Annotated[str, argument("NAME", "The super stream's name.")]


@dataclass(frozen=True, slots=True)
class _Options(BrokerOptions):
    as_json: JsonOption = False

    def described(self, name: str) -> Layout:
        return describe_super_stream(self.broker_url, name, stream_url=self.stream_url)

    def show(self, layout: Layout) -> None:
        if self.as_json:
            print_json(layout)
        else:
            columns = {"place": lambda row: str(row.place), "stream": "stream", "binding key": "binding_key"}
            print_rows(layout, columns)


@super_stream.command()
@spread
def declare(
    name: _NameArgument,
    partitions: Annotated[int | None, option("How many partitions; 3 where neither they nor keys are given.")] = None,
    binding_keys: Annotated[
        list[str] | None,
        option(
            "A partition's binding key, where they are not to be numbers. Repeat it, in the partitions' order.",
            "--binding-key",
            metavar="KEY",
        ),
    ] = None,
    max_length_bytes: Annotated[int | None, option("What a stream keeps, at least.", metavar="BYTES")] = None,
    max_age: Annotated[str | None, option("For how long, at least: seconds, or 15m, 6h, 7d.", metavar="SPAN")] = None,
    segment_bytes_max: Annotated[int | None, option("Bytes of a segment.", metavar="BYTES")] = None,
    leader_locator: Annotated[str | None, option("Where leaders are put: client-local, balanced.")] = None,
    initial_cluster_size: Annotated[int | None, option("How many nodes have a copy of a stream.")] = None,
    *,
    given: _Options,
) -> None:
    """Make a super stream; one that is there as asked for stays as it is.

    `--json` prints one document: super_stream, partitions (each with place, stream, binding_key).
    """
    options = StreamOptions(
        max_length_bytes=max_length_bytes,
        max_age=None if max_age is None else timedelta(seconds=parse_span(max_age)),
        segment_bytes_max=segment_bytes_max,
        leader_locator=leader_locator,
        initial_cluster_size=initial_cluster_size,
    )
    keys, stream_url = binding_keys or None, given.stream_url
    given.show(
        declare_super_stream(
            given.broker_url, name, partitions, binding_keys=keys, options=options, stream_url=stream_url
        )
    )


@super_stream.command()
@spread
def describe(name: _NameArgument, *, given: _Options) -> None:
    """Show a super stream's partitions in their order. `--json` prints one document, as `declare` does.

    Where the stream protocol does not answer, only partitions NAME-0, NAME-1 and so on are seen.
    """
    given.show(given.described(name))


@super_stream.command()
@spread
def delete(
    name: _NameArgument,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    given: _Options,
) -> None:
    """Delete a super stream with all its streams and messages.

    It asks first. `--json` prints one document, what was deleted, as `declare` does; it needs `--yes`.
    """
    if not sure:
        if given.as_json:
            raise typer.BadParameter("--json deletes without asking, so it needs --yes")
        streams = ", ".join(partition.stream for partition in given.described(name))
        confirm(f"Delete {name} and all messages in {streams}?")
    layout = delete_super_stream(given.broker_url, name, stream_url=given.stream_url)
    if given.as_json:
        given.show(layout)
    else:
        console.print(f"{name} and its {len(layout)} streams are deleted.")


@super_stream.command()
@spread
def route(
    name: _NameArgument,
    keys: Annotated[list[str], argument("KEY…", "Keys of messages.")],
    partitions: Annotated[
        int | None, option("For so many partitions NAME-0, NAME-1 and so on; no broker is asked.")
    ] = None,
    *,
    given: _Options,
) -> None:
    """Tell which partition messages of a key go to.

    It is the rule of RabbitMQ's stream clients for Java, Go, .NET and Rust. `--json` prints one document: a list, each
    with key, place, stream and binding_key.
    """
    layout = given.described(name) if partitions is None else Layout.numbered(name, partitions)
    routed = [(key, layout.route(key)) for key in keys]
    if given.as_json:
        print_json([{"key": key, **asdict(partition)} for key, partition in routed])
        return
    for key, partition in routed:
        console.print(f"{key}: {partition.stream}", soft_wrap=True)
