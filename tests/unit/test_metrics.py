"""One registry of all that components count: monotonous counters, honest merges."""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relatum import metrics
from relatum.errors import ConfigurationError
from relatum.metrics import Counter, Distribution, Gauge, Histogram, MaxGauge, MinGauge, Observed, PerLabel
from tests.support.forking import in_child


@dataclass(frozen=True, slots=True)
class _PartStatistics:
    age_s: Annotated[float | None, MaxGauge("relatum_tried_age_seconds", "Age")]
    taken: Annotated[Mapping[str, int], Counter("relatum_tried_taken_total", "Taken", by="reason")]


@metrics.reported("name")
@dataclass(frozen=True, slots=True)
class _ThingStatistics:
    done: Annotated[int, Counter("relatum_tried_done_total", "Done")]
    open: Annotated[int, Gauge("relatum_tried_open_bytes", "Open")]
    is_up: Annotated[bool, MinGauge("relatum_tried_up", "Up")]
    spent: Annotated[Observed, Distribution("relatum_tried_spent_seconds", "Spent")]
    parts: Annotated[Mapping[str, _PartStatistics], PerLabel("part")]
    remark: str = "is told to nobody"


class Thing:
    """A component that is asked under a lock of its own."""

    def __init__(self) -> None:
        self.done = self.open = self.asked = 0
        self.is_up = True
        self.spent = Histogram((0.1, 1.0))
        self.parts: dict[str, _PartStatistics] = {}
        self.lock = threading.Lock()

    def statistics(self) -> _ThingStatistics:
        with self.lock:
            self.asked += 1
            return _ThingStatistics(self.done, self.open, self.is_up, self.spent.observed(), self.parts)


