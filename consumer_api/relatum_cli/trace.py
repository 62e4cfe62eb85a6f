"""`relatum trace`: the messages connected with a message or a value, as a tree or JSON."""

from collections.abc import Iterator
from typing import Any, Final

import typer

from relatum.errors import KeyNotDefined
from relatum.reading import Message
from relatum_cli.find import LookupOptions, end_with, incomplete_lines, one_or_all, open_relations
from relatum_cli.options import KeyNames, LookIn, Since, Until, argument, option
from relatum_cli.show import counted, first_few, message_document, print_json, say
from relatum_consumer import Relations, Trace
from relatum_consumer.traces import Tree

_WORDS: Final = {
    "found": "found: there is no more, within these bounds",
    "absent": "absent: nothing else is connected with it",
    "expired": "expired: there was something, and retention has dropped it",
    "deleted": "deleted: there was something, and its stream was deleted",
    "not_recorded_yet": "not recorded yet: there may be more among {uncovered}; --complete reads them",
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
    name: str = argument("The message's stream; or a key's name.", "STREAM|KEY"),
    value: list[str] = argument("Its offset; or the key's value, a composite's values in order.", "OFFSET|VALUE…"),
    is_message: bool = option(False, "The name is a stream's, even if a key has the same name.", "--message"),
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

    If a key has the name, it is the key's, unless you add --message. If keys name other messages
    (`relatum keys add --names`), arrows lead from cause to effect.
    Exits with 0 (found), 6 (nothing else is connected), 8 (not recorded yet: there may be more) or 11 (unproven).
    `--json` prints one document.
    """
    if is_message and not _is_offset(value):
        raise typer.BadParameter("--message takes a stream and an offset")
    with open_relations(given, given.log_level) as relations:
        options: dict[str, Any] = {
            "by": by,
            "streams": streams,
            "complete": given.complete,
            "since": since,
            "until": until,
        }
        options |= {"hops": hops, "limit": limit, "fan_out": fan_out}
        found = _traced(relations, name, value, options, is_message=is_message)
    if given.as_json:
        messages = [message_document(message) | {"hop": found.hops[message.id]} for message in found]
        print_json(found.to_document() | {"messages": messages})
    else:
        start = next((str(where) for where, hop in found.hops.items() if hop == 0), f"{name} = {' | '.join(value)}")
        say("\n".join((*tree_lines(found, start), *_lines(found))))
    end_with(found.status)


def _traced(relations: Relations, name: str, value: list[str], options: dict[str, Any], *, is_message: bool) -> Trace:
    """Return the trace from a key's value if the key exists, else from the message at an offset."""
    if not is_message:
        try:
            return relations.trace((name, one_or_all(value)), **options)
        except KeyNotDefined as error:
            if error.key != name or not _is_offset(value):
                raise
    return relations.trace(relations.read(name, int(value[0])), **options)


def _is_offset(value: list[str]) -> bool:
    return len(value) == 1 and value[0].isascii() and value[0].isdigit()


def _lines(found: Trace) -> list[str]:
    """Return lines with the counts, where the trace stopped, and its status."""
    lines = [f"{counted(len(found), 'message')}, {counted(max(found.hops.values(), default=0), 'hop')}"]
    lines += [
        _STOPS[stop.reason].format(value=f"{stop.key} = {stop.value}", count=stop.count)
        for stop in found.stopped[:_STOPS_SHOWN]
    ]
    if len(found.stopped) > _STOPS_SHOWN:
        lines.append(f"and {len(found.stopped) - _STOPS_SHOWN:,} more")
    gone = {"expired": found.expired, "deleted": found.deleted}
    lines += [f"{word}: {first_few(places)}" for word, places in gone.items() if places]
    lines += incomplete_lines(found)
    if found.missing_keys:
        keys = first_few([each.key for each in found.missing_keys])
        lines.append(f"it has no value of {keys}: nothing was looked for")
    else:
        lines.append(_words(found))
    return [*lines, found.explanation] if found.explanation else lines


def _words(found: Trace) -> str:
    """Return the status in words. Unrecorded offsets are mostly at the end of a stream that is being written."""
    if found.new_keys and found.status == "found":
        return f"{_WORDS['found']}, by the older keys"
    new = {stream for each in found.new_keys for stream in each.streams}
    gaps = [gap for gap in found.uncovered if gap.stream not in new]
    uncovered = "older messages"
    if gaps:
        count = sum(gap.stop - gap.start for gap in gaps)
        places = first_few([f"{gap.stream} {gap.start:,} to {gap.stop - 1:,}" for gap in gaps])
        uncovered = f"{count:,} offsets that were not recorded when it began: {places}"
    return _WORDS[found.status].format(uncovered=uncovered)


# --- the tree ---------------------------------------------------------------------------------------------

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
