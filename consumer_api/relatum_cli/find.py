"""`relatum find`, `related`, `around` and `trace`: lookups."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import typer

from relatum.errors import KeyNotDefined
from relatum_cli.exits import ExitCode
from relatum_cli.options import LOOK_IN, KeyNames, LookIn, LookupOptions, Moment, Since, Until, argument, option, span
from relatum_cli.show import counted, message_document, print_json, print_messages, say
from relatum_consumer import Answer, Trace
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


Values = Annotated[list[str], argument("The key's value; for a composite key, its values in order.", "VALUE…")]


def find(
    *,
    key: str = argument("The key's name."),
    value: Values,
    streams: LookIn = None,
    to: list[str] | None = option(None, "The name of --streams before 0.5.", "--to", "-t", hidden=True),
    since: Since = None,
    until: Until = None,
    limit: int = option(20, "The maximum number of messages.", "--limit", "-n", min=1),
    given: LookupOptions,
) -> None:
    """Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
    document: status, messages, streams.
    """
    names = [*(streams or ()), *(to or ())] or None
    with given.relations(given.log_level) as relations:
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
    in_time: Literal["before", "after", "nearest"] | None = option(
        None, "Find the message before, after or nearest in time, in the one stream of --to.", "--time"
    ),
    limit: int = option(20, "The maximum number of messages.", "--limit", "-n", min=1),
    given: LookupOptions,
) -> None:
    """The given message is the one at OFFSET of STREAM. Exits with 0 (found), 6 (absent, expired, or deleted), 8 (not
    recorded yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
    """
    if in_time and len(to or ()) != 1:
        raise typer.BadParameter("--time searches one stream: give --to once")
    if in_time and len(by or ()) > 1:
        raise typer.BadParameter("--time takes at most one key: give --by once")
    with given.relations(given.log_level) as relations:
        message = relations.read(stream, offset)
        if in_time and to:
            answer = getattr(relations, in_time)(message, to[0], by=by[0] if by else None, complete=given.complete)
        else:
            answer = relations.related(message, to=to, by=by, limit=limit, complete=given.complete)
    _print(answer, given.as_json)


def around(
    *,
    moment: Moment,
    streams: LookIn = None,
    both: float = span("30s", "The time before and after the moment: 30s, 5m, 2h.", "--for"),
    before: float | None = span(None, "The time before the moment, instead of --for."),
    after: float | None = span(None, "The time after the moment, instead of --for."),
    limit: int = option(20, "The maximum number of messages.", "--limit", "-n", min=1),
    given: LookupOptions,
) -> None:
    """If there are more than --limit, it shows those nearest to the moment. Exits with 0 (found), 6 (absent, expired,
    or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one document: status, messages, streams.
    """
    before_s, after_s = (both if each is None else each for each in (before, after))
    with given.relations(given.log_level) as relations:
        answer = relations.around(
            moment, streams, before_s=before_s, after_s=after_s, limit=limit, complete=given.complete
        )
    _print(answer, given.as_json)


def one_or_all(values: list[str]) -> str | tuple[str, ...]:
    """Return a key's value: a text, or a tuple for a composite key."""
    return values[0] if len(values) == 1 else tuple(values)


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
    raise typer.Exit(CODES[answer.status])


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
    is_offset = len(value) == 1 and re.fullmatch("[0-9]{1,19}", value[0])
    if is_message and not is_offset:
        raise typer.BadParameter("--message needs a stream and one offset")
    with given.relations(given.log_level) as relations:
        options: dict[str, Any] = {"by": by, "streams": streams, "complete": given.complete}
        options |= {"since": since, "until": until, "hops": hops, "limit": limit, "fan_out": fan_out}
        try:
            start: Any = relations.read(name, int(value[0])) if is_message else (name, one_or_all(value))
            found = relations.trace(start, **options)
        except KeyNotDefined as error:
            if is_message or error.key != name or not is_offset:
                raise
            found = relations.trace(relations.read(name, int(value[0])), **options)
    if given.as_json:
        messages = [message_document(message) | {"hop": found.hops[message.id]} for message in found]
        print_json(found.to_document() | {"messages": messages})
    else:
        first = next((str(where) for where, hop in found.hops.items() if hop == 0), f"{name} = {' | '.join(value)}")
        say("\n".join((*tree_lines(found, first), *_trace_lines(found))))
    raise typer.Exit(CODES[found.status])


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
                message = found.messages[row.message]
                moment = message.time.isoformat(sep=" ", timespec="milliseconds") if message.time else "no time"
                yield f"{indent}{label}{label and ': '}{message.id}  {moment}"
    for key, number in tree.unknown:
        yield f"  {found.messages[number].id} names {key.key} = {key.value}: not found"
