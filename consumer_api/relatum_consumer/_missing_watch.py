"""Telling of messages that were not followed as they fall due: each once, and with little to remember.

What was told of is a moment and an offset for each stream: all messages before both. A step goes on to a later moment
and later offsets: it looks at the messages of the times between the two moments, and at what has come meanwhile of
earlier times, behind the offsets. So a message is looked at once, also one that was published long after its time. The
moment is at most as late as what is known of both streams, less the time allowed and what clocks may differ by: what is
looked at is due, and it is known what came. A step that has too much to look at, or takes too long, is repeated with
half of it.
"""

import logging
import time
from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Final, NamedTuple

from relatum.checks import checked_seconds
from relatum.errors import ReadTimeout
from relatum.keys import KeyDefinition
from relatum.metrics import Counter, Greatest, reported
from relatum_consumer._known_spans import Known
from relatum_consumer._missing import Judge, Part, TooManyMessages, expectation_named, streams_of
from relatum_consumer.expectations import Expectation, UnmetExpectation
from relatum_consumer.lookups.arguments import span_of
from relatum_consumer.lookups.catalog import Catalog

STEP_MESSAGES: Final = 50_000
"""Messages a follower looks at in one step, about two seconds: what it has found is told behind each."""


@reported("expectation", "expectation")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationStatistics:
    """What one follower has counted.

    Attributes:
        checked: Messages looked at that have a value of the key.
        unmet: Messages told of, by what is known of them: late, missing, not_known.
        lag_s: Age of the moment up to which all is known; what was due before it was told of.
    """

    checked: Annotated[int, Counter("relatum_expectation_checked_total", "Messages that were due and looked at")]
    unmet: Annotated[
        Mapping[str, int],
        Counter("relatum_expectation_unmet_total", "Messages that nothing followed in time", by="finding"),
    ]
    lag_s: Annotated[
        float,
        Greatest("relatum_expectation_lag_seconds", "Age of the moment up to which is known what came"),
    ]


@dataclass(slots=True, weakref_slot=True, eq=False)
class ExpectationCounts:
    """What is counted; whoever counts is the one that iterates."""

    checked: int = 0
    unmet: Counts[str] = field(default_factory=Counts)
    known_us: int = field(default_factory=lambda: time.time_ns() // 1_000)

    def statistics(self) -> ExpectationStatistics:
        """What was counted. It asks nobody."""
        lag_s = max(0.0, time.time() - self.known_us / 1_000_000)
        return ExpectationStatistics(checked=self.checked, unmet=dict(self.unmet), lag_s=lag_s)


logger = logging.getLogger("relatum.expectations")


class _Step(NamedTuple):
    """What is looked at in one step: the parts, and what was told of behind it."""

    parts: list[Part]
    told_to: int
    stops: dict[str, tuple[int, int]]
    is_least: bool


class Following:
    """One follower's place.

    Args:
        catalog: Keys and streams.
        expectation: What is expected, or its name.
        since: The time of the first message to be told of; None for what falls due from now on.
        poll_s: Seconds between two looks.

    Attributes:
        name: The expectation's name.
        counts: What was counted.
    """

    def __init__(self, catalog: Catalog, expectation: str | Expectation, since: datetime | None, poll_s: float) -> None:
        self.name = expectation.name if isinstance(expectation, Expectation) else str(expectation)
        self.counts = ExpectationCounts()
        self._catalog = catalog
        self._given = expectation
        self._expectation: Expectation | None = None
        self._since, _ = span_of(since, None)
        self._began_us = time.time_ns() // 1_000
        self._poll_s = checked_seconds("poll_s", poll_s, zero=False)
        # Of streams by their names: the number of the generation, and the offset before which all was told of.
        self._stops: dict[str, tuple[int, int]] = {}
        self._told_to: int | None = None
        self._halved = 0
        self._has_more = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next step."""
        return 0.0 if self._has_more else self._poll_s

    def failed(self, error: Exception) -> None:
        """Take in that a step failed: one that took too long has less to look at the next time."""
        self._halved += isinstance(error, ReadTimeout)

    def step(self) -> list[UnmetExpectation]:
        """What is to be told of now, in the order of its times; nothing of it was told before."""
        if self._expectation is None:
            self._expectation = expectation_named(self._catalog, self._given)
        by = self._catalog.definition(self._expectation.by)
        of, followed = streams_of(self._catalog, self._expectation, by.key_id)
        return self._look(self._expectation, by, of, followed)

    def _look(self, expectation: Expectation, by: KeyDefinition, of: Known, followed: Known) -> list[UnmetExpectation]:
        known_us = min(of.until, followed.until, followed.asked_us)
        step = self._next(expectation, of, known_us)
        found: list[UnmetExpectation] = []
        most = None if step.is_least else STEP_MESSAGES
        judge = Judge(self._catalog, expectation, by, followed, found.append, messages_max=most)
        try:
            for part in step.parts:
                judge.judge(of, part)
        except TooManyMessages:
            self._halved, self._has_more = self._halved + 1, True
            return []
        self._has_more, self._halved = self._halved > 0, max(0, self._halved - 1)
        self._told_to, self._stops = step.told_to, step.stops
        if judge.unreadable or judge.has_lost:
            logger.warning("%s: messages were dropped or cannot be unpacked before they were looked at", self.name)
        self.counts.known_us = max(self.counts.known_us, known_us)
        self.counts.checked += judge.checked
        self.counts.unmet.update(str(each.finding) for each in found)
        return sorted(found, key=lambda each: (each.time, each.id))

    def _next(self, expectation: Expectation, of: Known, known_us: int) -> _Step:
        """What to look at next."""
        first = self._began_us - expectation.within_us if self._since is None else self._since
        told_to = first - 1 if self._told_to is None else self._told_to
        # One microsecond less: what is due just then may still come.
        to = max(told_to, known_us - expectation.within_us - expectation.grace_us - 1)
        stream_ids = {stream.name: stream.stream_id for stream in of.recorded}
        starts: dict[str, int] = {}
        for name, stream_id in stream_ids.items():
            before, offset = self._stops.get(name, (stream_id, 0))
            # The one that was declared again under the name begins anew.
            starts[name] = offset if before == stream_id else 0
        ends = {name: max(start, of.ends[name]) for name, start in starts.items()}
        cut_to = told_to + (to - told_to >> self._halved)
        is_first = self._told_to is None
        stops = (
            ends if is_first else {name: start + (ends[name] - start >> self._halved) for name, start in starts.items()}
        )
        parts = [Part(told_to + 1, cut_to, {}, stops)]
        if not is_first:
            parts.append(Part(first, told_to, starts, stops))
        return _Step(
            [part for part in parts if part.low <= part.high],
            cut_to,
            {name: (stream_ids[name], stop) for name, stop in stops.items()},
            cut_to - told_to <= 1 and all(stops[name] - start <= 1 for name, start in starts.items()),
        )
