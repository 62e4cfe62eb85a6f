"""Filters of a query that the source takes over, on Spark 4.1 and later."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql import datasource as spark

from relatum_spark.source._offsets import Slice
from relatum_spark.source._rows import TimeWindow

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the filters taken over leave to read. Can be pickled.

    Attributes:
        streams: The streams; None for all.
        low: The least offset.
        high: The greatest offset; None for none.
        window: The times.
        values: Canonical values by key column; only messages that carry one of each are read.
    """

    streams: frozenset[str] | None = None
    low: int = 0
    high: int | None = None
    window: TimeWindow = field(default_factory=TimeWindow)
    values: tuple[tuple[str, frozenset[str]], ...] = ()

    def limited(self, wanted: Slice) -> Slice:
        """What is left of a range; it may be empty."""
        if self.streams is not None and wanted.stream not in self.streams:
            return Slice(wanted.stream, wanted.start, wanted.start)
        stop = wanted.stop if self.high is None else min(wanted.stop, self.high + 1)
        start = max(wanted.start, self.low)
        return Slice(wanted.stream, start, max(start, stop))

    def take(self, condition: Any, keys: Sequence[str]) -> "Pushed | None":
        """This and one more filter; None where Spark must apply it.

        Args:
            condition: One of `pyspark.sql.datasource`'s filters.
            keys: The names of the key columns.
        """
        if len(getattr(condition, "attribute", ())) != 1:
            return None
        (column,) = condition.attribute
        if isinstance(condition, spark.IsNotNull):
            # These two are never null.
            return self if column in ("stream", "offset") else None
        value = getattr(condition, "value", None)
        if column == "offset":
            return self._with_offset(condition, value)
        if column == "timestamp":
            return self._with_time(condition, value)
        return self._with_texts(column, _equal_to(condition, value), keys)

    def _with_texts(self, column: str, values: frozenset[str] | None, keys: Sequence[str]) -> "Pushed | None":
        if values is None:
            return None
        if column == "stream":
            return replace(self, streams=values if self.streams is None else self.streams & values)
        return replace(self, values=(*self.values, (column, values))) if column in keys else None

    def _with_offset(self, condition: Any, value: Any) -> "Pushed | None":
        if type(value) is not int:
            return None
        low, high = _bounds(condition, value)
        if low is None and high is None:
            return None
        highest = min((each for each in (self.high, high) if each is not None), default=None)
        return replace(self, low=self.low if low is None else max(self.low, low), high=highest)

    def _with_time(self, condition: Any, value: Any) -> "Pushed | None":
        if not isinstance(value, datetime) or value.tzinfo is None:
            return None
        low, high = _bounds(condition, (value - _EPOCH) // _MICROSECOND)
        if low is None and high is None:
            return None
        window = self.window
        lows = [each for each in (window.low_us, low) if each is not None]
        highs = [each for each in (window.high_us, high) if each is not None]
        return replace(self, window=TimeWindow(max(lows, default=None), min(highs, default=None)))


def _bounds(condition: Any, value: int) -> tuple[int | None, int | None]:
    """The least and the greatest whole number a filter lets through; None for no limit, twice for another filter."""
    if isinstance(condition, (spark.EqualTo, spark.EqualNullSafe)):
        return value, value
    if isinstance(condition, spark.GreaterThan):
        return value + 1, None
    if isinstance(condition, spark.GreaterThanOrEqual):
        return value, None
    if isinstance(condition, spark.LessThan):
        return None, value - 1
    if isinstance(condition, spark.LessThanOrEqual):
        return None, value
    return None, None


def _equal_to(condition: Any, value: Any) -> frozenset[str] | None:
    """The texts a filter for equality lets through; None for another filter."""
    if isinstance(condition, (spark.EqualTo, spark.EqualNullSafe)):
        return frozenset([value]) if isinstance(value, str) else None
    if isinstance(condition, spark.In):
        texts = [each for each in value if each is not None]
        return frozenset(texts) if all(isinstance(each, str) for each in texts) else None
    return None
