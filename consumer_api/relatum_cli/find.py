"""`relatum find`, `related`, `around`, `read` and `trace`: lookups, and what other lookups need."""

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

    complete: bool = option(False, "Also read what is not recorded yet, from the streams' tails.", "--complete")
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


# --- trace ------------------------------------------------------------------------------------------------

_WORDS: Final = {
    "found": "found: there is no more, within these bounds",
    "absent": "absent: nothing else is connected with it",
    "expired": "expired: there was something, and retention has dropped it",
    "deleted": "deleted: there was something, and its stream was deleted",
    "not_recorded_yet": "not recorded yet: there may be more in what is not recorded; --complete reads that",
    "unproven": "unproven: there may be more, which cannot be proved or ruled out",
}
_STOPS: Final = {
    "fan_out": "not followed: {value}, which {count:,} messages have, or more (--fan-out)",
    "time": "left out: {count:,} or more messages of other times with {value}",
    "limit": "left out: {count:,} more messages (--limit)",
    "hops": "not followed: {count:,} values of the last messages (--hops)",
}
_STOPS_SHOWN: Final = 5


def trace(
    *,
    name: str = argument("A message's stream, or a key's name.", "STREAM|KEY"),
    value: list[str] = argument("Its offset, or the key's value (a composite's values in order).", "OFFSET|VALUE…"),
    is_message: bool = option(False, "Take the name as a stream's, even if a key has it.", "--message"),
    by: KeyNames = None,
    streams: LookIn = None,
    hops: int = option(8, "The most hops from the start.", min=1),
    limit: int = option(1_000, "At most this many messages.", "--limit", "-n", min=1),
    fan_out: int = option(200, "Follow values that at most this many messages have.", min=1),
    since: Since = None,
    until: Until = None,
    given: LookupOptions,
) -> None:
    """Show all messages connected with one, or with a value, and what caused what.

    A name of both a stream and a key means the key, unless you add --message. If keys name other messages
    (`relatum keys add --names`), arrows lead from cause to effect.
    Exits with 0 (found), 6 (nothing else is connected), 8 (not recorded yet: there may be more) or 11 (unproven).
    `--json` prints one document.
    """
    if is_message and not _is_offset(value):
        raise typer.BadParameter("--message takes a stream and an offset")
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
    return len(value) == 1 and value[0].isascii() and value[0].isdigit()


def _trace_lines(found: Trace) -> list[str]:
    """Return lines with the counts, where the trace stopped, and its status."""
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
        lines.append(f"it has no value of {keys}: nothing was looked for")
    else:
        is_by_older = bool(found.new_keys) and found.status == "found"
        lines.append(_WORDS[found.status] + (", by the older keys" if is_by_older else ""))
    return [*lines, found.explanation] if found.explanation else lines


_CONNECTED: Final = {"same": "same {0.key} = {0.value}", "caused": "▶ {0.key}", "cause": "◀ {0.key}"}


def tree_lines(found: Trace, start: str) -> Iterator[str]:
    """Yield the lines of a tree: each message once, on the shortest path from the start."""
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
