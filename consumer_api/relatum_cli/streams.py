"""`relatum tap`, `untap`, `read` and `super-stream`: copying exchanges into streams, reading streams, super streams."""

import shlex
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Final

import typer

from relatum import tapping
from relatum.common.checks import size_text
from relatum.common.documents import document
from relatum.common.ids import MessageId
from relatum.reading import Message, StreamReader
from relatum.superstreams import Layout, StreamOptions, declare_super_stream, delete_super_stream, describe_super_stream
from relatum.superstreams.connections import KEPT
from relatum_cli.options import BrokerOptions, CommandOptions, Commands, Json, Yes, argument, option, parse_span
from relatum_cli.show import Cells, answer, confirm, message_document, print_json, print_messages, say, show

_COLUMNS: Final[Cells] = {
    "exchange": "exchange",
    "type": "kind",
    "stream": "stream",
    "binding key": "binding_key",
    "since": "created_at",
}


@dataclass(frozen=True)
class StreamSettings:
    """The options with which streams are declared."""

    max_length_bytes: int | None = option(
        None, "The size, on each node, above which old segments are dropped.", metavar="BYTES"
    )
    max_age: str | None = option(None, "How long a stream keeps messages: seconds, or 15m, 6h, 7d.", metavar="SPAN")
    segment_bytes_max: int | None = option(None, "The segment size: retention drops whole segments.", metavar="BYTES")
    leader_locator: str | None = option(None, "Where leaders are placed: client-local or balanced.")
    initial_cluster_size: int | None = option(None, "Number of nodes that have a copy; by default all nodes.")

    def over(self, defaults: StreamOptions) -> StreamOptions:
        given: dict[str, Any] = {name: value for name, value in asdict(self).items() if value is not None}
        if self.max_age is not None:
            given["max_age"] = timedelta(seconds=parse_span(self.max_age))
        return replace(defaults, **given)


def tap(
    *,
    exchanges: list[str] | None = argument("Existing exchanges.", "EXCHANGE…", default=None),
    stream: str | None = option(None, "One stream for all copies; by default tap.EXCHANGE for each.", metavar="NAME"),
    binding_keys: list[str] | None = option(
        None, "Copy only messages that match this key; repeatable.", "--binding-key", metavar="KEY"
    ),
    show_list: bool = option(False, "Only list the taps.", "--list"),
    settings: StreamSettings,
    given: CommandOptions,
) -> None:
    """It declares a missing stream, which keeps at most 5 GB and 7 days. `relatum record` records the stream like any
    other. The default exchange cannot be tapped, because it does not allow bindings.

    `--json` prints one document: a list of exchange, type, stream, binding_key, created_at.
    """
    options = settings.over(KEPT)
    if show_list:
        taps = tapping.defined_taps(given.database_url, vhost=given.vhost)
    elif exchanges:
        more: dict[str, Any] = {"stream": stream, "binding_keys": binding_keys or (), "options": options}
        taps = tapping.tap(given.broker, given.database_url, exchanges, **more)
    else:
        raise typer.BadParameter("give an EXCHANGE, or --list")
    empty = "No exchange is tapped."
    show(taps, _COLUMNS, as_json=given.as_json, document_of=_document, whole=("since",), empty=empty)
    if show_list or given.as_json:
        return
    if any(each.kind is None for each in taps):
        say(
            "This user may not read the type of an exchange. If it is a direct exchange, only messages with a "
            "--binding-key are copied."
        )
    age = settings.max_age or "7d"
    limits = f"{size_text(options.max_length_bytes)} and {age}{' s' if age[-1].isdecimal() else ''}"
    say(f"A new stream keeps at most {limits} on each node; change this with --max-length-bytes and --max-age.")
    say(f"Record it with: {shlex.join(['relatum', 'record', *dict.fromkeys(each.stream for each in taps)])}")


