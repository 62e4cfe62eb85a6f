"""Serial consumers at the edges: forged messages, full holds and moves in circles, retention, late acknowledgements."""

import json
import random
from collections import defaultdict
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum import Broker, ContextRouter, errors
from relatum.common.headers import CONTEXT_HEADER, CONTROL_HEADER, PLACED_HEADER
from relatum.contexts import SerialConsumer, SerializationContexts
from relatum.contexts._partition_log import Adoption, Marker
from tests.support import broker_connection, wait_until
from tests.support.routing import confirming
from tests.support.serial_consuming import SerialBed, Stage, bodies, next_batches

CIRCLE = ((0, 1), (1, 2), (2, 0))
"""Moves from each partition to the next: a three-cycle."""

NAMES = ["a b", "é" * 500, "x" * 1024, "'; --", "%s %(a)s :b {c}", "\n\t", "relatum_control", "🙂", " ", '\\"', "\x01"]

pytestmark = pytest.mark.usefixtures("quick_rhythm")


def consume_until(consumer: Any, *last: str) -> list[str]:
    found: list[str] = []
    while not set(last) <= set(found):
        (batch,) = next_batches(consumer, 1)
        found += bodies(batch)
        batch.acknowledge()
    return found


def wait_for_no_holds(stage: Stage) -> None:
    wait_until(lambda: stage.holds() == 0, what="nothing is held back")


class Traffic:
    """Contexts that are published to and moved at random, several moves at a time. Bodies are `<context>/<number>`."""

    def __init__(self, bed: SerialBed, seed: int) -> None:
        self.bed = bed
        self.chance = random.Random(seed)
        self.place = {f"c{number}": number % 3 for number in range(9)}
        self.count = dict.fromkeys(self.place, 0)

    def publish(self, context: str) -> None:
        self.count[context] += 1
        self.bed.publish(self.place[context], context, f"{context}/{self.count[context]}")

    def go_round(self) -> None:
        """Publish, and move some of each partition to the next; all fences come before all markers."""
        chance = self.chance
        for context in chance.choices(list(self.place), k=12):
            self.publish(context)
        moves = []
        for source, target in CIRCLE:
            here = [context for context, place in self.place.items() if place == source]
            if here:
                moves.append(self.bed.begin(chance.sample(here, chance.randint(1, len(here))), source, target))
        for move in chance.sample(moves, len(moves)):
            move.fence()
        for move in chance.sample(moves, len(moves)):
            move.mark()
            self.place |= dict.fromkeys(move.contexts, move.target)
            for context in sorted(move.contexts)[:2]:
                self.publish(context)

    @property
    def all(self) -> dict[str, list[int]]:
        return {context: list(range(1, last + 1)) for context, last in self.count.items() if last}


@pytest.mark.parametrize(("held", "batch", "seed"), [(1, 50, 1), (3, 1, 2), (10_000, 7, 3)])
def test_moves_in_circles_come_to_an_end_however_little_may_be_held(
    stage: Stage, held: int, batch: int, seed: int
) -> None:
    """Partitions that wait for each other do not deadlock; batches given back and restarts change nothing."""
    bed = stage.bed
    traffic = Traffic(bed, seed)
    for _ in range(8):
        traffic.go_round()
    total, found = sum(traffic.count.values()), defaultdict[str, list[int]](list)
    while (so_far := sum(map(len, found.values()))) < total:
        until = so_far + traffic.chance.randint(20, 200)
        with stage.consumer(held_messages_max=held, batch_messages=batch) as member:
            while sum(map(len, found.values())) < min(until, total):
                (taken,) = next_batches(member, 1)
                if traffic.chance.random() < 0.1:
                    taken.give_back()
                    continue
                for context, _, number in (body.partition("/") for body in bodies(taken)):
                    found[context].append(int(number))
                taken.acknowledge()
    assert dict(found) == traffic.all
    with stage.consumer():
        wait_for_no_holds(stage)


