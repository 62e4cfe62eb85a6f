"""A world without input or output, in which the protocol of moved contexts is performed step by step.

Partitions are lists, each request to the database is a transaction, and actors (publishers, movers, members) are
generators of requests: `stepwise` makes one of plain code. Between steps others act; an actor may be killed, what it
sent may arrive later, an answer may be late, and clocks are as wrong as is allowed, or stand still. Two of three
publishers rely on theirs. Movers, publications and members' verdicts are the real code. What is asserted:

- each consumer name gets each message at most once, and each message its publisher was told of exactly once;
- a message whose publication began after another of its context was told comes after it;
- all consumer names get a context's messages in one order, the one by epoch and offset;
- when nobody dies any more, all moves end, and nothing is held.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

from relatum.contexts import ContextOptions, Move, MoveState
from relatum.contexts import _mover as moving
from relatum.contexts import _publication as publication
from relatum.contexts._partition_log import (
    Adoption,
    Data,
    Entry,
    Fence,
    Hold,
    Marker,
    MovedBefore,
    PartitionLog,
    Placed,
    Verdict,
    consistent_starts,
)
from relatum.contexts._placement_cache import Sent as CheckedSent
from relatum.contexts._placements import MoveStep, Placement, PlacementState
from relatum.contexts._publication import DRIFT, STALL_S
from relatum.errors import BrokerUnavailable, DatabaseUnavailable, MoveConflict, RelatumError

PARTITIONS = ("p0", "p1", "p2")
STEP_S = 0.002
"""Seconds that right clocks continue with each step of anybody."""
TIMEOUT_S = 0.5
"""Seconds after which a publisher does not wait any longer."""
RATES = (1 + DRIFT, 1 - DRIFT, 1.0)
"""How fast publishers' clocks are: as much too fast, and too slow, as they may be."""
AT_ONCE = 1e9
"""How fast the clock of a mover is that does not wait."""
STALL = int(STALL_S / STEP_S)
"""Steps for which a publisher's clock may be suspended."""

LONG_AGO = datetime.fromtimestamp(0, UTC)

T = TypeVar("T")

NONE_YET = object()
"""No answer is under way."""


class Asked(NamedTuple):
    """What plain code asks of its world."""

    what: str
    given: tuple[Any, ...]


class Ended(BaseException):
    """Ends the code of an actor that is dead."""


