"""`relatum status` and `relatum outcome`: the status of recorded streams, of collectors and of their messages."""

from collections.abc import Iterator
from shlex import quote
from typing import Any, Final

import typer

from relatum.collecting import CollectorStatus, collector_status
from relatum.common.checks import size_text
from relatum.outcomes import Outcome, Outcomes, OutcomeStatus
from relatum.recording import StreamEvent, StreamStatus
from relatum.recording import status as status_of
from relatum.store.catalog import check_recorded
from relatum.store.translation import translated_errors
from relatum_cli.exits import ExitCode
from relatum_cli.options import NOTHING_RECORDED, CommandOptions, DatabaseOptions, Json, argument, option
from relatum_cli.show import lease_text, moment_text, print_table, ranges_text, show, with_properties


def status(
    *,
    streams: list[str] | None = argument("Streams and super streams; all by default.", "[NAME…]", default=None),
    collector: bool = option(False, "Show collectors: NAME is then a collector's name.", "--collector"),
    given: CommandOptions,
) -> None:
    """It shows the first and last offset, recorded ranges, holes, gaps, lag, rows and size. With `--collector`, it
    shows each collector's members, its streams with position and lag (if a broker is given), its messages by state, and
    the time of the oldest unfinished message. Exits with code 6 for an unknown name. A stream that cannot be read is
    shown with its state and the reason; if you named it and it is not missing or deleted, the command exits with that
    error's code. `--json` prints one document, the list of streams or collectors, with ranges as [from, to).
    """
    if collector:
        broker = given.broker if given.broker_url else None
        collectors = collector_status(given.database_url, streams or None, broker=broker)
        empty = "There are no collectors. A collector's first member creates it."
        show(collectors, _print_collector, as_json=given.as_json, empty=empty)
        return
    broker = given.broker
    if streams:
        with given.engine() as engine, translated_errors(), engine.connect() as connection:
            check_recorded(connection, broker.vhost, streams)
    found = status_of(broker, given.database_url, streams or None)
    show(found, _print_stream, as_json=given.as_json, empty=NOTHING_RECORDED)
    for stream in found if streams else ():
        # Raise the error after all output. A missing stream is a normal status, not an error.
        if stream.error is not None and stream.state not in ("missing", "deleted"):
            raise stream.error


def _print_stream(stream: StreamStatus) -> None:
    name = f"{stream.stream} (partition of {stream.super_stream})" if stream.super_stream else stream.stream
    remedies = {
        "unattended": f": no recorder follows it now; relatum record {quote(stream.super_stream or stream.stream)}",
        "deleted": f": relatum forget {quote(stream.stream)} deletes what was recorded",
    }
    print_table(_facts(stream), title=f"{name}: {stream.state}{remedies.get(stream.state, '')}")


def _facts(stream: StreamStatus) -> Iterator[tuple[str, Any]]:
    ends = "none" if stream.first is None or stream.last is None else f"{stream.first:,}–{stream.last:,}"
    yield "offsets in the stream", ends if stream.error is None or stream.last is not None else "not known"
    if stream.error is not None:
        yield "cannot be read", stream.error
    for key, ranges in stream.covered.items():
        yield f"recorded: {key}", ranges_text(ranges)
    if stream.holes:
        yield "holes (lost to retention)", ranges_text(stream.holes)
    if stream.gaps:
        yield "gaps (in the stream, not recorded)", ranges_text(stream.gaps)
    seconds = "" if stream.lag_s is None else f", {stream.lag_s:,.1f} s"
    yield "lag", "not known" if stream.lag_offsets is None else f"{stream.lag_offsets:,} offsets{seconds}"
    yield "rows", stream.rows
    yield "table and index", size_text(stream.bytes)
    yield "recorder", stream.recorder or "none at the moment"
    yield "recorded from the broker", stream.broker or "not known"
    for key, reasons in stream.skipped.items():
        for reason, count in reasons.items():
            yield f"skipped: {key or 'whole messages'} ({reason})", count
    for event in stream.events:
        yield f"happened: {event.words}", _event_text(event)


def _event_text(event: StreamEvent) -> str:
    offsets = ""
    if event.from_offset is not None and event.to_offset is not None:
        offsets = f" {ranges_text([(event.from_offset, event.to_offset)])}"
    return f"{moment_text(event.at)}{offsets} {'; '.join(filter(None, (event.detail, event.remedy)))}"


def _print_collector(status: CollectorStatus) -> None:
    facts: list[tuple[str, Any]] = [(f"messages {state}", count) for state, count in status.counts.items()]
    facts.append(("oldest not finished", status.oldest_unfinished_at))
    facts += [(f"without a running executor: {each}", count) for each, count in sorted(status.unattended.items())]
    facts.append(("finished messages are kept", "forever" if status.keep_s is None else f"{status.keep_s:,} s"))
    print_table(facts, title=status.collector)
    if status.sources:
        show(status.sources, "stream position lag_offsets follower passed_over")
    if status.members:
        types = {"types": lambda each: ", ".join(each.types)}
        show(status.members, {"member": "member", "holder": "holder", **types, "lease": lease_text})


def outcome(
    *,
    message_ids: list[str] = argument("The messages' ids.", "ID…"),
    collector: str | None = option(None, "Show only outcomes in this collector."),
    given: DatabaseOptions,
    as_json: Json = False,
) -> None:
    """An outcome is unknown, collected, forwarded, succeeded, failed or dead, with times and reason. Exits with 10 if
    any is failed or dead, else with 6 if any is unknown, else with 8 if any is not final yet, else with 0. Also exits
    with 6 if the collector is unknown. `--json` prints one document, the list of outcomes.
    """
    with Outcomes(given.database_url) as outcomes:
        found = list(outcomes.of_many(message_ids, collector=collector).values())
    rows = found if as_json else [each for first in found for each in (first, *first.others)]
    show(rows, print_outcome, as_json=as_json, document_of=_document)
    statuses = {each.status for each in found}
    if statuses & {OutcomeStatus.FAILED, OutcomeStatus.DEAD}:
        raise typer.Exit(ExitCode.UNSUCCESSFUL)
    if OutcomeStatus.UNKNOWN in statuses:
        raise typer.Exit(ExitCode.NOT_THERE)
    if not all(status.is_final for status in statuses):
        raise typer.Exit(ExitCode.NOT_YET)


def _document(outcome: Outcome) -> dict[str, Any]:
    others = [_document(each) for each in outcome.others]
    return with_properties(outcome, "is_final") | {"others": others}


_OUTCOME: Final = "collector type stream offset attempts collected_at forwarded_at finished_at reason"


def print_outcome(outcome: Outcome) -> None:
    names = () if outcome.collector is None else _OUTCOME.split()
    facts = [(name.replace("_", " "), getattr(outcome, name)) for name in names]
    print_table(facts, title=f"{outcome.message_id}: {outcome.status.value}")
