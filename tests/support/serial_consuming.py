"""Serial consumers, and a super stream whose contexts are moved by hand."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pika
import sqlalchemy as sa

from relatum.common.headers import CONTEXT_HEADER, PLACED_HEADER
from relatum.contexts import SerialConsumer, SerialOptions
from relatum.contexts._partition_log import Adoption, Control, Fence, Marker, Placed, encode
from relatum.superstreams import Layout, Partition
from tests.support._recording import reader_of
from tests.support.leases import LEASE_S
from tests.support.place import Place
from tests.support.routing import confirming
from tests.support.super_streams import super_stream

SESSION = "0123456789abcdef"


class SerialBed:
    """A super stream whose contexts are published to, and moved, one thing at a time."""

    def __init__(self, amqp_url: str, engine: sa.Engine, layout: Layout, channel: pika.channel.Channel) -> None:
        self.name = layout.super_stream
        self.streams = [partition.stream for partition in layout]
        self._amqp_url = amqp_url
        self.engine = engine
        self._channel = channel
        self._numbers = 0
        self._epochs: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        new = "INSERT INTO relatum.super_streams (name, header) VALUES (:name, :header) RETURNING super_stream_id"
        [(self._super_stream_id,)] = self.sql(new, name=self.name, header=CONTEXT_HEADER)
        for partition in layout:
            self._know(partition)

    sql = Place.sql

    def add(self, partition: Partition) -> None:
        self._know(partition)
        self.streams.append(partition.stream)

    def _know(self, partition: Partition) -> None:
        new = "INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place)"
        row = {"stream": partition.stream, "key": partition.binding_key, "place": partition.place}
        values = f"{new} VALUES (:id, :stream, :key, :place) RETURNING partition_id"
        [(self._ids[partition.stream],)] = self.sql(values, id=self._super_stream_id, **row)

    def retire(self, partition: int) -> None:
        retire = "UPDATE relatum.super_stream_partitions SET state = 'retired' WHERE partition_id = :id"
        self.sql(retire, id=self._ids[self.streams[partition]])

    def epoch(self) -> int:
        return int(self.sql("SELECT nextval('relatum.placement_epochs')")[0][0])

    def publish(self, partition: int, context: str, *bodies: str, epoch: int | None = None) -> None:
        """Publish messages of a context, under its present epoch unless another is given."""
        if epoch is None:
            epoch = self._epochs[context] if context in self._epochs else self._epochs.setdefault(context, self.epoch())
        for body in bodies:
            self._numbers += 1
            placed = str(Placed(epoch, SESSION, self._numbers))
            headers = {CONTEXT_HEADER: context, PLACED_HEADER: placed}
            self._publish(self.streams[partition], body.encode(), headers)

    def stray(self, partition: int, context: str, body: str) -> int:
        """Publish a message of a context under its present epoch where it is not any more; gives its offset."""
        self.publish(partition, context, body)
        return self.end(partition)

    def publish_plain(self, partition: int, *bodies: str) -> None:
        for body in bodies:
            self._publish(self.streams[partition], body.encode(), {})

    def control(self, partition: int, control: Control) -> int:
        headers, body = encode(control)
        self._publish(self.streams[partition], body, headers)
        return self.end(partition)

    def _publish(self, stream: str, body: bytes, headers: dict[str, object]) -> None:
        self._channel.basic_publish("", stream, body, pika.BasicProperties(headers=headers), mandatory=True)

    def end(self, partition: int) -> int:
        """The last offset of a partition; -1 where it is empty."""
        with reader_of(self._amqp_url) as reader:
            last = reader.bounds(self.streams[partition]).last
        return -1 if last is None else last

    def begin(self, contexts: Iterable[str], source: int, target: int) -> "HandMove":
        names, epoch = sorted(contexts), self.epoch()
        row = {"super_stream_id": self._super_stream_id, "contexts": len(names), "generation": 0}
        row |= {"source_id": self._ids[self.streams[source]], "scan_from": max(0, self.end(source))}
        row |= {"target_id": self._ids[self.streams[target]], "target_scan_from": max(0, self.end(target))}
        row |= {"fence_epoch": epoch, "epoch": epoch}
        new = f"INSERT INTO relatum.context_moves ({', '.join(row)}) VALUES (:{', :'.join(row)}) RETURNING move_id"
        moved = "INSERT INTO relatum.moved_contexts (move_id, name, from_epoch) VALUES (:move_id, :name, :from_epoch)"
        with self.engine.begin() as connection:
            move_id = connection.scalar(sa.text(new), row)
            rows = [{"move_id": move_id, "name": name, "from_epoch": self._epochs.get(name, 0)} for name in names]
            connection.execute(sa.text(moved), rows)
        return HandMove(self, move_id, frozenset(names), source, target, epoch)

    def move(self, contexts: Iterable[str], source: int, target: int) -> "HandMove":
        move = self.begin(contexts, source, target)
        move.fence()
        move.mark()
        return move

    def _set(self, move_id: int, values: str, offset: int) -> None:
        self.sql(f"UPDATE relatum.context_moves SET {values} WHERE move_id = :id", offset=offset, id=move_id)


@dataclass
class HandMove:
    """A move under way, whose steps a test performs when it likes."""

    bed: SerialBed
    move_id: int
    contexts: frozenset[str]
    source: int
    target: int
    epoch: int
    fence_offset: int = -1

    def fence(self) -> None:
        self.fence_offset = self.publish_fence()
        self.bed._set(self.move_id, "state = 'fenced', fence_offset = :offset", self.fence_offset)

    def publish_fence(self) -> int:
        """Publish the fence, and note nothing."""
        return self.bed.control(self.source, Fence(self.move_id, self.epoch, self.contexts))

    def publish_marker(self) -> int:
        """Publish the marker, and note nothing."""
        source = self.bed.streams[self.source]
        return self.bed.control(self.target, Marker(self.move_id, self.epoch, self.contexts, source, self.fence_offset))

    def mark(self) -> None:
        switched = "state = 'switched', marker_offset = :offset, ended_at = now()"
        self.bed._set(self.move_id, switched, self.publish_marker())
        for context in self.contexts:
            self.bed._epochs[context] = self.epoch

    def adopt(self, context: str, offset: int) -> None:
        self.bed.control(self.target, Adoption(context, self.epoch, self.bed.streams[self.source], offset))


@contextmanager
def serial_bed(amqp_url: str, engine: sa.Engine, partitions: int = 2) -> Iterator[SerialBed]:
    with super_stream(amqp_url, partitions) as layout, confirming(amqp_url) as channel:
        yield SerialBed(amqp_url, engine, layout, channel)


@dataclass(frozen=True)
class Stage:
    """A super stream, its broker and database: what a test of serial consumers needs."""

    bed: SerialBed
    database_url: str
    amqp_url: str
    engine: sa.Engine

    def made(self, name: str = "test", kind: Any = SerialConsumer, *, database_url: str = "", **options: Any) -> Any:
        chosen = SerialOptions(**{"lease_s": LEASE_S, **options})
        return kind(self.bed.name, name, chosen, database=database_url or self.database_url, broker=self.amqp_url)

    @contextmanager
    def consumer(self, name: str = "test", **options: Any) -> Iterator[Any]:
        with self.made(name, **options) as consumer:
            yield consumer

    sql = Place.sql

    def position(self, partition: int) -> int:
        partition_id = self.bed._ids[self.bed.streams[partition]]
        found = self.sql("SELECT position FROM relatum.serial_positions WHERE partition_id = :id", id=partition_id)
        return int(found[0][0]) if found else 0

    def holds(self) -> int:
        return len(self.sql("SELECT FROM relatum.serial_holds"))


def bodies(batch: Any) -> list[str]:
    return [message.body.decode() for message in batch]


def next_batches(consumer: Any, count: int) -> list[Any]:
    found = [consumer.next_batch(90.0) for _ in range(count)]
    assert None not in found
    return found


def consume(consumer: Any, count: int) -> list[str]:
    """So many messages, acknowledged as they come; fails where they do not come."""
    found: list[str] = []
    while len(found) < count:
        batch = consumer.next_batch(90.0)
        assert batch is not None, f"{count} messages were to come; these came: {found}"
        found.extend(bodies(batch))
        batch.acknowledge()
    assert len(found) == count, found
    return found
