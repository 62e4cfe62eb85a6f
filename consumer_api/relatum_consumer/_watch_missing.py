"""Reporting messages that nothing followed as they fall due, each once.

A watch remembers one moment: every message of an earlier time was checked. Each look goes on to the moment up to which
both streams are known, less the allowed time and the grace for clocks. So the checked messages are due, and their
followers are known. Only `missing` finds a message that is published later with an earlier time.
"""

import logging
import time
from collections import Counter as Counts
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Final

from relatum import metrics
from relatum.checks import checked_seconds
from relatum.errors import ReadTimeout, RelatumError, StreamReplaced
from relatum.metrics import Counter, Greatest, reported
from relatum.waiting import BACKOFF_S, Outages, Pauses, has_passed, may_repeat
from relatum_consumer._missing import Judge, expectation_named, streams_of
from relatum_consumer.expectations import Expectation, UnmetExpectation
from relatum_consumer.lookups.arguments import span_of
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.waiting import Rest

UNMET_AT_ONCE: Final = 50_000
"""The most messages that one look reports: they are held until the look ends."""

logger = logging.getLogger("relatum.expectations")


@reported("expectation")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationStatistics:
    """Statistics of one watch.

    Attributes:
        checked: Checked messages that have a value of the key.
        unmet: Reported messages, by result: late, missing, not_known.
        lag_s: Age in seconds of the moment up to which everything is known, and so reported if it was due.
    """

    checked: Annotated[int, Counter("relatum_expectation_checked_total", "Messages that were due and checked")]
    unmet: Annotated[
        Mapping[str, int],
        Counter("relatum_expectation_unmet_total", "Messages that nothing followed in time", by="finding"),
    ]
    lag_s: Annotated[
        float,
        Greatest("relatum_expectation_lag_seconds", "Age of the moment up to which all messages are known"),
    ]


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Counted:
    checked: int = 0
    unmet: Counts[str] = field(default_factory=Counts)
    known_us: int = field(default_factory=lambda: time.time_ns() // 1_000)

    def statistics(self) -> ExpectationStatistics:
        """Return the statistics, without any I/O."""
        lag_s = max(0.0, time.time() - self.known_us / 1_000_000)
        return ExpectationStatistics(checked=self.checked, unmet=dict(self.unmet), lag_s=lag_s)


class _TooMany(Exception):
    """A look has more messages to report than may be held."""


class MissingWatch:
    """Watches one expectation, which is given or named; see `Relations.watch_missing`."""

    def __init__(self, catalog: Catalog, expectation: str | Expectation, since: datetime | None, poll_s: float) -> None:
        self._catalog = catalog
        self._expectation = expectation
        self._name = expectation.name if isinstance(expectation, Expectation) else str(expectation)
        self._from_us, _ = span_of(since, None)
        self._began_us = time.time_ns() // 1_000
        self._poll_s = checked_seconds("poll_s", poll_s, zero=False)
        self._halved = 0
        self._has_more = False
        self._counted = _Counted()

    def found(
        self, run: Callable[[str, Callable[[], list[UnmetExpectation]]], list[UnmetExpectation]], broker: str
    ) -> Generator[UnmetExpectation | Rest, None, None]:
        """Yield the messages as they fall due, and rests between looks. `run` limits the time of a look."""
        outages, pauses = Outages(logger, broker=broker), Pauses()
        who = f"watching the expectation {self._name!r}"
        metrics.report(self._counted, expectation=self._name)
        try:
            while True:
                unmet: list[UnmetExpectation] = []
                try:
                    unmet = run("watch_missing", self._look)
                except RelatumError as error:
                    # If a stream was declared again, a recorder will correct the record.
                    if has_passed() or not (may_repeat(error) or isinstance(error, StreamReplaced)):
                        raise
                    self._halved += isinstance(error, ReadTimeout)
                    outages.failed(who, error)
                    pause_s = min(pauses.after(error), BACKOFF_S[1])
                else:
                    outages.over(who)
                    pauses, pause_s = Pauses(), 0.0 if self._has_more else self._poll_s
                yield from unmet
                yield Rest(pause_s)
        finally:
            outages.forget(who)
            metrics.retire(self._counted)

    def _look(self) -> list[UnmetExpectation]:
        """Return the messages to report, ordered by time. A look with too many is repeated with half the span."""
        expectation = self._expectation = expectation_named(self._catalog, self._expectation)
        by = self._catalog.definition(expectation.by)
        of, followed = streams_of(self._catalog, expectation, by.key_id)
        known_us = min(of.until, followed.until, followed.asked_us)
        begin = self._began_us - expectation.within_us if self._from_us is None else self._from_us
        length = known_us - expectation.within_us - expectation.grace_us - begin
        if length <= 0:
            return []
        end = begin + max(1, length >> self._halved)
        unmet: list[UnmetExpectation] = []

        def take(each: UnmetExpectation) -> None:
            unmet.append(each)
            if len(unmet) > UNMET_AT_ONCE and end - begin > 1:
                raise _TooMany

        judge = Judge(self._catalog, expectation, by, followed, take)
        try:
            judge.judge(of, begin, end - 1)
        except _TooMany:
            self._halved, self._has_more = self._halved + 1, True
            return []
        self._from_us, self._has_more, self._halved = end, self._halved > 0, max(0, self._halved - 1)
        if judge.unreadable or judge.has_lost:
            logger.warning("%s: messages were dropped before they were checked, or cannot be unpacked", self._name)
        self._counted.known_us = max(self._counted.known_us, known_us)
        self._counted.checked += judge.checked
        self._counted.unmet.update(str(each.finding) for each in unmet)
        return sorted(unmet, key=lambda each: (each.time, each.id))
