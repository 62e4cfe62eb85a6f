"""`relatum status`: what is recorded of each stream."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relatum.command._options import (
    BrokerOption,
    DatabaseOption,
    JsonOption,
    StreamUrlOption,
    require_broker,
    require_database,
)
from relatum.command._output import console, print_json, ranges_text, size_text
from relatum.reading import BrokerAddress
from relatum.recording import StreamStatus
from relatum.recording import status as status_of


def status(
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="[STREAM…]", help="Streams and super streams; all where left out.")
    ] = None,
    broker: BrokerOption = None,
    stream_url: StreamUrlOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show for each stream: first and last offset, what is recorded, holes, lag, rows, size, and what happened.

    `--json` prints one document, the list of streams; there, ranges are [from, to).
    """
    address = BrokerAddress.parse(require_broker(broker), stream_url)
    found = status_of(address, require_database(database), streams or None)
    if as_json:
        print_json([asdict(stream) for stream in found])
        return
    if not found:
        console.print("No stream is recorded yet. `relatum record STREAM` records one.")
    for stream in found:
        _print(stream)


def _print(stream: StreamStatus) -> None:
    name = stream.stream if not stream.super_stream else f"{stream.stream} (partition of {stream.super_stream})"
    table = Table(title=Text(f"{name}: {stream.state}", style="bold"), title_justify="left", show_header=False)
    for label, value in _facts(stream):
        table.add_row(label, Text(value))
    console.print(table)


def _facts(stream: StreamStatus) -> list[tuple[str, str]]:
    ends = "empty" if stream.first is None else f"{stream.first:,}–{stream.last:,}"
    facts = [("offsets in the stream", ends)]
    facts += [(f"recorded: {key}", ranges_text(ranges)) for key, ranges in stream.covered.items()]
    if stream.holes:
        facts.append(("holes (lost to retention)", ranges_text(stream.holes)))
    facts += [
        ("lag", _lag(stream)),
        ("rows", f"{stream.rows:,}"),
        ("table and index", size_text(stream.bytes)),
        ("recorder", stream.recorder or "none at the moment"),
    ]
    facts += [(f"skipped: {what}", f"{count:,}") for what, count in stream.skips.items()]
    facts += [("happened", _event(event)) for event in stream.events]
    return facts


def _lag(stream: StreamStatus) -> str:
    if stream.lag_offsets is None:
        return "–"
    seconds = f", {stream.lag_seconds:,.1f} s" if stream.lag_seconds is not None else ""
    return f"{stream.lag_offsets:,} offsets{seconds}"


def _event(event: Any) -> str:
    if isinstance(event, dict):
        return " ".join(str(value) for value in event.values() if value not in (None, ""))
    return str(event)
