"""How an answer comes about: from what the index names, or by evidence, the index once more, and the rest read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from relatum.ids import MessageId
from relatum_consumer.lookups._answer import Answer, Hit, Status
from relatum_consumer.lookups._catalog import Catalog
from relatum_consumer.lookups._proof import Evidence, evidence_together
from relatum_consumer.lookups._replaced import again_if_replaced
from relatum_consumer.lookups._requests import Steps


@dataclass(frozen=True, slots=True)
class Found:
    """What was found, each hit checked; where retention took some; where some could not be read; whose stream is gone.

    Retention may have taken one of which nobody knows where it lay: `has_expired`.
    """

    hits: tuple[Hit, ...] = ()
    expired: tuple[MessageId, ...] = ()
    unread: tuple[MessageId, ...] = ()
    has_expired: bool = False
    deleted: tuple[MessageId, ...] = ()


Find: TypeAlias = Callable[[Evidence | None], Steps[Found]]
"""Finds what the index names and, where evidence is given, what is not recorded."""


def answered(
    catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int], find: Find, *, complete: bool
) -> Steps[Answer]:
    """The answer to what is found in streams, once more from the start where one was replaced under our hands."""
    steps = partial(_answered, catalog, names, list(key_ids), find, complete=complete)
    return (yield from again_if_replaced(catalog, steps, leaves_out=names is None))


def _answered(
    catalog: Catalog, names: Sequence[str] | None, key_ids: Sequence[int], find: Find, *, complete: bool
) -> Steps[Answer]:
    if not complete:
        found = yield from find(None)
        if found.hits:
            return (yield from recorded_answer(catalog, names, found))
    known = yield from evidence_together(catalog, names, key_ids)
    found = yield from find(known if complete else None)
    if complete or not found.hits:
        yield from known.check_present(catalog, names)
    return (yield from concluded(catalog, known, found, was_read=complete))


def recorded_answer(catalog: Catalog, names: Sequence[str] | None, found: Found) -> Steps[Answer]:
    """The answer where the table knows something: nothing needs a proof, and nothing more is asked."""
    streams = yield from catalog.recorded(names, (hit.message.stream for hit in found.hits))
    left_out = catalog.leaves_out(names)
    status = Status.UNPROVEN if found.unread or left_out else Status.FOUND
    return Answer(
        status,
        found.hits,
        found.expired,
        streams=streams,
        unread=found.unread,
        left_out=left_out,
        deleted=found.deleted,
    )


def concluded(catalog: Catalog, known: Evidence, found: Found, *, was_read: bool) -> Steps[Answer]:
    """The answer that evidence and what was found after it amount to."""
    hits, unread, deleted = found.hits, found.unread, found.deleted
    has_expired = found.has_expired or bool(found.expired)
    if not known.streams and not (hits or has_expired or deleted):
        if known.left_out:
            raise catalog.why_left_out(known.left_out[0])
        yield from catalog.nothing_recorded(known.gone)
    status = known.status(
        is_found=bool(hits),
        was_read=was_read,
        is_whole=not unread,
        has_expired=has_expired,
        was_deleted=bool(deleted),
    )
    # What was recorded of a stream that was deleted is known: the answer holds over it, too.
    streams = tuple(sorted({*known.streams, *(where.stream for where in deleted)}))
    answer = Answer(
        status, hits, found.expired, streams=streams, unread=unread, left_out=known.left_out, deleted=deleted
    )
    if status is not Status.NOT_RECORDED_YET:
        return answer
    unattended = yield from known.unattended(catalog)
    return replace(answer, unattended=unattended, new_keys=(yield from known.named_new_keys(catalog)))
