"""What both faces of a collector have: the core, what is on its way into the store, the store, the handlers."""

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from relatum.collecting._bulk import Bulk, Collected
from relatum.collecting._bulk_steps import Consumed
from relatum.collecting._collector_core import Core
from relatum.collecting._collector_options import CollectorLimits
from relatum.collecting._collector_statistics import CollectorStatistics, TypeCounts, statistics_of
from relatum.collecting._handlers import Handlers
from relatum.collecting._intake import Gathered, Intake
from relatum.collecting._ports import Store, Stored
from relatum.collecting._results import collected_outcome, outcome_of
from relatum.errors import Conflict, DatabaseUnavailable
from relatum.outcomes import Outcome
from relatum.waiting import Outages, log_failure

logger = logging.getLogger("relatum.collector")

NAMED_MAX = 10
"""Messages that are named in one line of the log."""

log_defect = partial(log_failure, logger)
"""Logs what ended some work: `log_defect(error, what)`."""


class State:
    """The state of a collector, however it waits.

    Attributes:
        core: What is flushed when.
        intake: What is on its way into the store.
        store: The store.
        handlers: Who is told.
        member: This member's id.
        outages: What is away.
    """

    def __init__(self, store: Store, limits: CollectorLimits, broker: str = "") -> None:
        self.core = Core(limits)
        self.intake = Intake(self.core)
        self.store = store
        self.handlers = Handlers()
        self.member = 0
        self.counts: defaultdict[str, TypeCounts] = defaultdict(TypeCounts)
        self.outages = Outages(logger, broker=broker, database=store.server)

    def statistics(self) -> CollectorStatistics:
        """What this member has counted, and what it holds. It asks nobody."""
        return statistics_of(self.core, self.intake, self.counts)

    def added(self, gathered: Gathered, ours: Sequence[Collected]) -> None:
        """Hand messages that are stored to the core."""
        for message in ours:
            self.counts[message.type].collected += 1
        self.intake.add(gathered, ours, time.monotonic())

    def settled(self, bulk: Bulk, consumed: Consumed, began: float) -> None:
        """Let go of a bulk that was taken at that moment, as far as it is done with."""
        now = time.monotonic()
        self.counts[bulk.type].settled(consumed.results, now - began)
        self.core.settle(bulk, consumed.results, now)

    def who(self, does: str) -> str:
        """Who does something, as the log names it where it has to wait."""
        return f"collector {self.store.name!r}, {does},"

    def add(self, gathered: Gathered) -> Stored:
        """Store messages; blocking.

        Raises:
            Conflict: Another member moved the position; nothing was stored.
            DatabaseUnavailable: To be repeated.
        """
        try:
            return self.store.add(self.member, gathered.entries, gathered.advance)
        except Conflict as error:
            if gathered.advance is not None:
                raise
            # This member is gone, and joins anew in a moment. What was given is nowhere else: it must be stored.
            raise DatabaseUnavailable(str(error)) from error

    def not_storable(self, gathered: Gathered, error: Exception) -> None:
        """Let messages go that the store takes at no time; those given are refused, a stream is followed anew later."""
        places = ", ".join(str(message.place) for message in gathered.messages[:NAMED_MAX])
        log_defect(
            error, f"collector {self.store.name!r}: {len(gathered.messages)} messages refused by the store: {places}"
        )
        self.intake.lost(gathered, error)

    def collected_outcomes(self, messages: Sequence[Collected]) -> list[Outcome]:
        """What handlers are to be told of messages that were just stored."""
        return [
            collected_outcome(self.store.name, message) for message in messages if self.handlers.is_wanted(message.type)
        ]

    def final_outcomes(self, messages: Sequence[Collected], consumed: Consumed) -> list[Outcome]:
        """What handlers are to be told of a bulk's messages that have become final."""
        by_place = {message.place: message for message in messages}
        return [
            outcome_of(self.store.name, by_place[result.place], result, consumed.at)
            for result in consumed.results
            if result.status.is_final and self.handlers.is_wanted(by_place[result.place].type)
        ]
