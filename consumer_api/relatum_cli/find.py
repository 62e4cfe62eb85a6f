"""`relatum find`, `related`, `around` and `read`: lookups by key, time and offset, and what other lookups need."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from relatum.ids import MessageId
from relatum.reading import Message, StreamReader
from relatum_cli.exits import ExitCode
from relatum_cli.log_lines import LogFormat, LogLevel, set_up_logging
from relatum_cli.moments import FORMS, parse_moment, parse_span
from relatum_cli.options import (
    LOOK_IN,
    BrokerOptions,
    CommandOptions,
    Complete,
    Json,
    KeyNames,
    Level,
    LookIn,
    ServerOptions,
    Since,
    Until,
    argument,
    option,
    shared,
)
from relatum_cli.show import first_few, message_document, print_json, print_messages, say
from relatum_consumer import Answer, Relations, Trace

CODES: Final = {
    "found": ExitCode.OK,
    "absent": ExitCode.NOT_THERE,
    "expired": ExitCode.NOT_THERE,
    "deleted": ExitCode.NOT_THERE,
    "not_recorded_yet": ExitCode.NOT_YET,
    "unproven": ExitCode.UNPROVEN,
}
"""The exit code for each status of an answer."""

STREAMS_LISTED: Final = 100
"""The most streams in an answer's document; `streams_count` counts all."""


class InTime(StrEnum):
    """The message that `--time` looks for."""

    BEFORE = "before"
    AFTER = "after"
    NEAREST = "nearest"


Limit = Annotated[int, shared("At most this many messages.", "--limit", "-n", min=1, shown=True)]
Values = Annotated[list[str], argument("Its value; a composite's values in order.", "VALUE…")]


@dataclass(frozen=True)
class LookupOptions(CommandOptions):
    """The options of lookups: servers, completeness, log level and output."""

    complete: Complete = False
    log_level: Level = None


def find(
    *,
    key: str = argument("The key's name."),
    value: Values,
    streams: LookIn = None,
    to: list[str] | None = option(None, "Before 0.5: --streams.", "--to", "-t", hidden=True),
    since: Since = None,
    until: Until = None,
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """Find the messages whose KEY has this VALUE.

    Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
    document: status, messages, streams.
    """
    names = [*(streams or ()), *(to or ())] or None
    with open_relations(given, given.log_level) as relations:
        answer = relations.find(
            key, one_or_all(value), streams=names, since=since, until=until, limit=limit, complete=given.complete
        )
    _print(answer, given.as_json)


def related(
    *,
    stream: str = argument("The stream of the given message."),
    offset: int = argument("Its offset.", min=0),
    to: list[str] | None = option(None, LOOK_IN, "--to", "-t", metavar="STREAM"),
    by: KeyNames = None,
    in_time: InTime | None = option(None, "Find the message next to it in time, in the one stream of --to.", "--time"),
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """Find the messages that share a key with a message, or are next to it in time.

    The given message is the one at OFFSET of STREAM. Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not
    recorded yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
    """
    if in_time and len(to or ()) != 1:
        raise typer.BadParameter("--time looks in one stream: give --to once")
    if in_time and len(by or ()) > 1:
        raise typer.BadParameter("--time takes one key at most: give --by once")
    with open_relations(given, given.log_level) as relations:
        message = relations.read(stream, offset)
        if in_time and to:
            answer = getattr(relations, in_time)(message, to[0], by=by[0] if by else None, complete=given.complete)
        else:
            answer = relations.related(message, to=to, by=by, limit=limit, complete=given.complete)
    _print(answer, given.as_json)


def around(
    *,
    moment: datetime = argument(f"{FORMS}.", parser=parse_moment),
    streams: LookIn = None,
    span: str = option("30s", "How long before and after it: 30s, 5m, 2h.", "--for", metavar="SPAN"),
    before: str | None = option(None, "How long before it, instead.", metavar="SPAN"),
    after: str | None = option(None, "How long after it, instead.", metavar="SPAN"),
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """Show what happened around a MOMENT, in all recorded streams, by time.

    It shows the messages nearest to the moment. Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded
    yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
    """
    before_s, after_s = (parse_span(each or span) for each in (before, after))
    with open_relations(given, given.log_level) as relations:
        answer = relations.around(
            moment, streams, before_s=before_s, after_s=after_s, limit=limit, complete=given.complete
        )
    _print(answer, given.as_json)


def read(
    *,
    stream: str = argument("The stream."),
    offsets: list[int] = argument("The messages' offsets.", "OFFSET…", min=0),
    given: BrokerOptions,
    as_json: Json = False,
) -> None:
    """Read messages at offsets, without the database.

    An offset without a message exits with code 6; the messages before it are printed. `--json` prints JSON
    lines, one message each.
    """
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


def open_relations(servers: ServerOptions, log_level: LogLevel | None = None, **options: Any) -> Relations:
    """Open lookups for a command, and set up logging at a level; None leaves Python's default."""
    if log_level is not None:
        set_up_logging(LogFormat.TEXT, log_level)
    return Relations(servers.broker, servers.database_url, **options)


def one_or_all(values: list[str]) -> str | tuple[str, ...]:
    """Return the value of a key: a text, or a tuple for a composite."""
    return values[0] if len(values) == 1 else tuple(values)


def end_with(status: str) -> None:
    """End the command with the exit code for an answer's status."""
    if code := CODES[status]:
        raise typer.Exit(code)


def incomplete_lines(found: Answer | Trace) -> list[str]:
    """Return lines that say what could not be read."""
    lines = [f"could not be read: {first_few(found.unread)}"] if found.unread else []
    return [*lines, *(f"left out: {each.stream}: {each.reason}" for each in found.unreadable_streams)]


def _print(answer: Answer, as_json: bool) -> None:
    if as_json:
        print_json(_document(answer))
    else:
        if answer:
            print_messages(answer)
        for line in _lines(answer):
            say(line)
    end_with(answer.status)


def _lines(answer: Answer) -> list[str]:
    lines = []
    if not answer:
        rest = "; --complete reads that part" if answer.status == "not_recorded_yet" else ""
        lines = [answer.words + rest]
        if answer.explanation and not (answer.missing_keys or answer.new_keys):
            lines.append(answer.explanation)
    elif answer.status == "unproven":
        lines = ["unproven: there may be more, which cannot be proved or ruled out"]
    return [*lines, *incomplete_lines(answer), f"in {first_few(answer.streams)}"]


def _document(answer: Answer) -> dict[str, Any]:
    names = ("status", "expired", "deleted", "unread", "unreadable_streams", "missing_keys")
    return {
        **{name: getattr(answer, name) for name in names},
        "messages": [message_document(hit.message) | {"keys": hit.keys} for hit in answer.hits],
        "unrecorded_streams": answer.unrecorded_streams[:STREAMS_LISTED],
        "new_keys": [{"key": each.key, "streams": each.streams[:STREAMS_LISTED]} for each in answer.new_keys],
        "streams": answer.streams[:STREAMS_LISTED],
        "streams_count": len(answer.streams),
    }
