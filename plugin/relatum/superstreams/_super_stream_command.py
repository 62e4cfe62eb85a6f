"""`relatum super-stream`: make, describe and delete super streams, and tell where keys go."""

from datetime import timedelta
from typing import Annotated, Any

import typer

from relatum.superstreams import (
    Layout,
    Partition,
    StreamOptions,
    declare_super_stream,
    delete_super_stream,
    describe_super_stream,
)
from relatum.terminal import (
    BrokerOption,
    JsonOption,
    StreamUrlOption,
    confirm,
    console,
    parse_span,
    print_json,
    require_broker,
    table_of,
)

super_stream = typer.Typer(
    help="Make, describe and delete super streams, and tell where keys go.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The super stream's name.", show_default=False)]


def _document(partition: Partition) -> dict[str, Any]:
    return {"place": partition.place, "stream": partition.stream, "binding_key": partition.binding_key}


def _print_layout(layout: Layout, *, as_json: bool) -> None:
    if as_json:
        partitions = [_document(partition) for partition in layout]
        print_json({"super_stream": layout.super_stream, "partitions": partitions})
        return
    table = table_of("place", "stream", "binding key")
    for partition in layout:
        table.add_row(str(partition.place), partition.stream, partition.binding_key)
    console.print(table)


@super_stream.command("declare")
def declare(
    name: _NameArgument,
    partitions: Annotated[
        int | None,
        typer.Option(help="How many partitions; 3 where neither they nor keys are given.", show_default=False),
    ] = None,
    binding_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--binding-key",
            metavar="KEY",
            help="A partition's binding key, where they are not to be numbers. Repeat it, in the partitions' order.",
            show_default=False,
        ),
    ] = None,
    max_length_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="What a stream keeps, at least.", show_default=False)
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="For how long, at least: seconds, or 15m, 6h, 7d.", show_default=False),
    ] = None,
    segment_bytes_max: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Bytes of a segment.", show_default=False)
    ] = None,
    leader_locator: Annotated[
        str | None, typer.Option(help="Where leaders are put: client-local, balanced.", show_default=False)
    ] = None,
    initial_cluster_size: Annotated[
        int | None, typer.Option(help="How many nodes have a copy of a stream.", show_default=False)
    ] = None,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    as_json: JsonOption = False,
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
    layout = declare_super_stream(
        require_broker(broker),
        name,
        partitions,
        binding_keys=binding_keys or None,
        options=options,
        stream_url=stream_url,
    )
    _print_layout(layout, as_json=as_json)


@super_stream.command("describe")
def describe(
    name: _NameArgument, broker: BrokerOption = None, stream_url: StreamUrlOption = None, as_json: JsonOption = False
) -> None:
    """Show a super stream's partitions in their order. `--json` prints one document, as `declare` does.

    Where the stream protocol does not answer, only partitions NAME-0, NAME-1 and so on are seen.
    """
    _print_layout(describe_super_stream(require_broker(broker), name, stream_url=stream_url), as_json=as_json)


@super_stream.command("delete")
def delete(
    name: _NameArgument,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a super stream with all its streams and messages.

    It asks first. `--json` prints one document, what was deleted, as `declare` does; it needs `--yes`.
    """
    url = require_broker(broker)
    if not sure:
        if as_json:
            raise typer.BadParameter("--json deletes without asking, so it needs --yes")
        layout = describe_super_stream(url, name, stream_url=stream_url)
        streams = ", ".join(partition.stream for partition in layout)
        confirm(f"Delete {name} and all messages in {streams}?")
    layout = delete_super_stream(url, name, stream_url=stream_url)
    if as_json:
        _print_layout(layout, as_json=True)
        return
    console.print(f"{name} and its {len(layout)} streams are deleted.")


@super_stream.command("route")
def route(
    name: _NameArgument,
    keys: Annotated[list[str], typer.Argument(metavar="KEY…", help="Keys of messages.", show_default=False)],
    partitions: Annotated[
        int | None,
        typer.Option(help="For so many partitions NAME-0, NAME-1 and so on; no broker is asked.", show_default=False),
    ] = None,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell which partition messages of a key go to.

    It is the rule of RabbitMQ's stream clients for Java, Go, .NET and Rust. `--json` prints one document: a list, each
    with key, place, stream and binding_key.
    """
    layout = (
        describe_super_stream(require_broker(broker), name, stream_url=stream_url)
        if partitions is None
        else Layout.numbered(name, partitions)
    )
    routed = [(key, layout.route(key)) for key in keys]
    if as_json:
        print_json([{"key": key, **_document(partition)} for key, partition in routed])
        return
    for key, partition in routed:
        console.print(f"{key}: {partition.stream}", soft_wrap=True)
