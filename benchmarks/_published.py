"""Compares an intercepted publisher with a bare one, and with one that adds an id by hand, in turns."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from benchmarks import _streams as streams
from benchmarks._context import Context
from benchmarks._results import Row
from benchmarks._timing import in_turns, median, no_collection, nothing, per_second
from relatum.common.uuid7 import time_us_of
from relatum.reading import StreamReader

WAYS: Final = ("bare", "ours", "by hand")
"""The third shows the cost of one more field in the broker and the client."""

WARM_UP_ROUNDS: Final = 3

CONFIRMED: Final = (100, 100)
UNCONFIRMED: Final = (500, 120)
"""Messages in a round, and rounds: small, so that noise affects both sides, and many, so that it averages out."""


def headers(number: int) -> dict[str, Any]:
    """Return an order's headers in a new dictionary, as callers make one for each message."""
    return {"order_id": streams.order_id(number), "host": streams.host(number)}


def compared(
    context: Context,
    group: str,
    what: str,
    actions: Mapping[str, Callable[[], object]],
    ids: Callable[[], Iterable[Any]],
    sizes: tuple[int, int],
    aim: float,
    between: Callable[[], None] = nothing,
) -> Row:
    """Publish in turns, check that all messages arrived, and compare the rates.

    Args:
        context: The servers.
        group: The group of the row.
        what: The messages and the way of publishing them.
        actions: Functions by the names of `WAYS`; each publishes the messages of one round.
        ids: Returns the property `message_id` of all messages at the destination.
        sizes: Messages in a round, and rounds.
        aim: The minimum ratio of ours to bare, as the median of all rounds.
        between: Runs untimed before each action.
    """
    count, rounds = sizes[0], context.rounds(sizes[1])
    in_turns(actions, WARM_UP_ROUNDS, between)
    processor: dict[str, list[float]] = {name: [] for name in WAYS}

    def noted(name: str) -> None:
        began = time.process_time()
        actions[name]()
        processor[name].append(time.process_time() - began)

    with no_collection():
        taken = in_turns({name: partial(noted, name) for name in WAYS}, rounds, between)
    _check(ids, count * (rounds + WARM_UP_ROUNDS))
    bare, ours, by_hand = (count / median(taken[name]) for name in WAYS)
    ratio, ratio_by_hand = _beside_bare(taken, "ours"), _beside_bare(taken, "by hand")
    # Processor time depends least on other work on the machine.
    of_processor, processor_by_hand = _beside_bare(processor, "ours"), _beside_bare(processor, "by hand")
    return Row(
        group,
        f"intercepted {what}",
        per_second(ours),
        f"{per_second(bare)}: bare ({by_hand:,.0f} with an id by hand, {ratio_by_hand:.2f}; by processor time "
        f"{of_processor:.2f}, {processor_by_hand:.2f})",
        ratio,
        f"≥ {aim:g} ×",
        ratio >= aim,
        figures={
            "ours_per_s": ours,
            "bare_per_s": bare,
            "by_hand_per_s": by_hand,
            "by_hand_ratio": ratio_by_hand,
            "processor_ratio": of_processor,
            "processor_by_hand_ratio": processor_by_hand,
            "rounds": rounds,
            "round_messages": count,
        },
    )


def _beside_bare(taken: Mapping[str, list[float]], name: str) -> float:
    """Return the median of the ratios of bare to another way in each round."""
    return median([bare / other for bare, other in zip(taken["bare"], taken[name], strict=True)])


def ids_in(context: Context, stream: str) -> Callable[[], list[Any]]:
    """Return a function that reads the ids of all messages in a stream."""

    def read() -> list[Any]:
        with StreamReader.open(context.broker) as reader:
            return [message.properties.message_id for message in reader.iterate(stream)]

    return read


def _check(ids: Callable[[], Iterable[Any]], each: int) -> None:
    """Check that all messages arrived, and that intercepted ones have an id with their time."""
    limit = time.monotonic() + streams.SETTLE_S
    found: list[Any] = []
    while len(found) < len(WAYS) * each:
        assert time.monotonic() < limit, f"{len(found)} instead of {len(WAYS) * each} messages were published"
        found = list(ids())
    assert len(found) == len(WAYS) * each, f"{len(found)} messages are more than were published"
    assert sum(message_id is not None for message_id in found) >= 2 * each
    assert sum(time_us_of(message_id) is not None for message_id in found) == each
