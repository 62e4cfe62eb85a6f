"""Look-ups that wait: until there is a message, and no longer than asked. Running out of time is an answer.

What an answer may say when the time is over takes a proof, which asks the broker for the streams' ends: that takes
time, too, much of it where bodies are large. So the proof begins as long before the end as the last one took, and ends
at most `GRACE_S` behind it. One that does not end in time is no proof: the answer is `unproven` then, or
`not_recorded_yet` where that much is known, and never `absent`.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

from relatum.errors import ReadTimeout, StreamReplaced, Transient
from relatum.ids import MessageId
from relatum.waiting import within
from relatum_consumer.lookups._answer import Answer, Status
from relatum_consumer.lookups._answering import Found, concluded, recorded_answer
from relatum_consumer.lookups._catalog import Catalog
from relatum_consumer.lookups._limits import POLL_S_MIN, USELESS_POLL_S_MAX
from relatum_consumer.lookups._proof import Evidence, evidence_together
from relatum_consumer.lookups._related import Question, probe, without_values
from relatum_consumer.lookups._replaced import again_if_replaced
from relatum_consumer.lookups._requests import InTime, LookupRequest, Pause, Read, Steps

GRACE_S: Final = 0.25
"""Seconds behind the end of a wait in which what was begun may still end: a proof takes a few milliseconds mostly."""

COLD_S: Final = 1.0
"""Seconds at least for what must be known before anything can be sought: keys and streams, over a new connection."""

CLOSE_S: Final = 0.05
"""Seconds before its limit from which on a passing error is taken for a question that ran out of time."""

PROOF_FACTOR: Final = 1.5
"""How much longer than the last one a proof is expected to take."""

PROOF_S_MAX: Final = 5.0
"""The longest time by which a proof begins before the end of a wait; no more than half of the wait either way."""

_Result = TypeVar("_Result")

logger = logging.getLogger("relatum.relations")


class OutOfTime(Exception):
    """The time of a wait is over.

    Attributes:
        unread: What was being read then.
        error: What a question met that ran out of time; for a wait of which not even that can be said what it means.
    """

    def __init__(self, request: LookupRequest, met: Transient | None = None) -> None:
        super().__init__()
        self.unread: tuple[MessageId, ...] = tuple(request.ids) if type(request) is Read else ()
        self.error = met or ReadTimeout("The time was over before anything could be asked.")


@contextmanager
def in_time(request: LookupRequest, until: float) -> Iterator[None]:
    """Carry a request out inside, no longer than to a moment.

    Raises:
        OutOfTime: it had no answer then. Other errors, and passing ones before that, are its own.
    """
    if time.monotonic() >= until:
        raise OutOfTime(request)
    try:
        with within(until - time.monotonic()):
            yield
    except Transient as met:
        if time.monotonic() >= until - CLOSE_S:
            raise OutOfTime(request, met) from met
        raise


def asked_at_least(until: float, steps: Steps[_Result]) -> Steps[_Result]:
    """What must be known before anything can be sought."""
    try:
        result: _Result = yield from InTime(steps, max(until + GRACE_S, time.monotonic() + COLD_S))
    except OutOfTime as out:
        raise out.error from None
    return result


def wait(catalog: Catalog, question: Question, until: float, timeout_s: float) -> Steps[Answer]:
    """Probe the index until it names a message or the time is over; then say what is known."""
    waiting = _Waiting(catalog, question, until, timeout_s)
    try:
        answer: Answer = question.named((yield from InTime(waiting.run(), until + GRACE_S)))
    except OutOfTime as out:
        waiting.note_proof()
        return question.named(waiting.out_of_time(out))
    if catalog.is_news([*answer.unattended, *(each.key for each in answer.new_keys)]):
        logger.warning("waited in vain for what is not recorded: %s", answer.explanation)
    return answer


class _Waiting:
    """One wait."""

    def __init__(self, catalog: Catalog, question: Question, until: float, timeout_s: float) -> None:
        self._catalog = catalog
        self._question = question
        self._until = until
        # Where the last proof took long, this one begins before the end.
        self._proof_at = until - min(PROOF_FACTOR * catalog.proof_s, PROOF_S_MAX, timeout_s / 2)
        self._proof_began: float | None = None
        self._known: Evidence | None = None
        self._was_replaced = False

    def run(self) -> Steps[Answer]:
        """Wait, and prove what there is to prove."""
        catalog, question = self._catalog, self._question
        yield from catalog.check_names(question.names)
        if not question.wanted:
            return (yield from without_values(catalog, question.names, question.lacking))
        pause, is_seen = POLL_S_MIN, False
        while True:
            found = yield from self._probed()
            if found.hits:
                return (yield from recorded_answer(catalog, question.names, found))
            now = time.monotonic()
            if now >= self._proof_at and self._known is None:
                self._known = yield from self._proof()
            elif now >= self._until:
                break
            else:
                next_at = self._until if self._known is not None else self._proof_at
                if is_seen:
                    # The index has a row all the time, of a message that retention took or that cannot be read.
                    yield from Pause(max(0.0, min(pause, next_at - now)))
                    pause = min(2 * pause, USELESS_POLL_S_MAX)
                is_seen = yield from question.watch(next_at)
        assert self._known is not None, "the proof comes before the end"
        return (yield from concluded(catalog, self._known, found, was_read=False))

    def _probed(self) -> Steps[Found]:
        """Probe; nothing where the stream is being replaced: a proof, made anew once, says so if it stays like that."""
        try:
            return (yield from probe(self._catalog, self._question))
        except StreamReplaced as error:
            is_left_out = self._question.names is None and self._was_replaced and self._catalog.leave_out(error)
            if self._known is not None and self._was_replaced and not is_left_out:
                raise
            self._was_replaced, self._known = self._known is not None, None
            return Found()

    def _proof(self) -> Steps[Evidence]:
        """The evidence."""
        self._proof_began = time.monotonic()
        keys = [wanted.key_id for wanted in self._question.wanted]
        proof = partial(evidence_together, self._catalog, self._question.names, keys)
        known: Evidence = yield from again_if_replaced(self._catalog, proof, leaves_out=self._question.names is None)
        self.note_proof()
        return known

    def note_proof(self) -> None:
        """Remember how long the proof took, or that it took longer than it had."""
        if self._proof_began is not None and self._known is None:
            self._catalog.proof_s = time.monotonic() - self._proof_began

    def out_of_time(self, out: OutOfTime) -> Answer:
        """What is known, without asking for more."""
        known = self._known
        streams = self._catalog.known(self._question.names) if known is None else known.streams
        if not streams:
            raise out.error
        status = Status.UNPROVEN
        if known is not None:
            status = known.status(is_found=False, was_read=False, is_whole=False)
        return Answer(status, streams=streams, unread=out.unread)
