"""What an expectation was not met for in a span of time."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from relatum.checks import checked_count, meant
from relatum.errors import InvalidInput
from relatum.limits import TIME_US_MIN
from relatum.store.coverage import TIME
from relatum_consumer.expectations import _expectation_limits as limits
from relatum_consumer.expectations._definitions import DEFINED, not_defined
from relatum_consumer.expectations._expectation import (
    Expectation,
    ExpectationResult,
    MissingReport,
    Reason,
    UnmetExpectation,
)
from relatum_consumer.expectations._judging import Judge, Part, moment_of
from relatum_consumer.expectations._known import ALWAYS, Known, known
from relatum_consumer.lookups import (
    ANSWER_MESSAGES_MAX,
    Catalog,
    NewKey,
    Status,
    again_if_replaced,
    span_of,
)


def defined(catalog: Catalog) -> tuple[Expectation, ...]:
    """The expectations of the virtual host, in the order of their names."""
    rows: list[Any] = catalog.servers.rows(DEFINED, {"vhost": catalog.vhost})
    return tuple(Expectation(*row) for row in rows)


def expectation_named(catalog: Catalog, name: str | Expectation) -> Expectation:
    """An expectation by its name; one that is given is it itself.

    Raises:
        NotFound: none of that name is defined in this virtual host.
    """
    if isinstance(name, Expectation):
        return name
    if not isinstance(name, str):
        raise InvalidInput(f"an expectation is asked for by its name, not by {type(name).__name__}")
    found = {each.name: each for each in defined(catalog)}
    if name not in found:
        raise not_defined(name, catalog.vhost, meant(name, found))
    return found[name]


def streams_of(catalog: Catalog, expectation: Expectation, key_id: int) -> tuple[Known, Known]:
    """What is known of the messages that are to be followed, and of those that follow."""
    catalog.check_names([expectation.of, expectation.follows])
    of = known(catalog, expectation.of, (TIME,))
    # After it: what is in there may be followed by what came a moment later.
    return of, known(catalog, expectation.follows, (key_id, TIME))


def missing(
    catalog: Catalog, name: str | Expectation, since: datetime | None, until: datetime | None, limit: int
) -> MissingReport:
    """What an expectation was not met for."""
    checked_count("limit", limit, most=ANSWER_MESSAGES_MAX)
    low, high = span_of(since, until)
    expectation = expectation_named(catalog, name)
    return again_if_replaced(catalog, partial(_missing, catalog, expectation, low, high, limit))


def _missing(
    catalog: Catalog, expectation: Expectation, since: int | None, until: int | None, limit: int
) -> MissingReport:
    by = catalog.definition(expectation.by)
    of, followed = streams_of(catalog, expectation, by.key_id)
    end = of.asked_us if until is None else until
    begin = _begin(expectation, of, end) if since is None else since
    found = _Findings(limit)
    judge = Judge(catalog, expectation, by, followed, found.take)
    judge.judge(of, Part(begin, end - 1))
    # What is not due changes nothing: what of it is known does not matter either.
    grace = expectation.grace_us
    due = min(end - 1, of.asked_us - expectation.within_us - grace - 1)
    is_known = due < begin or of.holds(begin - grace, due + grace)
    # Of a span that is as long as what is retained, nothing is lost.
    has_lost = judge.has_lost and since is not None
    is_behind = bool(of.behind) and due + grace >= of.until
    status = found.status(is_known=is_known and not judge.unreadable and not has_lost, is_behind=is_behind)
    unrecorded_streams: set[str] = set()
    is_open = status in (Status.NOT_RECORDED_YET, Status.UNPROVEN)
    new_keys = (NewKey(by.name, followed.not_looked_at),) if is_open and followed.not_looked_at else ()
    if status is Status.NOT_RECORDED_YET:
        for each in (of, followed):
            unrecorded_streams.update(each.unrecorded_streams(catalog))
    return MissingReport(
        expectation=expectation,
        status=status,
        since=moment_of(begin),
        until=moment_of(end),
        late=found.of(ExpectationResult.LATE),
        missing=found.of(ExpectationResult.MISSING),
        not_known=found.of(ExpectationResult.NOT_KNOWN),
        late_count=found.counts[ExpectationResult.LATE],
        missing_count=found.counts[ExpectationResult.MISSING],
        not_known_count=found.counts[ExpectationResult.NOT_KNOWN],
        checked=judge.checked,
        without_value=judge.without_value,
        unreadable=judge.unreadable,
        streams=tuple(sorted(of.firsts)),
        unrecorded_streams=tuple(sorted(unrecorded_streams)),
        new_keys=new_keys,
    )


def _begin(expectation: Expectation, of: Known, end: int) -> int:
    """Where a span begins that nobody said a beginning of: with what was due a day ago, or where all is known from."""
    begin = end - expectation.within_us - limits.SPAN_S * 1_000_000
    first = of.spans[-1][0] if of.spans else ALWAYS
    return max(begin, first + expectation.grace_us + 1, TIME_US_MIN)


class _Findings:
    """What was found, counted, and as much of it held as was asked for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[ExpectationResult, list[UnmetExpectation]] = {finding: [] for finding in ExpectationResult}
        self._reasons: set[Reason] = set()
        self.counts = dict.fromkeys(ExpectationResult, 0)

    def take(self, unmet: UnmetExpectation) -> None:
        self.counts[unmet.finding] += 1
        if unmet.why is not None:
            self._reasons.add(unmet.why)
        held = self._held[unmet.finding]
        held.append(unmet)
        if len(held) > 2 * self._limit:
            held[:] = self._first(held)

    def of(self, finding: ExpectationResult) -> tuple[UnmetExpectation, ...]:
        return tuple(self._first(self._held[finding]))

    def _first(self, held: Sequence[UnmetExpectation]) -> list[UnmetExpectation]:
        return sorted(held, key=lambda each: (each.time, each.id))[: self._limit]

    def status(self, *, is_known: bool, is_behind: bool) -> Status:
        """What the whole says."""
        if self.counts[ExpectationResult.LATE] or self.counts[ExpectationResult.MISSING]:
            return Status.FOUND
        if Reason.UNPROVEN in self._reasons or not (is_known or is_behind):
            return Status.UNPROVEN
        if Reason.BEHIND in self._reasons or not is_known:
            return Status.NOT_RECORDED_YET
        return Status.ABSENT
