"""`relatum status`: how recording and collecting are doing."""

from collections.abc import Sequence
from typing import Annotated

import typer

from relatum.collecting import CollectorStatus, SourceStatus, collector_status
from relatum.reading import BrokerAddress
from relatum.recording import StreamEvent, StreamStatus
from relatum.recording import status as status_of
from relatum.store.catalog import check_recorded
from relatum.store.database import as_engine
from relatum.store.translation import translated_errors
from relatum.terminal import (
    JsonOption,
    ServerOptions,
    console,
    moment_text,
    print_facts,
    print_json,
    ranges_text,
    size_text,
    spread,
)


def print_collectors(
    database: str, names: Sequence[str] | None, broker: BrokerAddress | None, *, as_json: bool
) -> None:
    """Print the status of collectors; lags only where there is a broker to ask."""
    found = collector_status(database, names, broker=broker)
    if as_json:
        print_json(found)
        return
    if not found:
        console.print("There is no collector yet: the first member of a name makes it.")
    for each in found:
        print_facts(each.collector, _facts_of_collector(each))


def _facts_of_collector(status: CollectorStatus) -> list[tuple[str, str]]:
    facts = [(f"messages {state}", f"{count:,}") for state, count in status.counts.items()]
    if status.oldest_unfinished_at is not None:
        facts.append(("oldest not finished", moment_text(status.oldest_unfinished_at)))
    facts += [
        (f"without a running executor: {of_type}", f"{count:,}") for of_type, count in sorted(status.unattended.items())
    ]
    facts += [(f"stream {source.stream}", _source(source)) for source in status.sources]
    for member in status.members:
        lease = "until" if member.is_alive else "lapsed at"
        moment = moment_text(member.lease_expires_at)
        facts.append(
            (f"member {member.member}", f"{member.holder}, {', '.join(member.types) or 'no type'}, {lease} {moment}")
        )
    kept = "for ever" if status.keep_s is None else f"{status.keep_s:,} s"
    return [*facts, ("finished messages are kept", kept)]


def _source(source: SourceStatus) -> str:
    if source.position is None:
        return "not followed"
    lag = "" if source.lag_offsets is None else f", lag {source.lag_offsets:,} offsets"
    return (
        f"position {source.position:,}{lag}, followed by {source.follower or 'nobody at the moment'}, "
        f"{source.passed_over:,} passed over"
    )


@spread
def status(
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Streams and super streams; all where left out.")
    ] = None,
    collector: Annotated[
        bool, typer.Option("--collector", help="Show collectors: the names are theirs, all where left out.")
    ] = False,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Show for each stream: first and last offset, what is recorded, holes, gaps, lag, rows, size, and what happened.

    With `--collector`, for each collector: its members, its streams with position and lag (where a broker is named),
    messages by state, and since when the oldest unfinished one waits. A name that is not known ends the command with
    code 6. A stream that cannot be read is shown with its state and the reason; where it was named, the command ends
    with the code of that. `--json` prints one document, the list of streams or collectors; there, ranges are
    [from, to).
    """
    if collector:
        asked = servers.address if servers.broker else None
        print_collectors(servers.database_url, streams or None, asked, as_json=as_json)
        return
    found = status_of(servers.address, servers.database_url, streams or None)
    if not {name for each in found for name in (each.stream, each.super_stream)}.issuperset(streams or ()):
        with as_engine(servers.database_url) as engine, translated_errors(), engine.connect() as connection:
            check_recorded(connection, servers.address.vhost, streams or ())
        # It began meanwhile.
        found = status_of(servers.address, servers.database_url, streams)
    if as_json:
        print_json(found)
    elif not found:
        console.print("No stream is recorded yet. `relatum record STREAM` records one.")
    else:
        for stream in found:
            _print(stream)
    for stream in found if streams else ():
        # Shown in full all the same. One that is missing has a status like any other.
        if stream.error is not None and stream.state not in ("missing", "deleted"):
            raise stream.error


def _print(stream: StreamStatus) -> None:
    name = stream.stream if not stream.super_stream else f"{stream.stream} (partition of {stream.super_stream})"
    print_facts(f"{name}: {_head(stream)}", _facts(stream))


def _head(stream: StreamStatus) -> str:
    if stream.state == "unattended":
        return f"unattended: nobody records it now; relatum record {stream.super_stream or stream.stream}"
    if stream.state == "deleted":
        return f"deleted: relatum forget {stream.stream} removes what was recorded of it"
    return stream.state


def _facts(stream: StreamStatus) -> list[tuple[str, str]]:
    ends = "none" if stream.first is None or stream.last is None else f"{stream.first:,}–{stream.last:,}"
    facts: list[tuple[str, str]] = [
        ("offsets in the stream", ends if stream.error is None or stream.last is not None else "not known")
    ]
    if stream.error is not None:
        facts.append(("cannot be read", str(stream.error)))
    facts += [(f"recorded: {key}", ranges_text(ranges)) for key, ranges in stream.covered.items()]
    if stream.holes:
        facts.append(("holes (lost to retention)", ranges_text(stream.holes)))
    if stream.gaps:
        facts.append(("gaps (in the stream, not recorded)", ranges_text(stream.gaps)))
    seconds = "" if stream.lag_s is None else f", {stream.lag_s:,.1f} s"
    facts += [
        ("lag", "not known" if stream.lag_offsets is None else f"{stream.lag_offsets:,} offsets{seconds}"),
        ("rows", f"{stream.rows:,}"),
        ("table and index", size_text(stream.bytes)),
        ("recorder", stream.recorder or "none at the moment"),
        ("recorded from the broker", stream.broker or "not known"),
    ]
    for key, reasons in stream.skipped.items():
        facts += [(f"skipped: {key or 'whole messages'} ({reason})", f"{n:,}") for reason, n in reasons.items()]
    facts += [(f"happened: {event.words}", _event(event)) for event in stream.events]
    return facts


def _event(event: StreamEvent) -> str:
    offsets = ""
    if event.from_offset is not None and event.to_offset is not None:
        offsets = f" {ranges_text([(event.from_offset, event.to_offset)])}"
    return f"{moment_text(event.at)}{offsets} {'; '.join(filter(None, (event.detail, event.remedy)))}"
