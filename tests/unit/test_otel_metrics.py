"""The metrics as OpenTelemetry collects them: the same names and values as Prometheus has."""

import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData

from relatum import metrics, otel
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Least, Observed
from tests.support import wait_until
from tests.support.spans import collected_metrics, collected_spans

Series = dict[tuple[str, tuple[tuple[str, Any], ...]], float]


@metrics.reported("tried thing", "name")
@dataclass(frozen=True, slots=True)
class ThingStatistics:
    """What is told of a thing."""

    done: Annotated[int, Counter("relatum_tried_otel_done_total", "Done")]
    held: Annotated[int, Gauge("relatum_tried_otel_held_bytes", "Held")]
    up: Annotated[bool, Least("relatum_tried_otel_up", "Up")]
    spent: Annotated[Observed, Distribution("relatum_tried_otel_spent_seconds", "Spent")]
    by: Annotated[Mapping[str, int], Counter("relatum_tried_otel_errors_total", "Errors", by="error")]


class Thing:
    """A component that is asked under a lock of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked = 0
        self.spent = Histogram((0.1, 1.0))

    def statistics(self) -> ThingStatistics:
        """What it has counted."""
        with self.lock:
            self.asked += 1
            return ThingStatistics(3, 4096, True, self.spent.observed(), {"ReadTimeout": 2})


@pytest.fixture
def readers() -> Iterator[list[InMemoryMetricReader]]:
    """Two that collect what is reported to their provider."""
    made = [InMemoryMetricReader(), InMemoryMetricReader()]
    provider = MeterProvider(made)
    for _ in range(2):
        otel.report_metrics(provider)
    yield made
    provider.shutdown()


@pytest.fixture
def thing(request: pytest.FixtureRequest) -> Iterator[Thing]:
    """A component that is told of."""
    thing = Thing()
    metrics.report(thing, name=request.node.name)
    yield thing
    metrics.retire(thing)


def collected(reader: InMemoryMetricReader) -> tuple[Series, dict[str, tuple[str, str]]]:
    """What is collected: values by name and attributes; type and unit by name."""
    data: MetricsData | None = reader.get_metrics_data()
    values: Series = {}
    kinds: dict[str, tuple[str, str]] = {}
    for resource in [] if data is None else data.resource_metrics:
        for scope in resource.scope_metrics:
            assert scope.scope.name == "relatum"
            for metric in scope.metrics:
                kinds[metric.name] = type(metric.data).__name__, metric.unit
                for point in metric.data.data_points:
                    values[metric.name, tuple(sorted(point.attributes.items()))] = point.value
    return values, kinds


def test_names_values_and_units_are_those_of_prometheus(
    readers: list[InMemoryMetricReader], thing: Thing, request: Any
) -> None:
    """Counters are monotonous sums, gauges are gauges; of a histogram each bucket, the sum and the count are sums."""
    thing.spent.observe(0.5)
    thing.spent.observe(7)
    values, kinds = collected(readers[0])
    of = ("name", request.node.name)
    assert {key: value for key, value in values.items() if of in key[1]} == {
        ("relatum_tried_otel_done_total", (of,)): 3,
        ("relatum_tried_otel_held_bytes", (of,)): 4096,
        ("relatum_tried_otel_up", (of,)): 1,
        ("relatum_tried_otel_errors_total", (("error", "ReadTimeout"), of)): 2,
        ("relatum_tried_otel_spent_seconds_bucket", (("le", "0.1"), of)): 0,
        ("relatum_tried_otel_spent_seconds_bucket", (("le", "1.0"), of)): 1,
        ("relatum_tried_otel_spent_seconds_bucket", (("le", "+Inf"), of)): 2,
        ("relatum_tried_otel_spent_seconds_count", (of,)): 2,
        ("relatum_tried_otel_spent_seconds_sum", (of,)): 7.5,
    }
    assert kinds["relatum_tried_otel_done_total"] == ("Sum", "")
    assert kinds["relatum_tried_otel_held_bytes"] == ("Gauge", "By")
    assert kinds["relatum_tried_otel_spent_seconds_sum"] == ("Sum", "s")
    assert kinds["relatum_tried_otel_spent_seconds_count"] == ("Sum", "")


def test_all_that_prometheus_shows_is_collected(readers: list[InMemoryMetricReader], thing: Thing) -> None:
    """One list of metrics: no series is known to one of the two alone."""
    shown = {line.split("{")[0].split(" ")[0] for line in metrics.exposition().splitlines() if line[0] != "#"}
    assert shown == {name for name, _ in collected(readers[0])[0]}


def test_each_collection_asks_each_component_once(readers: list[InMemoryMetricReader], thing: Thing) -> None:
    """However many metrics there are, and whoever collects: two readers are told the same."""
    thing.spent.observe(1)
    one, other, _ = (collected(reader)[0] for reader in (*readers, readers[0]))
    # Lags of what other tests record here go on between the two.
    assert one.keys() == other.keys()
    assert [each for each in one.items() if each[0][0].startswith("relatum_tried_otel_")] == [
        each for each in other.items() if each[0][0].startswith("relatum_tried_otel_")
    ]
    assert thing.asked == 3


def test_what_comes_later_is_collected(readers: list[InMemoryMetricReader]) -> None:
    """Of rooms imported after the call, and also where who reports holds the lock by which it answers."""
    reader = readers[0]

    @metrics.reported("late thing")
    @dataclass(frozen=True, slots=True)
    class LateStatistics:
        done: Annotated[int, Counter("relatum_tried_otel_late_total", "Done")]

    class Late:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            with self.lock:
                metrics.report(self)

        def statistics(self) -> LateStatistics:
            with self.lock:
                return LateStatistics(1)

    # Resolved by name in the module, as those of rooms are.
    globals()["LateStatistics"] = LateStatistics
    late = Late()
    wait_until(lambda: ("relatum_tried_otel_late_total", ()) in collected(reader)[0], what="a metric that came later")
    metrics.retire(late)
    assert collected(reader)[0]["relatum_tried_otel_late_total", ()] == 1


def test_opentelemetry_instrument_finds_it(thing: Thing, request: Any) -> None:
    """By the entry point, with the arguments it gives; told to go, there are no spans any more.

    Called before the application has set up OpenTelemetry, or twice, metrics are collected once it has.
    """
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["opentelemetry_instrumentor"]["relatum"].partition(":")
    instrumentor = getattr(import_module(module), name)()
    instrumentor.instrument(skip_dep_check=True)
    with collected_metrics() as reader:
        instrumentor.instrument()
        assert collected(reader)[0]["relatum_tried_otel_done_total", (("name", request.node.name),)] == 3
    instrumentor.uninstrument()
    try:
        with collected_spans():
            assert not any(map(otel.is_on, otel.Part))
    finally:
        otel.configure()
