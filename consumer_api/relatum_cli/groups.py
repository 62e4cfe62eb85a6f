"""`relatum groups`: lists incomplete groups; shows one group, or a group consumer."""

from typing import Any, Final

import typer

from relatum.membership import GroupPosition, membership
from relatum.reading import Message
from relatum_cli.exits import ExitCode
from relatum_cli.options import CommandOptions, StreamNames, option, span
from relatum_cli.show import Cells, lease_text, print_json, print_table, ranges_text, show, with_properties
from relatum_consumer.groups import Group, GroupConsumerStatus, GroupReport

OLDER_THAN_S: Final = 3600.0
"""Default minimum age of listed groups, in seconds: most groups become complete much earlier."""

OLDER_THAN: Final = "List groups whose first message is at least this old: seconds, or 90s, 15m, 6h, 2d; 1h by default."


def groups(
    *,
    streams: StreamNames = None,
    older_than: float | None = span(None, OLDER_THAN),
    group: str | None = option(None, "Show only this group.", metavar="ID"),
    consumer: str | None = option(None, "Show only this group consumer.", metavar="NAME"),
    recorded: bool = option(False, "Use only the index; do not read unrecorded messages.", "--recorded"),
    given: CommandOptions,
) -> None:
    """The list includes contradictory groups. Listing exits with 0; `--group` with 0 (complete), 6 (it has no
    messages), 7 (contradictory, or retention has dropped a message) or 8 (incomplete); `--consumer` with 0 or 6 (no
    such consumer). `--json` prints one document: the list, the group, or the consumer.
    """
    if sum((older_than is not None, group is not None, consumer is not None)) > 1:
        raise typer.BadParameter("--older-than, --group and --consumer cannot be combined: give one of them")
    if consumer is not None and streams:
        raise typer.BadParameter("--consumer shows all streams of the consumer: do not name streams")
    names = streams or None
    with given.relations() as relations:
        if consumer is not None:
            _print_consumer(relations.group_consumer_status(consumer), given.as_json)
        elif group is not None:
            _print_group(relations.group(group, streams=names, complete=not recorded), given.as_json)
        else:
            age_s = OLDER_THAN_S if older_than is None else older_than
            found = relations.incomplete_groups(names, older_than=age_s, complete=not recorded)
            empty = "No group of this age is incomplete."
            show(found, _COLUMNS, as_json=given.as_json, document_of=_report_document, empty=empty)


_COLUMNS: Final[Cells] = {
    "group": "group_id",
    "complete": lambda each: "yes" if each.position.is_complete else "no",
    "there": lambda each: ", ".join((f"{each.position.seen:,}", *each.position.anomalies)),
    "missing": lambda each: _missing_text(each.position, 3),
    "last": lambda each: _last_text(each.position),
    "first seen": "first_seen",
    "last seen": "last_seen",
    "in": lambda each: ", ".join(sorted({message.stream for message in each.places})),
}


def _report_document(report: GroupReport) -> dict[str, Any]:
    seen = {name: getattr(report, name) for name in ("first_seen", "last_seen", "places")}
    return _position_document(report.position) | seen


def _position_document(position: GroupPosition) -> dict[str, Any]:
    return with_properties(position, "next_sequence", "is_complete")


def _print_group(group: Group, as_json: bool) -> None:
    position = group.position
    messages, duplicates = ([*map(_message_document, each)] for each in (group, group.duplicates))
    if as_json:
        lists = {"messages": messages, "duplicates": duplicates, "expired": group.expired}
        print_json(_position_document(position) | lists)
    else:
        facts = [
            ("complete", "yes" if position.is_complete else f"no: {position.next_sequence:,} is next"),
            ("there", position.seen),
            ("missing", _missing_text(position)),
            ("last", _last_text(position)),
            ("wrong", ", ".join(position.anomalies) or None),
            ("expired", ", ".join(map(str, group.expired)) or None),
        ]
        print_table(facts, title=f"group {group.group_id}")
        rows = [*((each, "") for each in messages), *((each, "duplicate") for each in duplicates)]
        columns: Cells = {
            "number": lambda row: row[0]["sequence"],
            "stream": lambda row: row[0]["stream"],
            "offset": lambda row: str(row[0]["offset"]),
            "time": lambda row: row[0]["time"],
            "": lambda row: ", ".join(filter(None, ("last" if row[0]["last"] else "", row[1]))),
        }
        if rows:
            show(rows, columns)
    raise typer.Exit(_code_of(group, position))


def _message_document(message: Message) -> dict[str, Any]:
    place = membership(message.headers)
    assert place is not None, "it is in a group"
    where = {name: getattr(message, name) for name in ("stream", "offset", "time")}
    return {"sequence": place.sequence, "last": place.last, **where}


def _code_of(group: Group, position: GroupPosition) -> ExitCode:
    if not group:
        return ExitCode.NOT_THERE
    # Duplicates are not a contradiction: the first message with the number counts.
    if any(anomaly != "duplicate" for anomaly in position.anomalies):
        return ExitCode.DIFFERENT
    return ExitCode.OK if position.is_complete else ExitCode.NOT_YET


def _missing_text(position: GroupPosition, most: int | None = None) -> str:
    return ranges_text([(first, last + 1) for first, last in position.missing], most)


def _last_text(position: GroupPosition) -> str:
    return "not there" if position.last_sequence is None else f"{position.last_sequence:,}"


def _print_consumer(status: GroupConsumerStatus, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    streams = "all recorded streams" if status.streams is None else ", ".join(status.streams)
    counts = [(f"groups {state}", count) for state, count in status.counts.items()]
    oldest = ("oldest not acknowledged", status.oldest_waiting_at), ("oldest not complete", status.oldest_open_at)
    print_table([("reads", f"{streams}, in {status.order} order"), *counts, *oldest], title=status.consumer)
    if status.members:
        show(status.members, {"member": "holder", "claimed": "claimed", "lease": lease_text})
    show(status.sources, "stream scanned_to lag_offsets")
