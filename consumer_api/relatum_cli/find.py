"""`relatum find`, `related` and `around`, and what commands of groups and traces share with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from relatum.terminal import (
    FORMS,
    ExitCode,
    JsonOption,
    LogFormat,
    LogLevel,
    ServerOptions,
    SinceOption,
    UntilOption,
    argument,
    console,
    message_document,
    option,
    parse_moment,
    parse_span,
    print_json,
    print_messages,
    set_up_logging,
    spread,
)

if TYPE_CHECKING:
    from relatum_consumer import Answer, Relations

__all__ = [
    "CODES",
    "CompleteOption",
    "LogLevelOption",
    "StreamsOption",
    "around",
    "find",
    "open_relations",
    "related",
    "some",
]

CODES: Final = {
    "found": ExitCode.OK,
    "absent": ExitCode.NOT_THERE,
    "expired": ExitCode.NOT_THERE,
    "deleted": ExitCode.NOT_THERE,
    "not_recorded_yet": ExitCode.NOT_YET,
    "unproven": ExitCode.UNPROVEN,
}
"""With which code a command ends, by the status of its answer."""

STREAMS_SHOWN: Final = 5
"""Streams named in the last line of an answer; the line counts the others."""

STREAMS_LISTED: Final = 100
"""Streams listed in an answer's document; `streams_count` counts all."""


class InTime(StrEnum):
    """Which message in time is looked for."""

    BEFORE = "before"
    AFTER = "after"
    NEAREST = "nearest"


LOOK_IN: Final = "Look in this stream or super stream; repeatable. All where left out."

StreamsOption = Annotated[
    list[str] | None, typer.Option("--streams", "-s", metavar="STREAM", help=LOOK_IN, show_default=False)
]
LogLevelOption = Annotated[
    LogLevel | None, option("Log on stderr from this level on: debug tells what was asked of servers.")
]
CompleteOption = Annotated[
    bool, typer.Option("--complete", help="Also read what is not recorded yet, from the streams' tails.")
]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How much of an answer is wanted, and how sure; see `spread`."""

    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many messages.", min=1)] = 20
    complete: CompleteOption = False
    log_level: LogLevelOption = None


@spread
def find(
    key: Annotated[str, typer.Argument(help="The key's name.", show_default=False)],
    value: Annotated[list[str], argument("VALUE…", "Its value; a composite's values in order.")],
    streams: StreamsOption = None,
    to: Annotated[list[str] | None, typer.Option("--to", "-t", hidden=True, help="Before 0.5: --streams.")] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    *,
    options: AnswerOptions,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Find the messages whose KEY has this VALUE.

    Ends with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
    document: status, messages, streams.
    """
    with open_relations(servers, options.log_level) as relations:
        answer = relations.find(
            key,
            value[0] if len(value) == 1 else tuple(value),
            streams=[*(streams or ()), *(to or ())] or None,
            since=since,
            until=until,
            limit=options.limit,
            complete=options.complete,
        )
    _print(answer, as_json)


