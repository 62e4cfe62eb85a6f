"""`relatum find`, `related`, `around`, `read` and `trace`: lookups, and helpers for other commands that look up."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from relatum.common.ids import MessageId
from relatum.errors import KeyNotDefined
from relatum.reading import Message, StreamReader
from relatum_cli.exits import ExitCode
from relatum_cli.options import (
    FORMS,
    LOOK_IN,
    BrokerOptions,
    CommandOptions,
    Json,
    KeyNames,
    Level,
    LookIn,
    ServerOptions,
    Since,
    Until,
    argument,
    option,
    parse_moment,
    parse_span,
    shared,
)
from relatum_cli.show import (
    LogFormat,
    LogLevel,
    counted,
    message_document,
    print_json,
    print_messages,
    say,
    set_up_logging,
)
from relatum_consumer import Answer, Relations, Trace
from relatum_consumer.lookups.answer import first_few
from relatum_consumer.traces import Tree

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
"""Maximum number of streams in an answer's document; `streams_count` counts all."""


class InTime(StrEnum):
    """Which message `--time` finds."""

    BEFORE = "before"
    AFTER = "after"
    NEAREST = "nearest"


Limit = Annotated[int, shared("The maximum number of messages.", "--limit", "-n", min=1, shown=True)]
Values = Annotated[list[str], argument("The key's value; for a composite key, its values in order.", "VALUE…")]


@dataclass(frozen=True)
class LookupOptions(CommandOptions):
    """The options of lookups: servers, completeness, log level and output."""

    complete: bool = option(False, "Also read messages that are not recorded yet, from the streams.", "--complete")
    log_level: Level = None


def find(
    *,
    key: str = argument("The key's name."),
    value: Values,
    streams: LookIn = None,
    to: list[str] | None = option(None, "The name of --streams before 0.5.", "--to", "-t", hidden=True),
    since: Since = None,
    until: Until = None,
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
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
    offset: int = argument("The message's offset.", min=0),
    to: list[str] | None = option(None, LOOK_IN, "--to", "-t", metavar="STREAM"),
    by: KeyNames = None,
    in_time: InTime | None = option(
        None, "Find the message before, after or nearest in time, in the one stream of --to.", "--time"
    ),
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """The given message is the one at OFFSET of STREAM. Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not
    recorded yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
    """
    if in_time and len(to or ()) != 1:
        raise typer.BadParameter("--time searches one stream: give --to once")
    if in_time and len(by or ()) > 1:
        raise typer.BadParameter("--time takes at most one key: give --by once")
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
    span: str = option("30s", "The time before and after the moment: 30s, 5m, 2h.", "--for", metavar="SPAN"),
    before: str | None = option(None, "The time before the moment, instead of --for.", metavar="SPAN"),
    after: str | None = option(None, "The time after the moment, instead of --for.", metavar="SPAN"),
    limit: Limit = 20,
    given: LookupOptions,
) -> None:
    """If there are more than --limit, it shows those nearest to the moment. Exits with 0 (found), 6 (absent, expired,
    or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
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


def open_relations(servers: ServerOptions, log_level: LogLevel | None = None, **options: Any) -> Relations:
    """Return an open `Relations` for a command. Also sets up logging at a level; None leaves Python's default."""
    if log_level is not None:
        set_up_logging(LogFormat.TEXT, log_level)
    return Relations(servers.broker, servers.database_url, **options)


def one_or_all(values: list[str]) -> str | tuple[str, ...]:
    """Return a key's value: a text, or a tuple for a composite key."""
    return values[0] if len(values) == 1 else tuple(values)


def end_with(status: str) -> None:
    if code := CODES[status]:
        raise typer.Exit(code)


def incomplete_lines(found: Answer | Trace) -> list[str]:
    lines = [f"could not be read: {first_few([*map(str, found.unread)])}"] if found.unread else []
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
        lines = ["unproven: it cannot be proven now that there are no more messages"]
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


_WORDS: Final = {
    "found": "found: there are no more messages within these bounds",
    "absent": "absent: no other message is connected with it",
    "expired": "expired: a message was connected with it, and retention has dropped it",
    "deleted": "deleted: a message was connected with it, and its stream was deleted",
    "not_recorded_yet": "not recorded yet: unrecorded messages may belong to it; --complete reads them",
    "unproven": "unproven: it cannot be proven now that there are no more messages",
}
_STOPS: Final = {
    "fan_out": "not followed: {value}, which {count:,} or more messages have (--fan-out)",
    "time": "left out: {count:,} or more messages with {value}, outside the time span (--since, --until)",
    "limit": "left out: {count:,} more messages (--limit)",
    "hops": "not followed: {count:,} values of the last messages (--hops)",
}
_STOPS_SHOWN: Final = 5


