"""`relatum groups`: groups that are not complete, one group, or a consumer that shares groups."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from relatum.membership import GroupPosition, membership
from relatum.reading import Message
from relatum.terminal import (
    ExitCode,
    JsonOption,
    ServerOptions,
    console,
    moment_text,
    option,
    parse_span,
    plain_text,
    print_facts,
    print_json,
    spread,
)
from relatum_consumer.command import open_relations
from relatum_consumer.groups import Group, GroupConsumerStatus, GroupPage, GroupReport

__all__ = ["groups"]

OLDER_THAN_S: Final = 3600.0
"""How old a group is that is listed, unless told otherwise: most are complete long before, and some take their time."""

RANGES_SHOWN: Final = 3
"""Ranges of missing numbers in a line of the list; `--group` and `--json` have all."""


@spread
def groups(
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="[STREAM…]", help="Streams and super streams; all where left out.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="SPAN",
            parser=parse_span,
            help="List groups whose first message is that old: seconds, or 90s, 15m, 6h, 2d; 1h where left out.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[str | None, option("Show this group instead.", "--group", metavar="ID")] = None,
    consumer: Annotated[str | None, option("Show this consumer instead.", "--consumer", metavar="NAME")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List all groups instead, as they are recorded, the newest first.")
    ] = False,
    before: Annotated[str | None, option("With --all: those that are older than it.", metavar="ID")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="With --all: at most so many.", min=1, max=1_000)] = 20,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Look at what is recorded alone, however much of the streams is not.")
    ] = False,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """List the groups that are not complete, or contradict themselves, or all; show one, or a consumer of groups.

    The list ends with 0, whatever is in it. `--group` ends with 0 (complete), 6 (nothing of it is there), 7 (it
    contradicts itself, or has lost a message) or 8 (not complete); `--consumer` with 0 or 6 (no such consumer).
    `--json` prints one document: the list, the page of all, the group, or the consumer.
    """
    if sum((older_than is not None, group is not None, consumer is not None, every)) > 1:
        raise typer.BadParameter("--older-than, --group, --consumer and --all show different things: give one of them")
    if before is not None and not every:
        raise typer.BadParameter("--before is for --all")
    if consumer is not None and streams:
        raise typer.BadParameter("--consumer shows all streams of the consumer: name none")
    with open_relations(servers) as relations:
        if consumer is not None:
            _print_consumer(relations.group_consumer_status(consumer), as_json)
        elif group is not None:
            _print_group(relations.group(group, streams=streams or None, complete=not recorded), as_json)
        elif every:
            _print_page(relations._newest_groups(streams or None, before=before, limit=limit), as_json)
        else:
            _print_list(
                relations.incomplete_groups(
                    streams or None,
                    older_than=OLDER_THAN_S if older_than is None else older_than,
                    complete=not recorded,
                ),
                as_json,
            )


# --- the list ---------------------------------------------------------------------------------------------


def _print_list(found: Sequence[GroupReport], as_json: bool) -> None:
    if as_json:
        print_json([_report_document(each) for each in found])
    elif not found:
        console.print("No group of that age is incomplete.")
    else:
        _print_table(found)


def _print_page(page: GroupPage, as_json: bool) -> None:
    if as_json:
        groups = [_report_document(each) for each in page.groups]
        print_json({"groups": groups, "next": page.next, "unrecorded": page.unrecorded})
        return
    if page.groups:
        _print_table(page.groups)
    for each in page.unrecorded:
        part = f"{each.stream} from {each.start:,} to {each.stop - 1:,}"
        console.print(plain_text(f"{part} is not recorded by the key of groups: relatum backfill {each.stream}"))
    console.print("No more groups." if page.next is None else f"Older ones: relatum groups --all --before {page.next}")


def _print_table(found: Sequence[GroupReport]) -> None:
    table = Table("group", "complete", "there", "missing", "last", "first seen", "last seen", "lies in")
    for each in found:
        place = each.position
        lies_in = ", ".join(sorted({message.stream for message in each.places}))
        seen = moment_text(each.first_seen), moment_text(each.last_seen)
        wrong = "".join(f", {anomaly}" for anomaly in place.anomalies)
        is_complete = "yes" if place.is_complete else "no"
        cells = (
            each.group_id,
            is_complete,
            f"{place.seen:,}{wrong}",
            _ranges(place.missing, RANGES_SHOWN),
            _last(place),
        )
        table.add_row(*(Text(cell, overflow="fold") for cell in (*cells, *seen, lies_in)))
    console.print(table)


def _report_document(report: GroupReport) -> dict[str, Any]:
    return {
        **_position_document(report.position),
        "first_seen": report.first_seen,
        "last_seen": report.last_seen,
        "places": report.places,
    }


def _position_document(position: GroupPosition) -> dict[str, Any]:
    return {
        **asdict(position),
        "next_sequence": position.next_sequence,
        "is_complete": position.is_complete,
    }


# --- one group --------------------------------------------------------------------------------------------


def _print_group(group: Group, as_json: bool) -> None:
    position = group.position
    if as_json:
        print_json(
            {
                **_position_document(position),
                "messages": [_message_document(message) for message in group],
                "duplicates": [_message_document(message) for message in group.duplicates],
                "expired": group.expired,
            }
        )
    else:
        _show_group(group, position)
    code = _code_of(group, position)
    if code is not ExitCode.OK:
        raise typer.Exit(code)


def _show_group(group: Group, position: GroupPosition) -> None:
    facts = (
        ("complete", "yes" if position.is_complete else f"no: {position.next_sequence:,} is next"),
        ("there", f"{position.seen:,}"),
        ("missing", _ranges(position.missing)),
        ("last", _last(position)),
        ("wrong", ", ".join(position.anomalies) or "–"),
        ("expired", ", ".join(f"{place.stream}@{place.offset}" for place in group.expired) or "–"),
    )
    print_facts(f"group {group.group_id}", facts)
    places = Table("number", "stream", "offset", "time", "")
    for message, word in (*((each, "") for each in group), *((each, "duplicate") for each in group.duplicates)):
        place = membership(message.headers)
        assert place is not None, "it is in a group"
        words = ", ".join(filter(None, ("last" if place.last else "", word)))
        cells = (f"{place.sequence:,}", message.stream, f"{message.offset}", moment_text(message.time), words)
        places.add_row(*(Text(cell) for cell in cells))
    if places.row_count:
        console.print(places)


def _message_document(message: Message) -> dict[str, Any]:
    place = membership(message.headers)
    assert place is not None, "it is in a group"
    return {
        "sequence": place.sequence,
        "last": place.last,
        "stream": message.stream,
        "offset": message.offset,
        "time": message.time,
    }


def _code_of(group: Group, position: GroupPosition) -> ExitCode:
    if not group:
        return ExitCode.NOT_THERE
    # A duplicate is no contradiction: the first counts.
    if any(anomaly != "duplicate" for anomaly in position.anomalies):
        return ExitCode.DIFFERENT
    return ExitCode.OK if position.is_complete else ExitCode.NOT_YET


# --- a consumer -------------------------------------------------------------------------------------------


def _print_consumer(status: GroupConsumerStatus, as_json: bool) -> None:
    if as_json:
        print_json(status)
    else:
        print_facts(status.consumer, _facts(status))


def _facts(status: GroupConsumerStatus) -> list[tuple[str, str]]:
    streams = "all that are recorded" if status.streams is None else ", ".join(status.streams)
    facts = [("reads", f"{streams}, in {status.order} order")]
    facts += [(f"groups {state}", f"{count:,}") for state, count in status.counts.items()]
    facts.append(("oldest not acknowledged", moment_text(status.oldest_waiting_at)))
    facts.append(("oldest not complete", moment_text(status.oldest_open_at)))
    for member in status.members:
        lease = "until" if member.is_alive else "lapsed at"
        facts.append(
            (f"member {member.holder}", f"{member.claimed:,} claimed, {lease} {moment_text(member.lease_expires_at)}")
        )
    for source in status.sources:
        to = "not scanned yet" if source.scanned_to is None else f"scanned up to {source.scanned_to:,}"
        lag = "the broker does not know it" if source.lag_offsets is None else f"lag {source.lag_offsets:,} offsets"
        facts.append((f"stream {source.stream}", f"{to}, {lag}"))
    return facts


# --- as people read it ------------------------------------------------------------------------------------


def _ranges(ranges: Sequence[tuple[int, int]], most: int | None = None) -> str:
    shown = [f"{first:,}" if first == last else f"{first:,}–{last:,}" for first, last in ranges[:most]]
    more = len(ranges) - len(shown)
    return (", ".join(shown) or "–") + (f" and {more:,} more" if more else "")


def _last(position: GroupPosition) -> str:
    return "not there" if position.last_sequence is None else f"{position.last_sequence:,}"