@spread
def related(
    stream: Annotated[str, typer.Argument(help="The stream of the message in hand.", show_default=False)],
    offset: Annotated[int, typer.Argument(help="Its offset.", min=0, show_default=False)],
    to: Annotated[
        list[str] | None,
        typer.Option("--to", "-t", metavar="STREAM", help=LOOK_IN, show_default=False),
    ] = None,
    by: Annotated[
        list[str] | None, option("By this key; repeatable. Any key where left out.", "--by", "-b", metavar="KEY")
    ] = None,
    in_time: Annotated[
        InTime | None, option("The message next to it in time, in the one stream of --to; --by restricts it.", "--time")
    ] = None,
    *,
    options: AnswerOptions,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Find the messages that belong to the one at OFFSET of STREAM: by equal keys, or by time.

    Ends with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
    document: status, messages, streams.
    """
    if in_time and len(to or ()) != 1:
        raise typer.BadParameter("--time looks in one stream: give --to once")
    if in_time and len(by or ()) > 1:
        raise typer.BadParameter("--time takes one key at most: give --by once")
    with open_relations(servers, options.log_level) as relations:
        message = relations.read(stream, offset)
        if in_time and to:
            answer = getattr(relations, in_time)(message, to[0], by=by[0] if by else None, complete=options.complete)
        else:
            answer = relations.related(message, to=to, by=by, limit=options.limit, complete=options.complete)
    _print(answer, as_json)


@spread
def around(
    moment: Annotated[datetime, typer.Argument(parser=parse_moment, help=f"{FORMS}.", show_default=False)],
    streams: StreamsOption = None,
    span: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="So long before and after it: 30s, 5m, 2h.")
    ] = "30s",
    before: Annotated[str | None, option("So long before it, instead.", metavar="SPAN")] = None,
    after: Annotated[str | None, option("So long after it, instead.", metavar="SPAN")] = None,
    *,
    options: AnswerOptions,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Show what happened around a MOMENT, in all recorded streams, merged by time: the messages nearest to it.

    Ends with 0 (found), 6 (absent, expired, or deleted), 8 (not recorded yet) or 11 (unproven). `--json` prints one
    document: status, messages, streams.
    """
    before_s, after_s = (parse_span(span if given is None else given) for given in (before, after))
    with open_relations(servers, options.log_level) as relations:
        answer = relations.around(
            moment, streams, before_s=before_s, after_s=after_s, limit=options.limit, complete=options.complete
        )
    _print(answer, as_json)


# `-5m` is a moment, and no options.
around.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]


def open_relations(servers: ServerOptions, log_level: LogLevel | None = None, **options: Any) -> "Relations":
    """The look-ups of a command, which log from a level on; None logs as Python does by itself."""
    if log_level is not None:
        set_up_logging(LogFormat.TEXT, log_level)
    # Here: who asks for a command's help waits for no database driver.
    from relatum_consumer import Relations

    return Relations(broker=servers.broker_url, database=servers.database_url, stream_url=servers.stream_url, **options)


def _print(answer: "Answer", as_json: bool) -> None:
    if as_json:
        print_json(_document(answer))
    else:
        if answer:
            print_messages(answer)
        if answer and answer.status == "unproven":
            console.print("unproven: there may be more, which nobody can prove or rule out")
        elif not answer:
            rest = "; --complete reads that part" if answer.status == "not_recorded_yet" else ""
            console.print(answer.words + rest, soft_wrap=True)
            if answer.explanation and not (answer.missing_keys or answer.new_keys):
                console.print(answer.explanation)
        if answer.unread:
            console.print(f"could not be read: {some([str(place) for place in answer.unread])}")
        for each in answer.unreadable_streams:
            console.print(f"left out: {each.stream}: {each.reason}")
        console.print(f"in {some(answer.streams)}")
    code = CODES[answer.status]
    if code:
        raise typer.Exit(code)


def some(names: Sequence[str]) -> str:
    """The first of names, and how many more there are."""
    more = len(names) - STREAMS_SHOWN
    return ", ".join(names[:STREAMS_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _document(answer: "Answer") -> dict[str, Any]:
    return {
        "status": str(answer.status),
        "messages": [message_document(hit.message) | {"keys": list(hit.keys)} for hit in answer.hits],
        "expired": answer.expired,
        "deleted": answer.deleted,
        "unread": answer.unread,
        "unreadable_streams": answer.unreadable_streams,
        "missing_keys": answer.missing_keys,
        "unrecorded_streams": list(answer.unrecorded_streams[:STREAMS_LISTED]),
        "new_keys": [{"key": each.key, "streams": list(each.streams[:STREAMS_LISTED])} for each in answer.new_keys],
        "streams": list(answer.streams[:STREAMS_LISTED]),
        "streams_count": len(answer.streams),
    }
