"""A conversation: all messages connected with a message or a key's value, with causes and effects."""

from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pydantic import Field

from relatum.errors import InvalidInput
from relatum_consumer import Status, Trace
from relatum_consumer.lookups.answer import Covered
from relatum_consumer.traces import Edge, Shared, Step, Stop
from relatum_consumer.web.endpoint import endpoint
from relatum_consumer.web.messages import MessageRow, covered, message_rows, query_text, query_value
from relatum_consumer.web.parameters import Moment, Number, Parameters, TextList
from relatum_consumer.web.site import Site

_Valued = TypeVar("_Valued", Edge, Shared, Stop)


class TraceParameters(Parameters):
    stream: str = Field("", description="The stream of the message to start with …")
    offset: Number | None = Field(None, description="… and its offset.")
    key: str = Field("", description="Instead of a message: a key's name …")
    value: TextList = Field((), description="… and its value; for a composite key, its values in order.")
    by: TextList = Field((), description="Keys to follow, with the keys that they name; all by default.")
    hops: int = Field(8, ge=1, le=1_000, description="Maximum hops from the start.")
    limit: int = Field(200, ge=1, le=1_000, description="Maximum messages.")
    fan_out: int = Field(200, ge=1, le=10_000, description="Values that more messages than this have are not followed.")
    since: Moment | None = Field(None, description="Only messages of this moment or later; UTC without a zone.")
    until: Moment | None = Field(None, description="Only messages before this moment.")
    complete: bool = Field(False, description="Also read messages that are not recorded yet.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer(Covered):
    """The messages connected with a start, by time, and their connections.

    `status` is that of the worst step; `words` explains it to people, and `advice` says what to do. `hops` has each
    message's distance from the start, 0 for the start itself. `edges` lead from cause to effect; `shared` has values
    that messages have in common; `stopped` says what a bound left out. The answer applies to `streams`, which has the
    first hundred of `streams_count`.
    """

    status: Status
    words: str
    advice: str
    start: str
    messages: tuple[MessageRow, ...]
    hops: tuple[int, ...]
    edges: tuple[Edge, ...]
    shared: tuple[Shared, ...]
    stopped: tuple[Stop, ...]
    steps: tuple[Step, ...]
    streams_count: int


@endpoint(
    "/trace",
    "A conversation: all messages that are connected with a message (stream, offset) or with a key's value (key, "
    "value), hop by hop over all keys, and what a bound left out (`stopped`).",
    tool="trace",
    is_submitted=lambda query: bool(query.stream or query.key or query.value or query.offset is not None),
)
async def trace(site: Site, query: TraceParameters) -> TraceAnswer:
    found = await _traced(site, query)
    searched = query_text(site, query.key, query.value)

    def masked(each: _Valued) -> _Valued:
        if each.key is None:
            return each
        value = site.masking.shown(each.key, each.value or "")
        return replace(each, value=value) if isinstance(each, Stop) else each._replace(value=value)

    return TraceAnswer(
        status=found.status,
        words=_words(found),
        advice=_advice(found, query),
        start=f"{query.stream} · {query.offset:,}" if query.stream else f"{query.key} {searched}",
        messages=message_rows(site, found.messages),
        hops=tuple(found.hops[each.id] for each in found),
        edges=tuple(map(masked, found.edges)),
        shared=tuple(map(masked, found.shared)),
        stopped=tuple(map(masked, found.stopped)),
        steps=found.steps,
        streams_count=len(found.streams),
        **covered(found),
    )


async def _traced(site: Site, query: TraceParameters) -> Trace:
    if query.stream and (query.key or query.value):
        raise InvalidInput(
            "a conversation begins with a message (stream, offset) or with a value (key, value), not both"
        )
    bounds = {name: getattr(query, name) for name in ("hops", "limit", "fan_out", "since", "until", "complete")}
    if query.stream:
        if query.offset is None:
            raise InvalidInput("offset is missing: give the message's offset in the stream")
        message = await site.relations.read(query.stream, query.offset)
        return await site.relations.trace(message, by=query.by or None, **bounds)
    if not query.key:
        raise InvalidInput("key is missing: give the key's name, or stream and offset of a message")
    return await site.relations.trace((query.key, query_value(query.value)), by=query.by or None, **bounds)


# --- in words ---------------------------------------------------------------------------------------------


_BY_NEW_KEYS: Final = {
    Status.FOUND: "found: this is all by the older keys",
    Status.NOT_RECORDED_YET: "not recorded yet: there may be more by the new keys",
}


def _words(found: Trace) -> str:
    if found.missing_keys:
        return "absent: the message has no value of the keys, so nothing was searched"
    if found.new_keys and not found.unrecorded_streams and found.status in _BY_NEW_KEYS:
        return _BY_NEW_KEYS[found.status]
    if found.status is Status.FOUND:
        return "found: not all was followed" if found.stopped else "found: this is all"
    if not found.messages or found.status in (Status.NOT_RECORDED_YET, Status.EXPIRED, Status.DELETED):
        return found.status.words
    if found.status is Status.UNPROVEN:
        return "unproven: there may be more messages; this cannot be proven now"
    return "absent: nothing else is connected with it"


def _advice(found: Trace, query: TraceParameters) -> str:
    is_open = bool(found.new_keys) or found.status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
    if found.explanation or not is_open or query.complete:
        return found.explanation
    return "The part that is not recorded yet may have more, and can be read from the streams."
