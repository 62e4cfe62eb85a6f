"""Timing of actions in turns, so that noise on the machine affects all of them."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector in the block, for all sides alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(action: Callable[[], object]) -> float:
    """Run an action and return its seconds."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def nothing() -> None:
    """Do nothing."""


def in_turns(
    actions: Mapping[str, Callable[[], object]], rounds: int, between: Callable[[], None] = nothing
) -> dict[str, list[float]]:
    """Return each action's seconds in each round, in random order. `between` runs untimed before each action."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    shuffler = random.Random(rounds)
    for _ in range(rounds):
        # Not merely rotated, since an action would then always follow the same other one.
        shuffler.shuffle(names)
        for name in names:
            between()
            taken[name].append(timed(actions[name]))
    return taken


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values, 0 to 1, does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the middle value."""
    return statistics.median(values)


def milliseconds(seconds: float) -> str:
    """Format a time for the table."""
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def per_second(rate: float) -> str:
    """Format a rate of messages for the table."""
    return f"{rate:,.0f} messages/s"
