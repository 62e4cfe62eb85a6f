"""Which field of which statistics is which metric.

Names are as Prometheus and RabbitMQ have them: `relatum_`, the component, what is counted, the unit in full and last
(`_seconds`, `_bytes`), `_total` behind counters. Labels are what the process itself was told to work on, such as the
streams it records: never what a message says, nor names that others choose.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cache, reduce
from itertools import chain
from operator import add
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from relatum.metrics._histogram import Observed

_Statistics = TypeVar("_Statistics", bound=type[Any])


class Kind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


def _total(values: list[Any]) -> Any:
    return reduce(add, values)


@dataclasses.dataclass(frozen=True)
class _Marked:
    """What a field says of its metric.

    Args:
        name: The metric's name, as Prometheus shows it.
        meaning: What it tells, in a few words.
        by: The field is a mapping, and its keys are the values of this label. None (default): it is one value.
    """

    kind: ClassVar[Kind]
    merge: ClassVar[Any] = staticmethod(_total)
    name: str
    meaning: str
    by: str | None = None


class Counter(_Marked):
    """A number that only grows."""

    kind = Kind.COUNTER


class Gauge(_Marked):
    """A number, or a truth, that holds now; None is not told. Those of several components are added up."""

    kind = Kind.GAUGE


class Greatest(Gauge):
    """A gauge of which the greatest is told where several components have it."""

    merge = staticmethod(max)


class Least(Gauge):
    """A gauge of which the least is told where several components have it."""

    merge = staticmethod(min)


class Distribution(_Marked):
    """What a `Histogram` has `observed()`."""

    kind = Kind.HISTOGRAM


@dataclasses.dataclass(frozen=True, slots=True)
class Each:
    """The field is a mapping to further statistics; its keys are the values of this label."""

    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: Its name; of a histogram, what `_bucket`, `_sum` and `_count` are put behind.
        kind: Its type.
        meaning: What it tells.
        component: Which component tells it.
        labels: Its labels, in order.
        merge: How the values of several components with the same labels become one.
    """

    name: str
    kind: Kind
    meaning: str
    component: str
    labels: tuple[str, ...]
    merge: Callable[[list[Any]], Any] = dataclasses.field(repr=False, compare=False)

    @property
    def unit(self) -> str:
        """What it is measured in; "" for a plain number."""
        bare = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if bare.endswith(f"_{unit}")), "")

    @property
    def series(self) -> tuple[str, ...]:
        """The names that expressions may use."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


_declared: dict[type[Any], tuple[str, tuple[str, ...]]] = {}
"""Components and labels, by the class of their statistics."""


def reported(component: str, *labels: str) -> Callable[[_Statistics], _Statistics]:
    """Declare a frozen dataclass as what a component tells of itself; its fields are marked by their annotations.

        @reported("reader")
        @dataclass(frozen=True, slots=True)
        class ReaderStatistics:
            in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections that calls use now")]

    Args:
        component: What it is, as the documentation names it.
        labels: The labels that `report` is given for each component.
    """

    def declare(statistics: _Statistics) -> _Statistics:
        _declared[statistics] = component, labels
        return statistics

    return declare


def declared() -> list[Metric]:
    """All metrics of the rooms that this process has imported, by name."""
    each = (_metrics_of(statistics, *declaration) for statistics, declaration in list(_declared.items()))
    return sorted(chain.from_iterable(each), key=lambda metric: metric.name)


def _metrics_of(statistics: Any, component: str, labels: tuple[str, ...]) -> Iterator[Metric]:
    for name, what in _fields_of(statistics, component, labels):
        if isinstance(what, Metric):
            yield what
        else:
            # `Annotated[Mapping[str, Nested], Each("label")]`
            nested: Any = get_args(get_args(get_type_hints(statistics, include_extras=True)[name])[0])[1]
            yield from _metrics_of(nested, component, (*labels, what.label))


@cache
def _fields_of(statistics: Any, component: str, labels: tuple[str, ...]) -> list[tuple[str, Metric | Each]]:
    """The fields of a class of statistics that are told, and as what."""
    found: list[tuple[str, Metric | Each]] = []
    for name, hint in get_type_hints(statistics, include_extras=True).items():
        # What is inherited is told by the class it is inherited from.
        if name in vars(statistics)["__annotations__"] and get_origin(hint) is Annotated:
            for mark in hint.__metadata__:
                if isinstance(mark, Each):
                    found.append((name, mark))
                elif isinstance(mark, _Marked):
                    own = labels if mark.by is None else (*labels, mark.by)
                    found.append((name, Metric(mark.name, mark.kind, mark.meaning, component, own, mark.merge)))
    return found


def values_in(statistics: Any, given: Mapping[str, str]) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    """What statistics tell: each metric with the values of its labels, and its value."""
    component, labels = _declared[type(statistics)]
    return _values(statistics, component, labels, tuple(given[label] for label in labels))


def _values(
    statistics: Any, component: str, labels: tuple[str, ...], given: tuple[str, ...]
) -> Iterator[tuple[Metric, tuple[str, ...], Any]]:
    kind: Any = type(statistics)
    for name, what in _fields_of(kind, component, labels):
        value = getattr(statistics, name)
        if isinstance(what, Each):
            for key, nested in value.items():
                yield from _values(nested, component, (*labels, what.label), (*given, key))
        elif len(what.labels) > len(labels):
            for key, number in value.items():
                yield what, (*given, str(key)), number
        elif value is not None:
            yield what, given, value if isinstance(value, Observed) else float(value)