def trace(
    *,
    name: str = argument("A message's stream, or a key's name.", "STREAM|KEY"),
    value: list[str] = argument("The message's offset, or the key's value (or values, in order).", "OFFSET|VALUE…"),
    is_message: bool = option(False, "The name is a stream's, even if there is a key of that name.", "--message"),
    by: KeyNames = None,
    streams: LookIn = None,
    hops: int = option(8, "The maximum number of hops from the start.", min=1),
    limit: int = option(1_000, "The maximum number of messages.", "--limit", "-n", min=1),
    fan_out: int = option(200, "Do not follow values that more messages than this have.", min=1),
    since: Since = None,
    until: Until = None,
    given: LookupOptions,
) -> None:
    """If both a stream and a key have the name, it means the key; `--message` selects the stream. If keys name causes
    (`relatum keys add --names`), arrows lead from cause to effect. Exits with 0 (found), 6 (no other message is
    connected), 8 (not recorded yet: there may be more) or 11 (unproven). `--json` prints one document.
    """
    if is_message and not _is_offset(value):
        raise typer.BadParameter("--message needs a stream and one offset")
    with open_relations(given, given.log_level) as relations:
        options: dict[str, Any] = {"by": by, "streams": streams, "complete": given.complete}
        options |= {"since": since, "until": until, "hops": hops, "limit": limit, "fan_out": fan_out}
        found = _traced(relations, name, value, options, is_message=is_message)
    if given.as_json:
        messages = [message_document(message) | {"hop": found.hops[message.id]} for message in found]
        print_json(found.to_document() | {"messages": messages})
    else:
        start = next((str(where) for where, hop in found.hops.items() if hop == 0), f"{name} = {' | '.join(value)}")
        say("\n".join((*tree_lines(found, start), *_trace_lines(found))))
    end_with(found.status)


def _traced(relations: Relations, name: str, value: list[str], options: dict[str, Any], *, is_message: bool) -> Trace:
    if not is_message:
        try:
            return relations.trace((name, one_or_all(value)), **options)
        except KeyNotDefined as error:
            if error.key != name or not _is_offset(value):
                raise
    return relations.trace(relations.read(name, int(value[0])), **options)


def _is_offset(value: list[str]) -> bool:
    return len(value) == 1 and value[0].isascii() and value[0].isdigit() and len(value[0]) < 20


def _trace_lines(found: Trace) -> list[str]:
    """Return lines with the trace's size, what was left out, and the status."""
    lines = [f"{counted(len(found), 'message')}, {counted(max(found.hops.values(), default=0), 'hop')}"]
    lines += [
        _STOPS[stop.reason].format(value=f"{stop.key} = {stop.value}", count=stop.count)
        for stop in found.stopped[:_STOPS_SHOWN]
    ]
    if len(found.stopped) > _STOPS_SHOWN:
        lines.append(f"and {len(found.stopped) - _STOPS_SHOWN:,} more")
    gone = {"expired": found.expired, "deleted": found.deleted}
    lines += [f"{word}: {first_few([*map(str, places)])}" for word, places in gone.items() if places]
    lines += incomplete_lines(found)
    if found.missing_keys:
        keys = first_few([each.key for each in found.missing_keys])
        lines.append(f"the message has no value of {keys}: nothing was searched")
    else:
        is_by_older = bool(found.new_keys) and found.status == "found"
        lines.append(_WORDS[found.status] + (", by the older keys" if is_by_older else ""))
    return [*lines, found.explanation] if found.explanation else lines


_CONNECTED: Final = {"same": "same {0.key} = {0.value}", "caused": "▶ {0.key}", "cause": "◀ {0.key}"}


def tree_lines(found: Trace, start: str) -> Iterator[str]:
    """Yield the lines of a trace's tree: each message once, on the shortest path from the start."""
    tree = Tree(found.messages, [found.hops[each.id] for each in found], found.edges, found.shared)
    yield start
    for branch in tree.branches:
        is_value = branch.key is not None and branch.kind == "same"
        if is_value:
            yield f"  {_CONNECTED['same'].format(branch.key)}"
        for stem, below in branch.stems:
            for row in (stem, *below):
                label = "" if row.key is None or (is_value and row is stem) else _CONNECTED[row.kind].format(row.key)
                indent = "  " * (1 + is_value + row.depth)
                yield f"{indent}{label}{label and ': '}{_shown(found.messages[row.message])}"
    for key, number in tree.unknown:
        yield f"  {found.messages[number].id} names {key.key} = {key.value}: not found"


def _shown(message: Message) -> str:
    moment = "no time" if message.time is None else message.time.isoformat(sep=" ", timespec="milliseconds")
    return f"{message.id}  {moment}"