def test_names_that_begin_amid_moves_miss_nothing_from_then_on(stage: Stage) -> None:
    """Begun at "next", a name gets each context's messages from there on, in order, without a hole."""
    bed = stage.bed
    traffic = Traffic(bed, 4)
    begun: list[tuple[SerialConsumer, dict[str, int]]] = []
    for number in range(4):
        traffic.go_round()
        # Also between the fences and the markers.
        source = traffic.place["c0"]
        move = bed.begin(["c0"], source, (source + 1) % 3)
        move.fence()
        member = stage.made(f"name-{number}", start="next")
        member.start()
        begun.append((member, dict(traffic.count)))
        move.mark()
        traffic.place["c0"] = move.target
    traffic.go_round()
    for context in traffic.place:
        traffic.publish(context)
    for member, count in begun:
        found: defaultdict[str, list[int]] = defaultdict(list)
        while any(found[context][-1:] != numbers[-1:] for context, numbers in traffic.all.items()):
            (taken,) = next_batches(member, 1)
            for context, _, text in (body.partition("/") for body in bodies(taken)):
                found[context].append(int(text))
            taken.acknowledge()
        for context, numbers in traffic.all.items():
            assert found[context] == numbers[found[context][0] - 1 :]
            assert found[context][0] <= count[context] + 1
        member.close()
    wait_for_no_holds(stage)


def test_moves_that_retention_dropped_hold_nothing_back(stage: Stage) -> None:
    """A consumer that is behind what retention kept continues with what is there; pauses are measured from then."""
    bed = stage.bed
    short = {"x-queue-type": "stream", "x-max-length-bytes": 400_000, "x-stream-max-segment-size-bytes": 100_000}
    with broker_connection(stage.amqp_url) as connection:
        channel = connection.channel()
        for place, stream in enumerate(bed.streams[:2]):
            channel.queue_delete(stream)
            channel.queue_declare(stream, durable=True, arguments=short)
            channel.queue_bind(stream, bed.name, str(place))
    bed.publish(0, "a", "a1")
    bed.publish(0, "z", "z1")
    with stage.consumer() as member:
        consume_until(member, "z1")
    bed.move(["a"], 0, 1)
    bed.publish(1, "a", "a2")
    bed.move(["a"], 1, 2)
    bed.publish(2, "a", "a3")
    move = bed.begin(["z"], 0, 1)
    move.fence()
    bed.stray(0, "z", "stray")
    move.mark()
    for _ in range(300):
        bed.publish(0, "p", "p" * 5_000)
        bed.publish(1, "q", "q" * 5_000)
    bed.publish(1, "z", "z2")
    with stage.consumer() as member:
        found = consume_until(member, "a3", "z2")
        wait_for_no_holds(stage)
        assert "stray" not in found
        assert member.statistics().pause_s.sum < 60


FORGED = [
    ("fence", {"move_id": 1, "epoch": "x", "contexts": ["a"]}),
    ("fence", [1]),
    ("marker", {"move_id": 10**30, "epoch": 2, "contexts": ["a"], "source": "s", "fence_offset": 1}),
    ("marker", {"move_id": 9, "epoch": 2, "contexts": ["r"], "source": "elsewhere", "fence_offset": 10**6}),
    ("adoption", {"context": "a", "epoch": 10**9, "stream": "x" * 300, "offset": 0}),
    (5, {}),
]


def test_forged_messages_stop_nobody(stage: Stage) -> None:
    """What looks like Relatum's own and is not stops no partition, now or after a restart."""
    bed = stage.bed
    for kind, facts in FORGED:
        headers = {CONTROL_HEADER: kind, CONTEXT_HEADER: "a"}
        bed._publish(bed.streams[0], json.dumps(facts).encode(), headers)
    for placed in ("x", "1-", b"1-a-2", "1-a-" + "9" * 5_000, 5, {"a": 1}):
        bed._publish(bed.streams[0], b"plain", {PLACED_HEADER: placed, CONTEXT_HEADER: "a"})
    for epoch in (10**6, 10**6 + 1):
        bed.control(0, Marker(77, epoch, frozenset({"held"}), bed.streams[1], 10**5))
    bed.publish(0, "r", "r1")
    with stage.consumer() as member:
        found = consume_until(member, "r1")
    assert found.count("plain") == 6
    bed.publish(0, "a", "a1")
    with stage.consumer() as member:
        assert consume_until(member, "a1") == ["a1"]


