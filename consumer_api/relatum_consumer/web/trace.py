"""A conversation: all messages that are connected with one, or with a key's value, and what came from what."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from starlette.responses import Response

from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum_consumer import MissingKey, Status, Trace
from relatum_consumer.traces import Edge, Step, StopReason
from relatum_consumer.web.endpoint import endpoint, file_of
from relatum_consumer.web.masking import NOT_SAID
from relatum_consumer.web.messages import (
    HoldsOver,
    KeyValue,
    MessageRow,
    given_value,
    held_over,
    key_value,
    message_rows,
    sought_text,
)
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.rendering import csv_text
from relatum_consumer.web.site import Site

MESSAGES_MAX: Final = 1_000
"""Messages of a conversation that are read and drawn."""


@dataclass(frozen=True, slots=True)
class TraceAsked:
    stream: Annotated[str, Parameter("The stream of the message that it begins with …")] = ""
    offset: Annotated[int | None, Parameter("… and its offset.")] = None
    key: Annotated[str, Parameter("Instead of a message: a key's name …")] = ""
    value: Annotated[tuple[str, ...], Parameter("… and its value; of a composite key, its values in order.")] = ()
    by: Annotated[tuple[str, ...], Parameter("Keys to follow, and what they name; all where left out.")] = ()
    hops: Annotated[int, Parameter("Hops from the start at most.", least=1, most=1_000)] = 8
    limit: Annotated[int, Parameter("Messages at most.", least=1, most=MESSAGES_MAX)] = 200
    fan_out: Annotated[int, Parameter("Values that more messages have are not followed.", least=1, most=10_000)] = 200
    since: Annotated[datetime | None, Parameter("Only of this moment or later; UTC where no zone is given.")] = None
    until: Annotated[datetime | None, Parameter("Only before this moment.")] = None
    complete: Annotated[bool, Parameter("Also read what is not recorded yet.")] = False


# --- the answer -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TracedMessage(MessageRow):
    """A message of a conversation: `hop` is how far it is from the start, 0 for the start itself."""

    hop: int


@dataclass(frozen=True, slots=True)
class TracedEdge:
    """One message names another: `effect` came from `cause`, both by their places in `messages`, from 0 on.

    `cause` is None where the message that is named is not there. `took_s` is the time between both.
    """

    key: KeyValue
    cause: int | None
    effect: int
    took_s: float | None


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value that several of the messages have, by their places in `messages`."""

    key: KeyValue
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceStop:
    """What a bound left out: `reason` is fan_out, time, limit or hops."""

    reason: StopReason
    count: int
    key: KeyValue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer(HoldsOver):
    """The messages that are connected with a start, by time, and how.

    `status` is that of the worst step; `words` says it for a person, `advice` what to do. `edges` have a direction,
    `shared` have none. It holds over `streams`, the first hundred of `streams_count`.
    """

    status: Status
    words: str
    advice: str
    start: str
    messages: tuple[TracedMessage, ...]
    edges: tuple[TracedEdge, ...]
    shared: tuple[TracedValue, ...]
    stopped: tuple[TraceStop, ...]
    steps: tuple[Step, ...]
    missing_keys: tuple[MissingKey, ...]


async def trace(site: Site, asked: TraceAsked) -> TraceAnswer:
    """Follow a conversation."""
    found = await _traced(site, asked)
    await site.keys()
    places = {message.id: number for number, message in enumerate(found)}

    def value(key: str, text: str) -> KeyValue:
        if key in site.definitions:
            return key_value(site, site.definitions[key], text)
        # Removed since: nobody knows whether it was masked.
        return KeyValue(key, NOT_SAID, is_masked=True)

    def edge(each: Edge) -> TracedEdge:
        cause = None if each.cause is None else found.message(each.cause).time
        effect = found.message(each.effect).time
        took_s = None if cause is None or effect is None else (effect - cause).total_seconds()
        place = None if each.cause is None else places[each.cause]
        return TracedEdge(value(each.key, each.value), place, places[each.effect], took_s)

    return TraceAnswer(
        status=found.status,
        words=_words(found),
        advice=_advice(found, asked),
        start=_start(site, asked),
        messages=_messages(site, found),
        edges=tuple(edge(each) for each in found.edges),
        shared=tuple(
            TracedValue(value(each.key, each.value), tuple(places[where] for where in each.ids))
            for each in found.shared
        ),
        stopped=tuple(
            TraceStop(each.reason, each.count, None if each.key is None else value(each.key, each.value or ""))
            for each in found.stopped
        ),
        steps=found.steps,
        missing_keys=found.missing_keys,
        **held_over(found),
    )


