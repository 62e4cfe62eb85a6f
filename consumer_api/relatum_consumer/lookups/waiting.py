"""Lookups that wait until there is a message, or return an answer at their timeout.

All waits of one `Relations` share one index query, which runs at an adaptive pace. It only selects the waits that
should probe; each of these then probes by itself, as a lookup does. So the query may select too many waits, and it may
miss some, because each wait probes once more at its timeout. See docs/adr/0048.

A wait ends like any lookup, with a proof if nothing was found. The proof queries the broker for the streams' ends: this
takes a few milliseconds, and longer with large bodies. `GRACE_S` after the timeout the answer is `unproven`.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from relatum.common.checks import checked_seconds
from relatum.common.ids import MessageId
from relatum.common.waiting import backoff, pause, within
from relatum.errors import StreamReplaced, Transient
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.answer import Answer, Status
from relatum_consumer.lookups.answering import recorded_answer
from relatum_consumer.lookups.by_key import Question, answer, probe
from relatum_consumer.lookups.catalog import Catalog, streams_meant
from relatum_consumer.lookups.servers import Servers

POLL_S_MIN: Final = 0.005
"""First pause between two polls for groups, and of a wait for an indexed message, in seconds. It doubles."""

POLL_S_MAX: Final = 0.05
"""Longest pause between two polls for groups, in seconds: about the recorder's lag."""

UNREADABLE_POLL_S_MAX: Final = 0.5
"""Longest pause of a wait whose value is indexed, but whose messages cannot be read, in seconds."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Pause:
    """Yielded by an iteration that has no item now: the caller sleeps for this many seconds, without a thread."""

    seconds: float


def without_pauses(items: Generator[_Item | Pause, None, None]) -> Generator[_Item, None, None]:
    """Yield the items, and sleep in this thread during pauses."""
    with closing(items):
        for each in items:
            if isinstance(each, Pause):
                pause(each.seconds)
            else:
                yield each


@dataclass(frozen=True, slots=True)
class Watch:
    """A wait until `until` for a row in the index with one of the values, other than those of the message `beside`."""

    names: tuple[str, ...] | None
    values: tuple[tuple[int, str], ...]
    beside: MessageId | None
    until: float


_GIVEN: Final = f"""
      SELECT given.set_number, s.stream_id, s.name
      FROM unnest(:set_numbers::int[], :set_names::text[]) AS given (set_number, set_name), relatum.streams s
      WHERE {streams_meant(None)}"""

# Three SELECTs, each with its own index: one condition for all would compare every given name with every stream. The
# inner LIMITs make PostgreSQL join row by row, with the index.
WATCHED: Final = sql(f"""
    WITH meant AS MATERIALIZED (
      {_GIVEN} AND given.set_name = s.name
      UNION
      {_GIVEN} AND given.set_name = s.super_stream
      UNION
      {_GIVEN} AND given.set_name IS NULL
    )
    SELECT wait.number
    FROM unnest(
      :numbers::int[], :amongs::int[], :key_ids::smallint[], :values::text[], :own_streams::text[],
      :own_offsets::bigint[]
    ) AS wait (number, among, key_id, value, own_stream, own_offset)
    CROSS JOIN LATERAL (
      SELECT 1
      FROM meant
      CROSS JOIN LATERAL (
        SELECT 1
        FROM relatum.relationships r
        WHERE r.key_id = wait.key_id AND r.value = wait.value COLLATE "C" AND r.stream_id = meant.stream_id
          AND (meant.name <> wait.own_stream OR r.stream_offset <> wait.own_offset)
          AND {part_may_hold_values("r", "wait.key_id", *2 * ['wait.value COLLATE "C"'])}
        LIMIT 1
      ) AS row
      WHERE meant.set_number = wait.among
      LIMIT 1
    ) AS is_there""")
"""Selects the numbers of the waits for which the index has a row.