def test_an_adoption_delivers_no_message_of_another_context(stage: Stage) -> None:
    """If a partition was deleted and declared again, another message may have the offset that an adoption names."""
    bed = stage.bed
    bed.publish(0, "b", "b1")
    bed.control(1, Adoption("a", bed.epoch(), bed.streams[0], bed.end(0)))
    bed.publish(1, "a", "a1")
    bed.publish(0, "b", "b2")
    with stage.consumer() as member:
        assert sorted(consume_until(member, "a1", "b2")) == ["a1", "b1", "b2"]


def test_batches_are_acknowledged_late_in_any_order_and_once(stage: Stage) -> None:
    """The order among partitions is free; what is done with, or given back, cannot be acknowledged any more."""
    bed = stage.bed
    for place in range(3):
        bed.publish(place, f"c{place}", *(f"{place}{number}" for number in range(4)))
    with stage.consumer(batch_messages=2) as member:
        first = next_batches(member, 3)
        assert member.next_batch(0) is None
        for batch in reversed(first):
            batch.acknowledge()
            with pytest.raises(errors.InvalidInput, match="acknowledged already"):
                batch.acknowledge()
            with pytest.raises(errors.InvalidInput), batch.transaction():
                pytest.fail("there is nothing to be joined")
            batch.give_back()
        returned, *others = next_batches(member, 3)
        returned.give_back()
        with pytest.raises(errors.PartitionLost):
            returned.acknowledge()
        (again,) = next_batches(member, 1)
        assert bodies(again)[: len(bodies(returned))] == bodies(returned)
        for batch in (*others, again):
            with pytest.raises(ZeroDivisionError), batch.transaction():
                raise ZeroDivisionError
            with batch.transaction() as connection, connection.begin_nested():
                connection.execute(sa.text("SELECT 1"))
        done = [*first, *others, again]
        # A batch has fewer messages if the others had not arrived yet.
        while sum(len(bodies(batch)) for batch in done) < 12:
            (rest,) = next_batches(member, 1)
            rest.acknowledge()
            done.append(rest)
        assert member.next_batch(0) is None
    found = sorted(body for batch in done for body in bodies(batch))
    assert found == [f"{place}{number}" for place in range(3) for number in range(4)]


def test_whatever_a_context_is_named_it_moves_and_keeps_its_order(stage: Stage, broker: Broker) -> None:
    """Names of any characters, and of the greatest length, go through router, move and consumer."""
    bed = stage.bed
    found: defaultdict[str | None, list[str]] = defaultdict(list)
    with (
        SerializationContexts(bed.name, stage.database_url, broker=broker) as contexts,
        ContextRouter(bed.name, stage.database_url, broker=stage.amqp_url) as router,
        confirming(stage.amqp_url) as channel,
        stage.consumer() as member,
    ):
        for number in range(3):
            for name in NAMES:
                properties = pika.BasicProperties(headers={CONTEXT_HEADER: name})
                router.publish(channel, str(number).encode(), properties)
            target = bed.streams[number]
            if number == 1:
                contexts.move(NAMES, target)
            else:
                contexts.consolidate([each for each in bed.streams if each != target], target)
        while sum(map(len, found.values())) < 3 * len(NAMES):
            (batch,) = next_batches(member, 1)
            for message in batch:
                found[batch.context_of(message)].append(message.body.decode())
            batch.acknowledge()
        wait_for_no_holds(stage)
    assert found == {name: ["0", "1", "2"] for name in NAMES}