class Asking:
    """The world as plain code sees it: each call is a request, which the driver of its actor answers."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.elapsed_s = now

    def __getattr__(self, what: str) -> Callable[..., Any]:
        return lambda *given: _of_this_thread.ask(Asked(what, given))


_of_this_thread = threading.local()


def stepwise(code: Callable[..., T], *given: Any) -> Generator[Asked, Any, T]:
    """Plain code as an actor. Its thread continues only while its driver waits for the next request."""
    asks: SimpleQueue[tuple[Any, bool, BaseException | None]] = SimpleQueue()
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def ask(asked: Asked) -> Any:
        asks.put((asked, False, None))
        answer, error = answers.get()
        if error is not None:
            raise error
        return answer

    def run() -> None:
        _of_this_thread.ask = ask
        try:
            asks.put((code(*given), True, None))
        except BaseException as error:
            asks.put((None, True, error))

    thread, driver = threading.Thread(target=run, daemon=True), threading.current_thread()
    thread.start()
    is_over = False
    try:
        while True:
            what, is_over, error = asks.get()
            if error is not None:
                raise error
            if is_over:
                return what  # type: ignore[no-any-return]
            try:
                answers.put(((yield what), None))
            except Exception as raised:
                answers.put((None, raised))
    finally:
        if not is_over:
            answers.put((None, Ended()))
        # The garbage collector may end a dropped actor in any thread, also in a component's loop.
        if threading.current_thread() is driver:
            thread.join()


class Unsettled(Exception):
    """A message was sent, and is not known to count."""


def publish(publications: publication.Publications, world: Any, name: str, stream: str | None = None) -> CheckedSent:
    placement = publications.at_hand(name) or publications.place(name, stream)
    sent = publications.next_of(placement)
    world.send(placement, sent)
    try:
        if not publications.is_known_valid(sent):
            publications.settle(name, must=False)
    except RelatumError as error:
        raise Unsettled from error
    return sent


class Wrong(AssertionError):
    """The protocol broke one of its promises."""


class Refused(Exception):
    """A request that the database refuses; the actor ends."""


@dataclass
class HoldRow:
    """A row of `serial_holds`."""

    marker_offset: int
    cursor: int
    source: str
    fence_offset: int


@dataclass
class PositionRow:
    """A row of `serial_positions`, with its holds."""

    position: int
    version: int = 0
    holds: dict[int, HoldRow] = field(default_factory=dict)


@dataclass
class Sent:
    """What the model knows of a message."""

    context: str
    began: int
    opening: int = 0
    told: int | None = None


class Arriving(NamedTuple):
    """What was sent to a partition."""

    stream: str
    entry: Entry


PAUSE = object()
"""A request for nothing; the answer is a number that the driver chose."""

Actor: TypeAlias = Generator[Any, Any, Any]
LogFactory: TypeAlias = Callable[..., PartitionLog]
PublicationsFactory: TypeAlias = Callable[..., publication.Publications]


@dataclass
class Running:
    """An actor and the request it waits with."""

    kind: str
    actor: Actor
    request: Any
    what: Any = None
    answer: Any = NONE_YET
    """What its request came to, while that is under way to it."""


class Consumer:
    """What a consumer name has and got."""

    def __init__(self, positions: dict[str, PositionRow], began: int) -> None:
        self.positions = positions
        self.began = began
        self.order: dict[str, list[Placed]] = defaultdict(list)
        self.latest_began: dict[tuple[str, int], int] = defaultdict(int)


class World:
    """Partitions, a database, and the actors.

    `omit` leaves rules out, `log` and `publications` replace real code, and `wait` shortens movers' waits, all in
    checks of the model itself. Without `trust` no publisher relies on its clock.
    """

    def __init__(
        self,
        contexts: Iterable[str],
        *,
        log: LogFactory = PartitionLog,
        omit: Iterable[str] = (),
        routers: int = 3,
        publications: PublicationsFactory = publication.Publications,
        trust: bool = True,
        wait: float = 1.0,
    ) -> None:
        self.contexts = tuple(contexts)
        self.publications = publications
        self.trust = trust
        self.mover_rate = (1 + DRIFT) / wait if trust and wait else AT_ONCE
        self.log = log
        self.omit = frozenset(omit)
        self.clock = 0
        self._names = 0
        self.streams: dict[str, list[Entry]] = {partition: [] for partition in PARTITIONS}
        self.placements: dict[str, Placement] = {}
        self.changed: dict[str, int] = defaultdict(int)
        """The generation of each name's last change."""
        self.openings: dict[str, int] = defaultdict(int)
        self.opening_of: dict[tuple[str, int], int] = {}
        self.moves: dict[int, MoveStep] = {}
        self.generation = 1
        self.epochs = 0
        self.consumers: dict[str, Consumer] = {}
        self.sent: dict[tuple[str, Placed], Sent] = {}
        self.in_flight: list[Arriving] = []
        self.running: list[Running] = []
        self.asking = Asking(self.now)
        self.routers = [Router(self, self._next_name(), place) for place in range(routers)]
        self.steps = 0
        self.counts: dict[str, int] = defaultdict(int)

    def publish(self, router: int, context: str, preferred: str) -> None:
        chosen = self.routers[router % len(self.routers)]
        self.start("publisher", chosen.publish(context, preferred), chosen)

    def look(self, router: int) -> None:
        chosen = self.routers[router % len(self.routers)]
        self.start("looker", chosen.look(), chosen)

    def now(self) -> float:
        """The movers' clock: as much too fast as it may be, or so fast that they wait for less than they should."""
        return self.clock * STEP_S * self.mover_rate

    def start(self, kind: str, actor: Actor, what: Any = None) -> Running | None:
        """Let an actor begin; it stands before its first request."""
        try:
            running = Running(kind, actor, next(actor), what)
        except StopIteration:
            return None
        self.running.append(running)
        return running

    def step(self, index: int, choice: int = 1, *, late: bool = False) -> None:
        """Let an actor perform the request it waits with, and continue to its next; if it is late, in another step."""
        if self.running:
            self._perform(self.running[index % len(self.running)], choice, late=late)

    def _perform(self, running: Running, choice: int = 1, *, late: bool = False) -> None:
        self.steps += 1
        self.clock += 1
        if running.answer is NONE_YET:
            try:
                running.answer = self._answer(running.request, choice)
            except (Refused, MoveConflict):
                self._end(running)
                return
            if late:
                self.counts["answered late"] += 1
                return
        self._go_on(running, partial(running.actor.send, running.answer))

    def _go_on(self, running: Running, step: Callable[[], Any]) -> None:
        running.answer = NONE_YET
        try:
            running.request = step()
        except (StopIteration, RelatumError):
            self._end(running)

    def kill(self, index: int, *, arrives: bool = False) -> None:
        """End an actor where it stands; a publisher with all that its process does. What it sent may arrive later."""
        if not self.running:
            return
        running = self.running[index % len(self.running)]
        self.counts[f"killed {running.kind}"] += 1
        killed = [running]
        if running.kind == "publisher":
            killed = [each for each in self.running if each.what is running.what]
            place = self.routers.index(running.what)
            self.routers[place] = Router(self, self._next_name(), place)
        for each in killed:
            sent = self._as_sent(each.request)
            if arrives and sent is not None and each.answer is NONE_YET:
                self.in_flight.append(sent)
            self._end(each)

    def cancel(self, index: int, *, arrives: bool = False) -> None:
        """End one publication of a process that continues; what it was about to send may have arrived."""
        running = self.running[index % len(self.running)] if self.running else None
        if running is None or running.kind != "publisher":
            return
        sent = self._as_sent(running.request)
        if arrives and sent is not None and running.answer is NONE_YET:
            self._append(sent)
        self.counts["cancelled"] += 1
        self._end(running)

    def _next_name(self) -> str:
        self._names += 1
        return f"{self._names:x}"

    def fail(self, index: int, *, arrives: bool = False) -> None:
        """Take a server away under an actor: an answer is lost, and what it was about to send may have arrived."""
        if not self.running:
            return
        running = self.running[index % len(self.running)]
        sent = self._as_sent(running.request)
        if arrives and sent is not None and running.answer is NONE_YET:
            self._append(sent)
        error = BrokerUnavailable if isinstance(sent, Arriving) else DatabaseUnavailable
        self.counts[f"failed {running.kind}"] += 1
        self._go_on(running, partial(running.actor.throw, error("away")))

    def arrive(self, index: int) -> None:
        if self.in_flight:
            self.counts["arrived late"] += 1
            late = self.in_flight.pop(index % len(self.in_flight))
            self._append(late)

    def _end(self, running: Running) -> None:
        running.actor.close()
        self.running = [other for other in self.running if other is not running]

    @staticmethod
    def _as_sent(request: Any) -> Arriving | None:
        match request:
            case Asked("publish" | "adopt", (stream, control)):
                return Arriving(stream, control)
            case Asked("send", (placement, sent)):
                return Arriving(placement.stream, Data(placement.name, sent.wanted))
        return None

    def _answer(self, request: Any, choice: int) -> Any:
        if request is PAUSE:
            return choice
        if callable(request):  # one transaction, or one query of the database or a stream
            return request()
        sent = self._as_sent(request)
        if sent is not None:
            self._append(sent)
            return None
        return self.answer(request)

    def answer(self, request: Asked) -> Any:  # noqa: C901 - one case for each question
        match request:
            case Asked("sleep" | "take_over"):
                return None
            case Asked("changes", (None,)):
                return self.generation, None
            case Asked("changes", (since,)):
                return self.generation, [each for name, each in self.placements.items() if self.changed[name] > since]
            case Asked("place", (name, stream)):
                return self._open(name, stream or PARTITIONS[0])
            case Asked("fence_after", (name, epoch, stream)):
                return self._find_move(name, epoch, stream)
            case Asked("search", (sent, from_offset, anywhere)):
                entries = list(enumerate(self.streams[sent.stream]))[from_offset:]
                return publication.find_stray(entries, sent, anywhere=anywhere)
            case Asked("end_of", (stream,)):
                return max(0, len(self.streams[stream]) - 1)
            case Asked("begin", move):
                return self.begin_move(*move)
            case Asked("look", (move_id,)):
                return self.moves[move_id]
            case Asked("find", (stream, control, from_offset)):
                return self._find_control(stream, control, from_offset)
            case Asked("assign_fence_epoch", (move_id,)):
                return self.assign_fence_epoch(move_id)
            case Asked("set_fenced", (move_id, attempt, fence_offset)):
                step = self.moves[move_id]
                if not step.fence_epoch:
                    raise Refused
                if step.state is MoveState.FENCING and step.attempt == attempt:
                    return self.change(move_id, state=MoveState.FENCED, fence_offset=fence_offset)
                return step
            case Asked("switch", (move_id, attempt, marker_offset)):
                return self._switch(move_id, attempt, marker_offset)
            case Asked("set_aborting", (move_id, _)):
                return self._set_aborting(move_id)
        raise AssertionError(request)

    def _open(self, name: str, preferred: str) -> Placement:
        """Where a name is; it is placed where it is nowhere. That raises no generation."""
        placement = self.placements.get(name)
        if placement is None or placement.state is PlacementState.RELEASED:
            self.openings[name] += 1
            epoch = self.next_epoch()
            self.opening_of[name, epoch] = self.openings[name]
            where = (PARTITIONS.index(preferred), preferred, preferred)
            placement = self.placements[name] = Placement(name, *where, epoch, PlacementState.OPEN)
        return placement

    def _append(self, sent: Arriving) -> None:
        self.streams[sent.stream].append(sent.entry)
        adoption = sent.entry
        if isinstance(adoption, Adoption):
            original = self.streams[adoption.stream][adoption.offset]
            assert isinstance(original, Data)
            assert original.placed is not None
            known = self.sent[adoption.context, original.placed]
            if self.opening_of[adoption.context, adoption.epoch] != known.opening:
                # There is no order between two openings of a placement.
                known.opening = -1

    def release(self, name: str) -> None:
        placement = self.placements.get(name)
        if placement is not None and placement.state is PlacementState.OPEN:
            self.generation += 1
            self._set(name, state=PlacementState.RELEASED)
            self.counts["released"] += 1

    def _set(self, name: str, **changes: Any) -> None:
        if "epoch" in changes:
            self.opening_of[name, changes["epoch"]] = self.openings[name]
        self.changed[name] = self.generation
        self.placements[name] = replace(self.placements[name], **changes)

    def _find_move(self, name: str, epoch: int, stream: str) -> Move | None:
        """The first move that ended or began a name in a partition under a higher epoch than that."""
        for step in self.moves.values():
            if name not in step.names:
                continue
            is_out = step.source == stream and step.fence_epoch > epoch
            is_in = step.target == stream and step.epoch > epoch and "floor by markers" not in self.omit
            if is_out or is_in:
                return step
        return None

    def begin_move(
        self, source: str, target: str, contexts: frozenset[str], scan_from: int, target_scan_from: int
    ) -> MoveStep:
        """Begin a move of contexts that are all open in the source."""
        placements = [self.placements.get(context) for context in contexts]
        for placement in placements:
            if placement is None or placement.state is not PlacementState.OPEN or placement.stream != source:
                raise Refused
        self.generation += 1
        move_id = len(self.moves) + 1
        if "stop before the fence" not in self.omit:
            for context in contexts:
                self._set(context, state=PlacementState.MOVING, move_id=move_id)
        facts = dict.fromkeys(each.name for each in fields(MoveStep)) | {"state": MoveState.FENCING, "attempt": 1}
        facts |= {"aborting": False, "started_at": LONG_AGO, "move_id": move_id, "fence_epoch": 0, "epoch": 0}
        facts |= {"source": source, "source_id": PARTITIONS.index(source), "scan_from": scan_from}
        facts |= {"target": target, "target_id": PARTITIONS.index(target), "target_scan_from": target_scan_from}
        step = MoveStep(**facts | {"contexts": len(contexts), "names": contexts})
        self.moves[move_id] = step
        self.counts["moves"] += 1
        return step

    def change(self, move_id: int, **changes: Any) -> MoveStep:
        step = self.moves[move_id] = replace(self.moves[move_id], **changes)
        return step

    def assign_fence_epoch(self, move_id: int) -> MoveStep:
        step = self.moves[move_id]
        if step.fence_epoch:
            return step
        fence = self.next_epoch()
        for context in step.names:
            self.opening_of[context, fence] = self.openings[context]
        epoch = self.next_epoch() if step.aborting else fence
        return self.change(move_id, fence_epoch=fence, epoch=epoch, attempt=step.attempt + 1)

    def _find_control(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        for offset, entry in enumerate(self.streams[stream]):
            is_it = type(entry) is type(control) and (entry.move_id, entry.epoch) == (control.move_id, control.epoch)
            if is_it and offset >= from_offset:
                return offset
        return None

    def _switch(self, move_id: int, attempt: int, marker_offset: int) -> MoveStep:
        step = self.moves[move_id]
        if step.state is not MoveState.FENCED or (step.attempt != attempt and "attempt" not in self.omit):
            return step
        state = MoveState.ABORTED if step.aborting else MoveState.SWITCHED
        self.generation += 1
        for context in step.names:
            self._set(context, stream=step.target, epoch=step.epoch, state=PlacementState.OPEN, move_id=None)
        self.counts[state.value] += 1
        return self.change(move_id, state=state, marker_offset=marker_offset)

    def _set_aborting(self, move_id: int) -> MoveStep:
        step = self.moves[move_id]
        if step.aborting or step.state.is_ended:
            return step
        back = {"target": step.source, "target_scan_from": step.scan_from, "epoch": self.next_epoch()}
        return self.change(move_id, aborting=True, attempt=step.attempt + 1, **back)

    def next_epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    def add_consumer(self, name: str, *, at_end: bool) -> None:
        """Make a consumer name; at the end, one partition's end is read after another."""
        if not at_end:
            self.consumers[name] = Consumer({partition: PositionRow(0) for partition in PARTITIONS}, self.clock)
            return
        self.start("creator", self._create(name))

    def _create(self, name: str) -> Actor:
        ends: dict[str, int] = {}
        for partition in PARTITIONS:
            ends[partition] = yield partial(len, self.streams[partition])
        yield partial(self._insert_consumer, name, ends)

    def _insert_consumer(self, name: str, ends: Mapping[str, int]) -> None:
        starts = dict(ends)
        if "consistent starts" not in self.omit:
            moves = self.moves.values()
            begins = [each.target_scan_from if each.marker_offset is None else each.marker_offset for each in moves]
            places = [(each.source, each.target, each.fence_offset) for each in moves]
            moved = [MovedBefore(*at, begin) for at, begin in zip(places, begins, strict=True)]
            starts = consistent_starts(ends, moved)
        self.consumers[name] = Consumer({key: PositionRow(at) for key, at in starts.items()}, self.clock)

    def claim(self, name: str, partition: str) -> tuple[int, int, dict[int, HoldRow]]:
        row = self.consumers[name].positions[partition]
        row.version += 1
        return row.version, row.position, {move_id: replace(hold) for move_id, hold in row.holds.items()}

    def begin_reading(self, partition: str, position: int, holds: Mapping[int, HoldRow]) -> tuple[int, dict[str, int]]:
        bounds = [position]
        if "rescan holds" not in self.omit:
            bounds += [hold.marker_offset for hold in holds.values()]
        for step in self.moves.values():
            if step.source == partition and step.fence_offset is None and "rescan fences" not in self.omit:
                bounds.append(step.scan_from)
            if step.target == partition and not step.state.is_ended:
                bounds.append(step.target_scan_from)
        begin = min(bounds)
        return begin, self._floors(partition, begin)

    def _floors(self, partition: str, begin: int) -> dict[str, int]:
        floors: dict[str, int] = {}
        if "floors from moves" in self.omit:
            return floors
        for step in self.moves.values():
            epochs = [0]
            if step.source == partition and step.fence_offset is not None and step.fence_offset < begin:
                epochs.append(step.fence_epoch)
            if step.target == partition and step.marker_offset is not None and step.marker_offset < begin:
                epochs.append(step.epoch)
            for context in step.names if max(epochs) else ():
                floors[context] = max(floors.get(context, 0), *epochs)
        return floors

    def complete(self, name: str, partition: str) -> set[int]:
        """The holds of a partition whose contexts wait no more."""
        positions = self.consumers[name].positions
        found = set()
        for move_id, hold in positions[partition].holds.items():
            source = positions[hold.source]
            if source.position <= hold.fence_offset and "source position" not in self.omit:
                continue
            contexts = self.moves[move_id].names
            blocked = any(
                other.marker_offset < hold.fence_offset and contexts & self.moves[other_id].names
                for other_id, other in source.holds.items()
                if (hold.source, other_id) != (partition, move_id)
            )
            if not blocked or "holds of the source" in self.omit:
                found.add(move_id)
        return found

    def commit(
        self,
        name: str,
        partition: str,
        version: int,
        position: int,
        holds: Mapping[int, Hold],
        ended: Iterable[int],
        delivered: Iterable[Data | Adoption],
    ) -> bool:
        """Store what a member did, with what it delivered; False where another has the partition."""
        consumer = self.consumers[name]
        row = consumer.positions[partition]
        if row.version != version and "version" not in self.omit:
            return False
        row.position = max(row.position, position)
        for move_id in ended:
            row.holds.pop(move_id, None)
        for move_id, hold in holds.items():
            row.holds[move_id] = HoldRow(hold.marker_offset, hold.cursor, hold.source, hold.fence_offset)
        for entry in delivered:
            self._deliver(name, consumer, entry)
        return True

    def _deliver(self, name: str, consumer: Consumer, entry: Data | Adoption) -> None:
        original = self.streams[entry.stream][entry.offset] if isinstance(entry, Adoption) else entry
        assert isinstance(original, Data)
        assert original.context is not None
        assert original.placed is not None
        if isinstance(entry, Adoption):
            self.counts["adoptions delivered"] += 1
        self.counts["delivered"] += 1
        order = consumer.order[original.context]
        if original.placed in order:
            raise Wrong(f"{name} got {original.context} {original.placed} twice")
        order.append(original.placed)
        sent = self.sent[original.context, original.placed]
        key = (original.context, sent.opening)
        if sent.told is not None and sent.told < consumer.latest_began[key]:
            raise Wrong(f"{name} got {original.context} {original.placed} after one that was published later")
        consumer.latest_began[key] = max(consumer.latest_began[key], sent.began)

    def consume(self, name: str, partition: str) -> Actor:
        version, position, rows = yield partial(self.claim, name, partition)
        at, floors = yield partial(self.begin_reading, partition, position, rows)
        cursors = {move_id: hold.cursor for move_id, hold in rows.items()}
        log = self.log(floors, open_holds=cursors, position=position)
        while True:
            choice: int = yield PAUSE
            delivered: list[Data | Adoption] = []
            ended: list[int] = []
            if choice % 2 and log.holds and (at >= position or "wait for the rescan" in self.omit):
                complete = yield partial(self.complete, name, partition)
                for hold in [hold for hold in log.holds.values() if hold.move_id in complete]:
                    for offset, held in list(hold.held.items())[: choice // 2]:
                        delivered.append(held)
                        log.delivered(hold.move_id, offset)
                    if not hold.held:
                        log.end(hold.move_id)
                        ended.append(hold.move_id)
            else:
                for offset in range(at, min(at + choice, len(self.streams[partition]))):
                    entry = self.streams[partition][offset]
                    if log.judge(offset, entry) is Verdict.DELIVER:
                        assert isinstance(entry, Data | Adoption)
                        delivered.append(entry)
                    at = offset + 1
            if not (yield partial(self.commit, name, partition, version, at, dict(log.holds), ended, delivered)):
                return

    def close(self) -> None:
        """End all actors: the threads of those that run plain code would stay."""
        for running in list(self.running):
            self._end(running)

    def finish(self) -> None:
        """Let all continue until nothing is left to do, and check what came of it."""
        while self.in_flight:
            self.arrive(0)
        self._run_out("mover", "aborter", "creator")
        for move_id, step in self.moves.items():
            if not step.state.is_ended:
                self.start("mover", stepwise(moving.go_on, self.asking, move_id))
        self._run_out("mover", "aborter")
        if any(not step.state.is_ended for step in self.moves.values()):
            raise Wrong("a move does not end")
        self._run_out("publisher")
        for router in self.routers:
            for context in self.contexts:
                self.start("publisher", router.settle(context), router)
        self._run_out("publisher")
        for running in [each for each in self.running if each.kind == "member"]:
            self._end(running)
        self._drain()
        for name, consumer in self.consumers.items():
            self._check(name, consumer)

    def _run_out(self, *kinds: str) -> None:
        while chosen := [running for running in self.running if running.kind in kinds]:
            for running in chosen:
                self._perform(running)

    def _drain(self) -> None:
        for name in self.consumers:
            for partition in PARTITIONS:
                self.start("member", self.consume(name, partition))
        still = 0
        while not self._is_drained():
            before = self._progress()
            for choice in (1000, 1001):
                for running in list(self.running):
                    for _ in range(5):
                        self._perform(running, choice)
            still = still + 1 if self._progress() == before else 0
            if still > 2:
                raise Wrong("consumers wait for ever")

    def _is_drained(self) -> bool:
        return all(
            row.position >= len(self.streams[partition]) and not row.holds
            for consumer in self.consumers.values()
            for partition, row in consumer.positions.items()
        )

    def _progress(self) -> list[Any]:
        return [
            (row.position, sorted((move_id, hold.cursor) for move_id, hold in row.holds.items()))
            for consumer in self.consumers.values()
            for row in consumer.positions.values()
        ]

    def _check(self, name: str, consumer: Consumer) -> None:
        canonical = self.canonical()
        for context in self.contexts:
            got = consumer.order[context]
            for (of, placed), sent in self.sent.items():
                if of == context and sent.told is not None and sent.began > consumer.began and placed not in got:
                    if self._is_behind_an_orphan(context, placed):
                        continue
                    raise Wrong(f"{name} never got {context} {placed}, of which its publisher was told")
            for opening in range(1, self.openings[context] + 1):
                of_it = {placed for (_, placed), sent in self.sent.items() if sent.opening == opening}
                expected = [placed for placed in canonical[context] if placed in got and placed in of_it]
                counted = [placed for placed in got if placed in of_it]
                if [placed for placed in counted if not self._is_behind_an_orphan(context, placed)] != expected:
                    raise Wrong(f"{name} got {context} in another order than that by epoch and offset")

    def _is_behind_an_orphan(self, context: str, placed: Placed) -> bool:
        """The one limit of docs/contexts-protocol.md: late messages of an earlier opening, behind an aborted marker."""
        for stream, entries in self.streams.items():
            if Data(context, placed) not in entries:
                continue
            for entry in entries[: entries.index(Data(context, placed))]:
                if not isinstance(entry, Marker) or context not in entry.contexts or entry.epoch <= placed.epoch:
                    continue
                if self.moves[entry.move_id].aborting and stream != entry.source:
                    return self.opening_of[context, entry.epoch] > self.opening_of[context, placed.epoch]
        return False

    def canonical(self) -> dict[str, list[Placed]]:
        """The messages of each context that count, by epoch and offset. Said again, without `PartitionLog`."""
        found: dict[str, list[tuple[int, int, Placed]]] = defaultdict(list)
        for entries in self.streams.values():
            floors: dict[str, int] = defaultdict(int)
            for offset, entry in enumerate(entries):
                if isinstance(entry, Fence | Marker):
                    for context in entry.contexts:
                        floors[context] = max(floors[context], entry.epoch)
                    continue
                original = self.streams[entry.stream][entry.offset] if isinstance(entry, Adoption) else entry
                assert isinstance(original, Data)
                assert original.placed is not None
                epoch = entry.epoch if isinstance(entry, Adoption) else original.placed.epoch
                if epoch >= floors[str(original.context)]:
                    found[str(original.context)].append((epoch, offset, original.placed))
        return defaultdict(list, {context: [placed for *_, placed in sorted(all_)] for context, all_ in found.items()})


class Router:
    """A publisher: the real publications, performed in the world."""

    def __init__(self, world: World, name: str, place: int) -> None:
        self.world = world
        self._rate = RATES[place % len(RATES)]
        self.stood_still = 0
        """Steps for which its clock did not continue."""
        trust_clock = world.trust and self._rate != 1
        asking = world.asking
        options = ContextOptions(timeout_s=TIMEOUT_S, trust_clock=trust_clock)
        self.publications = world.publications(asking, self.now, options)
        self.publications.name = name
        self.busy: set[str | None] = set()

    def now(self) -> float:
        return (self.world.clock - self.stood_still) * STEP_S * self._rate

    def _alone(self, what: str | None, begin: Callable[..., Actor], *given: Any) -> Actor:
        """Do something unless it is under way: with one context, or look at the database (None)."""
        if what in self.busy:
            return
        self.busy.add(what)
        try:
            yield from begin(*given)
        finally:
            self.busy.discard(what)

    def publish(self, context: str, preferred: str) -> Actor:
        return self._alone(context, self._publish, context, preferred)

    def look(self) -> Actor:
        return self._alone(None, stepwise, self.publications.look)

    def _publish(self, context: str, preferred: str) -> Actor:
        world, began = self.world, self.world.clock
        steps = stepwise(publish, self.publications, world.asking, context, preferred)
        request = next(steps)
        sent: Sent | None = None
        while True:
            asked = request.what != "send"
            if not asked:
                placed = request.given[1].wanted
                sent = world.sent[context, placed] = Sent(context, began, world.opening_of[context, placed.epoch])
            try:
                answer = yield request
            except RelatumError as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, answer)
            try:
                request = step()
            except StopIteration:
                break
            except (RelatumError, Unsettled):
                world.counts["not told"] += 1
                return
        assert sent is not None
        sent.told = world.clock
        world.counts["told by a clock"] += not asked
        world.counts["told"] += 1

    def settle(self, context: str) -> Actor:
        """See to what is not settled, as closing a router does."""
        return self._alone(context, stepwise, self.publications.settle, context)