It probes the index for each value and stream of a wait, up to the first row. Waits on the same streams share one set of
names; a NULL name means all recorded streams.
"""


def parameters_of(vhost: str, watches: Sequence[Watch]) -> dict[str, Any]:
    """Return the parameters of `WATCHED`; a wait's number is its index."""
    sets: dict[tuple[str, ...] | None, int] = {}
    rows: list[tuple[int, int, int, str, str, int]] = []
    for number, watch in enumerate(watches):
        among = sets.setdefault(watch.names, len(sets))
        own = watch.beside or ("", -1)
        rows += [(number, among, key_id, value, *own) for key_id, value in watch.values]
    meant = [(number, name) for names, number in sets.items() for name in (names or (None,))]
    columns = ("numbers", "amongs", "key_ids", "values", "own_streams", "own_offsets")
    return {
        "vhost": vhost,
        "set_numbers": [number for number, _ in meant],
        "set_names": [name for _, name in meant],
        **{name: list(column) for name, column in zip(columns, zip(*rows, strict=True), strict=True)},
    }


def poll(servers: Servers, vhost: str, watches: Sequence[Watch]) -> Iterable[tuple[int, bool]]:
    """Query the index for all waits, and yield the numbers of those that have a row."""
    return ((number, True) for (number,) in servers.rows(WATCHED, parameters_of(vhost, watches)))


GRACE_S: Final = 0.25
"""Seconds after the timeout in which a running request may end; a proof usually takes a few milliseconds."""

COLD_S: Final = 1.0
"""Minimum seconds allowed for reading keys and streams over a new connection, before the search can begin."""

CLOSE_S: Final = 0.05
"""A transient error within this many seconds of the limit counts as the timeout."""


class Waiting:
    """One wait for an answer to a question: it probes, pauses, and repeats. With a `timeout_s` of 0 it probes once.

    After a probe without an answer, the caller pauses for `pause_s`, waits for `watch`, and sets `has_row`.
    """

    watch: Watch

    def __init__(self, catalog: Catalog, make_question: Callable[[], Question], timeout_s: float) -> None:
        self._catalog = catalog
        self._make_question = make_question
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._until = time.monotonic() + timeout_s
        self._question: Question | None = None
        self._unreadable_pauses = backoff(UNREADABLE_POLL_S_MAX, POLL_S_MIN)
        self.pause_s = 0.0
        self.has_row = False

    def probe(self) -> Answer | None:
        """Probe the index. Return the answer if there is a message or the timeout has passed; None to keep waiting."""
        if not self._timeout_s:
            return answer(self._catalog, self._make_question())
        ends_at = self._until + GRACE_S
        if self._question is None:
            with within(max(ends_at - time.monotonic(), COLD_S)):
                self._question = self._make_question()
                self._catalog.check_names(self._question.names)
        question, now = self._question, time.monotonic()
        try:
            with within(ends_at - now):
                if now >= self._until or not question.wanted:
                    return answer(self._catalog, question)
                found = self._probed(question)
        except Transient as error:
            if time.monotonic() < ends_at - CLOSE_S:
                raise
            return self._timeout_answer(question, error)
        if found is None:
            self._prepare_pause(question)
        return found

    def _probed(self, question: Question) -> Answer | None:
        try:
            found = probe(self._catalog, question)
        except StreamReplaced:
            # A recorder will correct the record; otherwise the proof at the timeout reports the error.
            question.being_read.clear()
            return None
        return recorded_answer(self._catalog, question.names, found) if found.hits else None

    def _prepare_pause(self, question: Question) -> None:
        values = tuple((each.key_id, each.value) for each in question.wanted)
        own_id = min(question.own.ids, default=None)
        self.watch, self.pause_s = Watch(question.names, values, own_id, self._until), 0.0
        if self.has_row:
            # The index has a row of a message that retention has dropped, or that cannot be read: back off.
            self.pause_s = max(0.0, min(next(self._unreadable_pauses), self._until - time.monotonic()))

    def _timeout_answer(self, question: Question, error: Transient) -> Answer:
        """Return an unproven answer from what is known, without further requests."""
        streams = self._catalog.recorded(question.names) or question.names
        if not streams:
            raise error
        unread, copies = tuple(question.being_read), question.own.copies
        return Answer(Status.UNPROVEN, streams=streams, unread=unread, self_ids=copies)
