"""Who tells what: the components of this process, and what those that have ended had counted.

Counters never fall: what a component had counted when it was closed goes on being told. One that is dropped without
being closed had counted what it told last, where it was not told apart from its owner (see `report`).
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from relatum.metrics._declaring import Kind, Metric, values_in
from relatum.processes import after_fork

logger: Final = logging.getLogger("relatum.metrics")

Values = dict[tuple[Metric, tuple[str, ...]], list[Any]]
"""What components tell, by metric and values of its labels."""


class Reports(Protocol):
    """What can be reported."""

    def statistics(self) -> Any:
        """What it has counted, and what holds now. It asks nobody and does not fail."""
        ...


class _Entry:
    """One component that is reported."""

    __slots__ = ("counted", "finalizer", "has_failed", "labels", "source")

    def __init__(self, source: Callable[[], Reports | None], labels: Mapping[str, str]) -> None:
        self.source = source
        self.labels = labels
        self.finalizer: weakref.finalize[..., Any]
        self.counted: Values = {}
        self.has_failed = False

    def values(self) -> Values:
        """What it tells now; of one that is gone, or fails, what it had counted when it was asked last."""
        source = self.source()
        if source is None:
            return self.counted
        try:
            found = values_of(source, self.labels)
        except Exception:
            # One that cannot answer must not silence all others, nor hinder its own closing.
            if not self.has_failed:
                logger.exception("the metrics of a %s are left out: a defect", type(source).__name__)
            self.has_failed = True
            return self.counted
        self.counted = {key: values for key, values in found.items() if key[0].kind is not Kind.GAUGE}
        return found


def values_of(source: Reports, labels: Mapping[str, str]) -> Values:
    """What one component tells."""
    found: Values = {}
    for metric, own, value in values_in(source.statistics(), labels):
        found.setdefault((metric, own), []).append(value)
    return found


class _Registry:
    """All components of this process."""

    def __init__(self) -> None:
        self._renew()
        after_fork(self, _Registry._renew)

    def _renew(self) -> None:
        """Begin anew: in a child, what the parent's components count is the parent's to tell."""
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        """By the identity of what is asked."""
        self._past: Values = {}
        self._gone: deque[tuple[int, _Entry]] = deque()
        """What has ended or was dropped: it may be so at any moment, when no lock can be taken."""

    def report(self, source: Reports, owner: object | None, labels: Mapping[str, str]) -> None:
        keep: Callable[[], Reports | None] = weakref.ref(source) if owner is None else lambda: source
        entry = _Entry(keep, labels)
        # An owner's end is seen by what does not hold it.
        entry.finalizer = weakref.finalize(source if owner is None else owner, self._gone.append, (id(source), entry))
        entry.finalizer.atexit = False
        with self._lock:
            self._sweep()
            self._entries[id(source)] = entry

    def retire(self, source: Reports) -> None:
        entry = self._entries.get(id(source))
        if entry is None:
            return
        # Before the lock: a component may take one of its own to answer.
        entry.values()
        self._gone.append((id(source), entry))
        # Nor is it waited for: the garbage collector closes components, too, in any thread, also in one that has it.
        # Whoever has it takes away what has gone before he tells of anything next.
        if self._lock.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._lock.release()

    def _sweep(self) -> None:
        while self._gone:
            key, entry = self._gone.popleft()
            if self._entries.get(key) is entry:
                del self._entries[key]
                entry.values()
                self._fold(entry)

    def _fold(self, entry: _Entry) -> None:
        """Keep what a component had counted, whose end it is."""
        entry.finalizer.detach()
        for key, values in entry.counted.items():
            self._past[key] = [key[0].merge([*self._past.get(key, ()), *values])]

    def values(self) -> Values:
        with self._lock:
            self._sweep()
            found = {key: list(values) for key, values in self._past.items()}
            entries = list(self._entries.values())
        # Whoever ends from here on is told as what it is now: it is not among the past that was copied.
        for entry in entries:
            for what, values in entry.values().items():
                found.setdefault(what, []).extend(values)
        return found


_registry: Final = _Registry()

_listening: Final[list[Callable[[], None]]] = []


def when_reported(call: Callable[[], None]) -> None:
    """Call this whenever a component begins to be told of, which may be of a room that was imported just now."""
    _listening.append(call)


def report(source: Reports, *, owner: object | None = None, **labels: str) -> None:
    """Tell of a component from now on.

    Args:
        source: Has `statistics()`, which gives what `reported` declared.
        owner: None (default): the component is told of as long as somebody else holds it, or until `retire`. Else what
            it belongs to: it is told of until that is dropped, and all it has counted goes on being told. The source
            must not hold its owner.
        labels: The values of the labels that its statistics were declared with.
    """
    _registry.report(source, owner, labels)
    for call in _listening:
        call()


def retire(source: Reports) -> None:
    """Tell no more of a component that has ended, but what it has counted. A second call does nothing."""
    _registry.retire(source)


def told() -> Iterator[tuple[Metric, dict[tuple[str, ...], Any]]]:
    """All metrics by name, each with its values by those of its labels."""
    values = _registry.values()
    by_metric: dict[Metric, dict[tuple[str, ...], Any]] = {}
    for (metric, labels), each in values.items():
        by_metric.setdefault(metric, {})[labels] = metric.merge(each)
    yield from sorted(by_metric.items(), key=lambda each: each[0].name)
