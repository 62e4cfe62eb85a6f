"""`relatum super-stream`: declare, describe and delete super streams, and show where keys go."""

from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import typer

from relatum.superstreams import Layout, StreamOptions, declare_super_stream, delete_super_stream, describe_super_stream
from relatum_cli.moments import parse_span
from relatum_cli.options import BrokerOptions, Commands, Json, Yes, argument, option
from relatum_cli.show import answer, confirm, print_json, say, show

super_stream = Commands()

KEYS = "A partition's binding key, instead of a number. Repeat it in the order of the partitions."


@dataclass(frozen=True)
class StreamSettings:
    """The options with which streams are declared."""

    max_length_bytes: int | None = option(None, "How much a stream keeps, on each node.", metavar="BYTES")
    max_age: str | None = option(None, "How long it keeps messages: seconds, or 15m, 6h, 7d.", metavar="SPAN")
    segment_bytes_max: int | None = option(None, "How much it drops at a time.", metavar="BYTES")
    leader_locator: str | None = option(None, "Where leaders are placed: client-local, balanced.")
    initial_cluster_size: int | None = option(None, "How many nodes have a copy; all by default.")

    def over(self, defaults: StreamOptions) -> StreamOptions:
        """Return the options that were given, and the defaults for the others."""
        given: dict[str, Any] = {name: value for name, value in asdict(self).items() if value is not None}
        if self.max_age is not None:
            given["max_age"] = timedelta(seconds=parse_span(self.max_age))
        return replace(defaults, **given)


@dataclass(frozen=True)
class Options(BrokerOptions):
    """The options for a super stream, and its output."""

    name: str = argument("The super stream's name.", "NAME")
    as_json: Json = False

    def described(self) -> Layout:
        return describe_super_stream(self.broker, self.name)

    def show(self, layout: Layout) -> None:
        if self.as_json:
            print_json(layout)
        else:
            show(layout, "place stream binding_key")


@super_stream.command()
def declare(
    *,
    partitions: int | None = option(None, "How many partitions; by default one for each binding key, or 3."),
    binding_keys: list[str] | None = option(None, KEYS, "--binding-key", metavar="KEY"),
    settings: StreamSettings,
    given: Options,
) -> None:
    """Declare a super stream; an existing one with these options is kept.

    `--json` prints one document: super_stream, partitions (each with place, stream, binding_key).
    """
    options = settings.over(StreamOptions())
    given.show(
        declare_super_stream(given.broker, given.name, partitions, binding_keys=binding_keys or None, options=options)
    )


@super_stream.command()
def describe(*, given: Options) -> None:
    """Show a super stream's partitions in their order. `--json` prints one document, as `declare` does.

    If the stream protocol does not answer, only partitions NAME-0, NAME-1 and so on are found.
    """
    given.show(given.described())


@super_stream.command()
def delete(*, sure: Yes = False, given: Options) -> None:
    """Delete a super stream with all its streams and messages.

    It asks first. `--json` prints one document, what was deleted, as `declare` does; it needs `--yes`.
    """
    if not sure:
        if given.as_json:
            raise typer.BadParameter("--json deletes without asking, so it needs --yes")
        streams = ", ".join(partition.stream for partition in given.described())
        confirm(f"Delete {given.name} and all messages in {streams}?")
    layout = delete_super_stream(given.broker, given.name)
    answer(layout, f"{given.name} and its {len(layout)} streams are deleted.", as_json=given.as_json)


@super_stream.command()
def route(
    *,
    keys: list[str] = argument("Keys of messages.", "KEY…"),
    partitions: int | None = option(None, "Assume this many partitions NAME-0, NAME-1, …; needs no broker."),
    given: Options,
) -> None:
    """Show to which partition the messages of a key go.

    The rule is that of RabbitMQ's stream clients for Java, Go, .NET and Rust. `--json` prints one document: a list,
    each with key, place, stream and binding_key.
    """
    layout = given.described() if partitions is None else Layout.numbered(given.name, partitions)
    routed = [(key, layout.route(key)) for key in keys]
    if given.as_json:
        print_json([{"key": key, **asdict(partition)} for key, partition in routed])
    else:
        for key, partition in routed:
            say(f"{key}: {partition.stream}")