def page(name: str) -> dict[str, float]:
    """The metrics of things of a name, as Prometheus writes them: values by series, and by their other labels."""
    told = {}
    for family in text_string_to_metric_families(metrics.exposition()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("relatum_tried_") and labels.pop("name", None) == name:
                of = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
                told[sample.name.removeprefix("relatum_tried_") + (of and f"{{{of}}}")] = sample.value
    return told


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name that no other test's things have: its counters are still reported."""
    return str(request.node.name)


@pytest.fixture
def things(name: str) -> Iterator[list[Thing]]:
    made = [Thing(), Thing()]
    for thing in made:
        metrics.report(thing, name=name)
    yield made
    for thing in made:
        metrics.retire(thing)


def test_components_of_one_name_are_told_together(things: list[Thing], name: str) -> None:
    """Components of one name are merged: sums of numbers, the greatest age, the least truth value."""
    first, second = things
    first.done, second.done, first.open, second.open, second.is_up = 3, 4, 1, 1, False
    first.parts["a"] = _PartStatistics(5.0, {"old": 2})
    second.parts["a"] = _PartStatistics(7.0, {"old": 1, "new": 1})
    second.parts["b"] = _PartStatistics(None, {})
    told = {series: value for series, value in page(name).items() if "spent" not in series}
    of_parts = {
        "age_seconds{part=a}": 7.0,
        "taken_total{part=a,reason=old}": 3.0,
        "taken_total{part=a,reason=new}": 1.0,
    }
    assert told == {"done_total": 7.0, "open_bytes": 2.0, "up": 0.0} | of_parts, "what is not known is not told"


def test_counters_never_fall(things: list[Thing], name: str) -> None:
    """A closed component's counters stay in the sum, and its gauges do not."""
    things[0].done, things[0].open = 3, 1
    metrics.retire(things[0])
    metrics.retire(things[0])
    things[1].done = 1
    told = page(name)
    assert (told["done_total"], told["open_bytes"]) == (4.0, 0.0)
    metrics.retire(things[1])
    assert (page(name)["done_total"], "open_bytes" in page(name)) == (4.0, False)


def test_what_is_dropped_without_being_closed_had_counted_what_it_told_last(name: str) -> None:
    """A dropped component keeps the counts of its last scrape; one with an owner is counted in full."""
    thing = Thing()
    metrics.report(thing, name=name)
    thing.done = 5
    assert page(name)["done_total"] == 5.0
    del thing
    gc.collect()
    assert (page(name)["done_total"], "open_bytes" in page(name)) == (5.0, False)
    owner, thing = type("Owner", (), {})(), Thing()
    metrics.report(thing, owner=owner, name=name)
    thing.done = 9
    del owner, thing
    gc.collect()
    assert page(name)["done_total"] == 14.0


def test_a_component_may_be_dropped_while_its_values_are_counted(name: str) -> None:
    """The garbage collector may run within any call, also where a histogram has its lock."""

    class Collecting(float):
        def __radd__(self, other: float) -> float:
            gc.collect()
            return other

    owner, thing = type("Owner", (), {})(), Thing()
    metrics.report(thing, owner=owner, name=name)
    spent, owner.itself = thing.spent, owner
    del owner, thing
    counting = threading.Thread(target=spent.observe, args=[Collecting(1.0)], daemon=True)
    counting.start()
    counting.join(30)
    assert not counting.is_alive()
    assert spent.observed().count == 1


def test_a_scrape_in_a_child_tells_nothing_of_the_parents(things: list[Thing], name: str) -> None:
    """A forked child exposes nothing of its parent's components."""
    things[0].done = 2
    assert in_child(lambda: page(name)) == {}
    assert page(name)["done_total"] == 2.0


def test_a_component_may_be_told_of_in_the_applications_own_registry(things: list[Thing], name: str) -> None:
    """The collector can be registered with the application's own Prometheus registry."""
    registry: Any = CollectorRegistry()
    registry.register(metrics.collector())
    things[0].done = 1
    assert f'relatum_tried_done_total{{name="{name}"}} 1.0' in generate_latest(registry).decode()


def test_one_that_cannot_answer_silences_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out and named once; what the others report, and closing it, are unaffected."""

    class Broken(Thing):
        def statistics(self) -> _ThingStatistics:
            raise RuntimeError("no answer")

    broken, thing = Broken(), Thing()
    metrics.report(broken, name="broken")
    metrics.report(thing, name="whole")
    thing.open = 7
    assert [page("whole")["open_bytes"] for _ in range(2)] == [7, 7]
    metrics.retire(broken)
    metrics.retire(thing)
    assert caplog.messages == ["the metrics of a Broken are left out after an error"]


class Adding(Observed):
    """Does something while the registry adds it to what has ended, and so holds its lock."""

    does: Callable[[], None]

    def __add__(self, other: Observed) -> Observed:
        self.does()
        return Observed(self.bounds, self.counts, self.sum) + other


class _Counted(Histogram):
    def __init__(self, does: Callable[[], None]) -> None:
        super().__init__((0.1, 1.0))
        self.does = does

    def observed(self) -> Observed:
        seen = Adding((0.1, 1.0), (0, 0, 0), 0.0)
        object.__setattr__(seen, "does", self.does)
        return seen


def test_what_ends_while_others_are_told_waits_for_nobody(things: list[Thing], name: str) -> None:
    """A component that is retired during a scrape, in any thread, waits for no lock and is counted afterwards."""
    first, second = things
    first.done, second.done = 3, 4
    ended: list[bool] = []

    def end_another() -> None:
        ending = threading.Thread(target=metrics.retire, args=[second], daemon=True)
        ending.start()
        ending.join(90)
        ended.append(not ending.is_alive())

    first.spent = _Counted(end_another)
    metrics.retire(first)
    assert page(name)["done_total"] == 7.0
    assert set(ended) == {True}
    assert (page(name)["done_total"], "open_bytes" in page(name)) == (7.0, False)


class _Ending(Thing):
    is_over = False

    def statistics(self) -> _ThingStatistics:
        seen = super().statistics()
        if not self.is_over:
            self.is_over = True
            self.done += 1
            metrics.retire(self)
        return seen


def test_what_ends_while_it_is_asked_is_told_to_the_last(name: str) -> None:
    """The final counts of a component that ends during its own scrape are exposed by the next one."""
    thing = _Ending()
    metrics.report(thing, name=name)
    thing.done = 3
    assert [page(name)["done_total"] for _ in range(3)] == [3.0, 4.0, 4.0]


@pytest.mark.parametrize("host", ["a..b", "a\0b", "\ud800"])
def test_a_host_that_cannot_be_a_name_is_refused(host: str) -> None:
    """Metrics cannot be served on a host whose name cannot be encoded, which is an error of the configuration."""
    with pytest.raises(ConfigurationError):
        metrics.serve(9400, host)


def test_a_child_forked_while_the_registry_is_busy_tells_its_own(things: list[Thing], name: str) -> None:
    """A lock that another thread held at the fork does not stop the child."""
    busy, let_go = threading.Event(), threading.Event()

    def stay() -> None:
        busy.set()
        let_go.wait(90)

    things[0].spent = _Counted(stay)
    metrics.retire(things[0])
    asking = threading.Thread(target=page, args=[name])
    asking.start()
    assert busy.wait(90)
    in_child(lambda: metrics.report(Thing(), name=name))
    let_go.set()
    asking.join(90)