def untap(
    *,
    exchanges: list[str] = argument("Tapped exchanges.", "EXCHANGE…"),
    stream: str | None = option(None, "Only taps into this stream.", metavar="NAME"),
    given: CommandOptions,
) -> None:
    """After you delete a stream, `relatum forget` deletes what was recorded.

    `--json` prints one document, as `tap` does.
    """
    gone = tapping.untap(given.broker, given.database_url, exchanges, stream=stream)
    lines = (f"{each.exchange} is no longer tapped; the copies stay in {each.stream}." for each in gone)
    answer([*map(_document, gone)], *lines, as_json=given.as_json)


def _document(tap: tapping.Tap) -> dict[str, Any]:
    return {"type" if name == "kind" else name: value for name, value in document(tap).items()}


def read(
    *,
    stream: str = argument("The stream."),
    offsets: list[int] = argument("The messages' offsets.", "OFFSET…", min=0),
    given: BrokerOptions,
    as_json: Json = False,
) -> None:
    """Exits with code 6 at the first offset without a message, after the earlier ones. `--json` prints JSON lines."""
    found: list[Message] = []
    try:
        with StreamReader.open(given.broker) as reader:
            for result in reader.read_many([MessageId(stream, offset) for offset in offsets]):
                if isinstance(result, Exception):
                    raise result
                if as_json:
                    print_json(message_document(result), one_line=True)
                else:
                    found.append(result)
    finally:
        if found:
            print_messages(found)


super_stream = Commands()

KEYS = "A partition's binding key, instead of a number. Repeat it for each partition, in order."


@dataclass(frozen=True)
class Options(BrokerOptions):
    """The options of a super stream's commands: broker, name, and `--json`."""

    name: str = argument("The super stream's name.", "NAME")
    as_json: Json = False

    def described(self) -> Layout:
        return describe_super_stream(self.broker, self.name)

    def show(self, layout: Layout) -> None:
        show(layout, "place stream binding_key", as_json=self.as_json, json_value=layout)


@super_stream.command()
def declare(
    *,
    partitions: int | None = option(None, "Number of partitions; by default one for each binding key, or 3."),
    binding_keys: list[str] | None = option(None, KEYS, "--binding-key", metavar="KEY"),
    settings: StreamSettings,
    given: Options,
) -> None:
    """Declare a super stream. An existing super stream with the same options stays as it is.

    `--json` prints one document: super_stream, partitions (each with place, stream, binding_key).
    """
    options = settings.over(StreamOptions())
    given.show(
        declare_super_stream(given.broker, given.name, partitions, binding_keys=binding_keys or None, options=options)
    )


@super_stream.command()
def describe(*, given: Options) -> None:
    """Show a super stream's partitions in their order. `--json` prints one document, as `declare` does.

    If the stream protocol is unavailable, it finds only partitions named NAME-0, NAME-1 and so on.
    """
    given.show(given.described())


@super_stream.command()
def delete(*, is_confirmed: Yes = False, given: Options) -> None:
    """Delete a super stream with all its streams and messages.

    It asks for confirmation. `--json` prints one document as `declare` does: what was deleted; it needs `--yes`.
    """
    if not is_confirmed:
        if given.as_json:
            raise typer.BadParameter("with --json the command cannot ask for confirmation: add --yes")
        streams = ", ".join(partition.stream for partition in given.described())
        confirm(f"Delete {given.name} and all messages in {streams}?")
    layout = delete_super_stream(given.broker, given.name)
    answer(layout, f"{given.name} and its {len(layout)} streams are deleted.", as_json=given.as_json)


@super_stream.command()
def route(
    *,
    keys: list[str] = argument("The keys by which messages are routed.", "KEY…"),
    partitions: int | None = option(None, "Assume this many partitions NAME-0, NAME-1, …; needs no broker."),
    given: Options,
) -> None:
    """Show the partition to which messages with a key are routed.

    Routing is that of RabbitMQ's stream clients for Java, Go, .NET and Rust. `--json` prints one document: a list, each
    with key, place, stream and binding_key.
    """
    layout = given.described() if partitions is None else Layout.numbered(given.name, partitions)
    routed = [(key, layout.route(key)) for key in keys]
    lines = (f"{key}: {partition.stream}" for key, partition in routed)
    answer([{"key": key, **asdict(partition)} for key, partition in routed], *lines, as_json=given.as_json)