def _messages(site: Site, found: Trace) -> tuple[TracedMessage, ...]:
    return tuple(
        TracedMessage(
            row.stream, row.offset, row.time, row.time_source, row.keys, row.bytes, row.preview, found.hops[each.id]
        )
        for row, each in zip(message_rows(site, found.messages), found, strict=True)
    )


async def _traced(site: Site, asked: TraceAsked) -> Trace:
    """The trace, from a message or from a value."""
    if asked.stream and (asked.key or asked.value):
        raise InvalidInput(
            "a conversation begins with a message (stream, offset) or with a value (key, value), not both"
        )
    bounds = {name: getattr(asked, name) for name in ("hops", "limit", "fan_out", "since", "until", "complete")}
    if asked.stream:
        if asked.offset is None:
            raise InvalidInput("offset is missing: the message's offset in the stream")
        message = await site.relations.read(asked.stream, asked.offset)
        return await site.relations.trace(message, by=asked.by or None, **bounds)
    if not asked.key:
        raise InvalidInput("key is missing: the key's name; or give stream and offset of a message")
    return await site.relations.trace((asked.key, given_value(asked.value)), by=asked.by or None, **bounds)


# --- in words ---------------------------------------------------------------------------------------------


def _start(site: Site, asked: TraceAsked) -> str:
    if asked.stream:
        return f"{asked.stream} · {asked.offset:,}"
    return f"{asked.key} {sought_text(site, asked.key, asked.value)}"


_BY_NEW_KEYS: Final = {
    Status.FOUND: "found: this is all by the older keys",
    Status.NOT_RECORDED_YET: "not recorded yet: there may be more by the new keys",
}


def _words(found: Trace) -> str:
    if found.missing_keys:
        return "absent: the message has no value of the keys, so nothing was looked for"
    if found.new_keys and not found.unrecorded_streams and found.status in _BY_NEW_KEYS:
        return _BY_NEW_KEYS[found.status]
    if found.status is Status.FOUND:
        return "found: not all was followed" if found.stopped else "found: this is all"
    if not found.messages or found.status in (Status.NOT_RECORDED_YET, Status.EXPIRED, Status.DELETED):
        return found.status.words
    if found.status is Status.UNPROVEN:
        return "unproven: there may be more, which nobody can prove or rule out"
    return "absent: nothing else is connected with it"


def _advice(found: Trace, asked: TraceAsked) -> str:
    is_open = bool(found.new_keys) or found.status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
    if found.explanation or not is_open or asked.complete:
        return found.explanation
    return "More may be in what is not recorded yet, which can be read from the streams."


# --- as a table -------------------------------------------------------------------------------------------


async def _csv(site: Site, asked: TraceAsked) -> Response:
    """A line for each message, with a column for each key."""
    found = await _traced(site, asked)
    await site.keys()
    head = ["time", "stream", "offset", "hop", "caused_by", *(f"key:{each}" for each in site.definitions)]
    rows = []
    for each in _messages(site, found):
        values = {key.key: key.value for key in each.keys}
        causes = " ".join(str(where) for where in found.causes(MessageId(each.stream, each.offset)))
        moment = "" if each.time is None else each.time.isoformat()
        known = [moment, each.stream, each.offset, each.hop, causes]
        rows.append([*known, *(values.get(key, "") for key in site.definitions)])
    text = csv_text(head, rows).encode("utf-8", "replace")
    return file_of(text, "text/csv; charset=utf-8", "conversation.csv")


endpoint(
    "/trace",
    "A conversation: all messages that are connected with one, or with a key's value.",
    template="trace.html",
    page="trace",
    is_asked=lambda asked: bool(asked.stream or asked.key or asked.value or asked.offset is not None),
    files={"csv": _csv},
)(trace)
