"""`relatum tap` and `relatum untap`: a copy of each message of an exchange in a stream."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any, Final

import typer

from relatum.superstreams import StreamOptions
from relatum.superstreams.streams import KEPT
from relatum.tapping._broker_side import Tap
from relatum.tapping._tapping import defined_taps
from relatum.tapping._tapping import tap as run_tap
from relatum.tapping._tapping import untap as run_untap
from relatum.terminal import (
    JsonOption,
    ServerOptions,
    argument,
    confirm,
    console,
    option,
    parse_span,
    print_json,
    print_rows,
    size_text,
    spread,
)

_COLUMNS: Final = {
    "exchange": "exchange",
    "type": "kind",
    "stream": "stream",
    "binding key": "binding_key",
    "arguments": lambda tap: json.dumps(tap.arguments) if tap.arguments else "",
    "since": "created_at",
}

_Exchanges = Annotated[list[str] | None, argument("EXCHANGE…", "Exchanges that are there.")]


@dataclass(frozen=True, slots=True)
class KeptOptions:
    """What a stream that is not there is declared with."""

    max_length_bytes: Annotated[
        int, typer.Option(metavar="BYTES", help="What the stream keeps, on each node that has a copy.", min=1)
    ] = KEPT.max_length_bytes or 0
    max_age: Annotated[str, typer.Option(metavar="SPAN", help="For how long: seconds, or 15m, 6h, 7d.")] = "7d"
    segment_bytes_max: Annotated[
        int, typer.Option(metavar="BYTES", help="Bytes of a segment: so much is dropped at a time.", min=1)
    ] = KEPT.segment_bytes_max or 0
    leader_locator: Annotated[str | None, option("Where the leader is put: client-local, balanced.")] = None
    initial_cluster_size: Annotated[int | None, option("How many nodes have a copy; all by default.")] = None

    @property
    def options(self) -> StreamOptions:
        """The same as a stream takes them."""
        return StreamOptions(
            max_length_bytes=self.max_length_bytes,
            max_age=timedelta(seconds=parse_span(self.max_age)),
            segment_bytes_max=self.segment_bytes_max,
            leader_locator=self.leader_locator,
            initial_cluster_size=self.initial_cluster_size,
        )


@spread
def tap(
    exchanges: _Exchanges = None,
    stream: Annotated[
        str | None, option("The stream for all of them; tap.EXCHANGE for each by default.", metavar="NAME")
    ] = None,
    binding_keys: Annotated[
        list[str] | None, option("What is copied; all by default. Repeat it.", "--binding-key", metavar="KEY")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='What is copied of an exchange of type headers: \'{"x-match": "any", "format": "pdf"}\'.',
            show_default=False,
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what is tapped, and change nothing.")] = False,
    as_json: JsonOption = False,
    *,
    kept: KeptOptions,
    servers: ServerOptions,
) -> None:
    """Have a copy of each message of exchanges put into a stream, without a word to their publishers.

    A stream that is not there is declared, and keeps 5 GB and 7 days at most. `relatum record` records it like any
    other. To the default exchange nothing can be bound, so it cannot be tapped.

    `--json` prints one document: a list of exchange, type, stream, binding_key, arguments, made_stream, created_at.
    """
    url = servers.database_url
    if show_list:
        there = defined_taps(url, vhost=servers.address.vhost if servers.broker else "/")
        if as_json:
            print_json([_document(each) for each in there])
        else:
            print_rows(there, _COLUMNS, whole=("since",))
        return
    if not exchanges:
        raise typer.BadParameter("name exchanges, or say --list")
    taps = run_tap(
        servers.address,
        url,
        exchanges,
        stream=stream,
        binding_keys=binding_keys or (),
        arguments=None if arguments is None else _parsed(arguments),
        options=kept.options,
    )
    _print_made(taps, kept, as_json=as_json)


@spread
def untap(
    exchanges: Annotated[list[str], typer.Argument(metavar="EXCHANGE…", help="Exchanges that are tapped.")],
    stream: Annotated[str | None, option("Only taps into this stream.", metavar="NAME")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete their streams, too, with all messages.")] = False,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    *,
    servers: ServerOptions,
) -> None:
    """Take taps away. What was copied stays in its stream, and what was recorded of it, but for `--delete`.

    `--delete` asks first. It deletes only streams that `relatum tap` declared, and that no other tap needs; what was
    recorded of them goes by `relatum forget`.

    `--json` prints one document, as `tap` does; with `--delete` it needs `--yes`.
    """
    url = servers.database_url
    if delete and not sure:
        if as_json:
            raise typer.BadParameter("--json deletes without asking, so it needs --yes")
        going = [each for each in defined_taps(url, vhost=servers.address.vhost) if each.exchange in exchanges]
        streams = sorted({each.stream for each in going if stream in (None, each.stream)})
        if streams:
            confirm(f"Delete all messages in {', '.join(streams)}?")
    gone = run_untap(servers.address, url, exchanges, stream=stream, delete=delete)
    if as_json:
        print_json([_document(each) for each in gone])
        return
    for each in gone:
        what = f"stream {each.stream} is deleted" if delete else f"what was copied stays in {each.stream}"
        _say(f"{each.exchange} is not tapped any more; {what}.")


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--arguments takes JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter('--arguments takes a JSON object, as \'{"x-match": "any", "format": "pdf"}\'')
    return found


def _print_made(taps: Sequence[Tap], kept: KeptOptions, *, as_json: bool) -> None:
    if as_json:
        print_json([_document(each) for each in taps])
        return
    for each in taps:
        what = json.dumps(each.arguments) if each.kind == "headers" else f"key {each.binding_key!r}"
        _say(f"{each.exchange} ({each.kind or 'of a type not known'}, {what}) is copied into {each.stream}.")
        if each.kind is None:
            _say(
                "This user may not ask for the exchange's type. One of type direct has no key for all messages, and "
                "gives only what its --binding-key names."
            )
    if any(each.made_stream for each in taps):
        limits = f"{size_text(kept.max_length_bytes)} and {kept.max_age}"
        _say(f"A stream that was not there keeps {limits} at most on each node: --max-length-bytes, --max-age.")
    _say(f"Record it: relatum record {' '.join(dict.fromkeys(each.stream for each in taps))}")


def _say(text: str) -> None:
    console.print(text, soft_wrap=True)


def _document(tap: Tap) -> dict[str, Any]:
    return {"type" if name == "kind" else name: value for name, value in asdict(tap).items()}
