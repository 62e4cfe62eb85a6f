"""What a collector flushes when, and who has to wait, compared with a naive model."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relatum import MessageId
from relatum.collecting import Bulk, Collected, ExecutorOptions, FlushReason
from relatum.collecting._collector_core import ENTRY_BYTES, Core, Result, Verdict
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message

STREAM = "orders"


def message(offset: int, type_: str = "a", size: int = 10) -> Collected:
    body = Message.from_record(STREAM, offset, b"x" * size)
    return Collected(MessageId(STREAM, offset), f"m{offset}", type_, size, body)


def core_of(types: dict[str, ExecutorOptions], **limits: int) -> Core:
    core = Core(**limits)
    for name, options in types.items():
        core.register(name, options)
    return core


def put(core: Core, offset: int, type_: str = "a", size: int = 10, now: float = 0.0) -> Verdict:
    each = message(offset, type_, size)
    verdict = core.admit(each)
    if verdict is Verdict.TAKEN:
        core.add([each], now)
    return verdict


def taken(core: Core, type_: str = "a") -> Bulk:
    bulk = core.take(type_)
    assert bulk is not None
    return bulk


def offsets(bulk: Bulk) -> list[int]:
    return [each.place.offset for each in bulk.messages]


def results(bulk: Bulk, status: OutcomeStatus, retry_in_s: float | None = None) -> list[Result]:
    return [Result(each.place, status, None, retry_in_s) for each in bulk.messages]


@dataclass
class Naive:
    """A message in the model: where it is, and since when."""

    offset: int
    type: str
    size: int
    state: str
    at: float
    bulk: int = -1
    spilled: bool = False
    due: float = 0.0

    @property
    def counts(self) -> int:
        return ENTRY_BYTES + (0 if self.spilled else self.size)


@dataclass
class Model:
    """Does everything by looking at all messages each time."""

    types: dict[str, ExecutorOptions]
    bytes_max: int
    bulks_max: int
    messages: list[Naive] = field(default_factory=list)
    closed: list[tuple[str, FlushReason]] = field(default_factory=list)
    stopping: bool = False

    def of(self, type_: str, state: str) -> list[Naive]:
        return [each for each in self.messages if each.type == type_ and each.state == state]

    @property
    def held(self) -> int:
        return sum(each.counts for each in self.messages)

    def waiting(self, type_: str) -> list[int]:
        return sorted({each.bulk for each in self.of(type_, "waiting")})

    def admit(self, offset: int, type_: str, size: int, now: float) -> Verdict:
        if type_ not in self.types:
            return Verdict.NO_EXECUTOR
        if self.stopping:
            return Verdict.REFUSED
        if any(each.offset == offset for each in self.messages):
            return Verdict.KNOWN
        options = self.types[type_]
        filling = [each.size for each in self.of(type_, "open") + self.of(type_, "admitted")]
        coming = max(len(filling) // options.bulk_messages, sum(filling) // options.bulk_bytes)
        full = options.when_full != "spill" and len(self.waiting(type_)) + coming >= options.queue_bulks
        if not full and self.held >= self.bytes_max:
            for other, its in self.types.items():
                for bulk in reversed(self.waiting(other) if its.when_full == "spill" else []):
                    if self.held >= self.bytes_max:
                        self.spill(bulk)
            full = self.held >= self.bytes_max
        if full:
            return Verdict.WAIT
        self.messages.append(Naive(offset, type_, size, "admitted", now))
        return Verdict.TAKEN

    def spill(self, bulk: int) -> None:
        for each in self.messages:
            if each.bulk == bulk:
                each.spilled = True

    def relieve(self) -> None:
        opens = [type_ for type_ in self.types if self.of(type_, "open")]
        if self.held >= self.bytes_max and opens:
            sizes = [sum(each.size for each in self.of(type_, "open")) for type_ in opens]
            self.close(opens[sizes.index(max(sizes))], FlushReason.TOTAL_BYTES)

    def add(self, offsets: list[int], now: float) -> None:
        for offset in offsets:
            self.add_one(offset, now)
        if offsets:
            self.relieve()

    def add_one(self, offset: int, now: float) -> None:
        [each] = [each for each in self.messages if each.offset == offset]
        options, began = self.types[each.type], not self.of(each.type, "open")
        # A bulk keeps the order of adding: the last one added comes last.
        self.messages.remove(each)
        self.messages.append(each)
        each.state, each.at = "open", now
        opened = self.of(each.type, "open")
        if sum(one.size for one in opened) >= options.bulk_bytes:
            self.close(each.type, FlushReason.BYTES)
        elif len(opened) >= options.bulk_messages:
            self.close(each.type, FlushReason.MESSAGES)
        elif began:
            opens = [type_ for type_ in self.types if self.of(type_, "open")]
            if len(opens) >= self.bulks_max:
                self.close(min(opens, key=lambda type_: self.of(type_, "open")[0].at), FlushReason.ACTIVE_BULKS)

    def close(self, type_: str, reason: FlushReason) -> None:
        opened, options = self.of(type_, "open"), self.types[type_]
        if not opened:
            return
        was_full = len(self.waiting(type_)) >= options.queue_bulks
        for each in opened:
            each.state, each.bulk = "waiting", len(self.closed)
        if was_full and options.when_full == "spill":
            self.spill(len(self.closed))
        self.closed.append((type_, reason))

    def tick(self, now: float) -> None:
        for type_, options in self.types.items():
            opened = self.of(type_, "open")
            if opened and now >= opened[0].at + options.max_age_s:
                self.close(type_, FlushReason.AGE)
            elif opened and options.idle_s is not None and now >= opened[-1].at + options.idle_s:
                self.close(type_, FlushReason.IDLE)
            due = [each for each in self.of(type_, "retry") if each.due <= now]
            self.add([each.offset for each in sorted(due, key=lambda one: one.due)], now)

    def deadline(self) -> float | None:
        times = [each.due for each in self.messages if each.state == "retry"]
        for type_, options in self.types.items():
            opened = self.of(type_, "open")
            if opened:
                times.append(opened[0].at + options.max_age_s)
                if options.idle_s is not None:
                    times.append(opened[-1].at + options.idle_s)
        return min(times, default=None)

    def take(self, type_: str) -> int | None:
        options = self.types[type_]
        running = {each.bulk for each in self.of(type_, "running")}
        if not self.waiting(type_) or len(running) >= options.workers:
            return None
        bulk = self.waiting(type_)[0]
        for each in self.messages:
            if each.bulk == bulk:
                each.state = "running"
        return bulk


TYPES = {
    "block": ExecutorOptions(bulk_bytes=60, bulk_messages=4, max_age_s=5, queue_bulks=2, workers=2),
    "idle": ExecutorOptions(bulk_bytes=50, bulk_messages=3, max_age_s=7, idle_s=2, queue_bulks=1),
    "spill": ExecutorOptions(bulk_bytes=2000, bulk_messages=5, max_age_s=4, queue_bulks=1, when_full="spill"),
}
NAMES = st.sampled_from(sorted(TYPES))


class CoreAndModel(RuleBasedStateMachine):
    """The core and the naive model agree after any sequence of actions."""

    @initialize(bytes_max=st.sampled_from([1200, 3000, 6000, 10**6]), bulks_max=st.integers(1, 4))
    def begin(self, bytes_max: int, bulks_max: int) -> None:
        self.now = 0.0
        self.count = 0
        self.core = core_of(TYPES, bytes_max=bytes_max, bulks_max=bulks_max)
        self.model = Model(dict(TYPES), bytes_max, bulks_max)
        self.running: list[Bulk] = []
        self.unstored: list[Collected] = []

    @rule(type_=st.sampled_from([*TYPES, "nobody's"]), size=st.integers(0, 70), many=st.integers(0, 6))
    def offer(self, type_: str, size: int, many: int) -> None:
        # The last one again, or that many new ones.
        for offset in range(self.count, self.count + many) if many or not self.count else [self.count - 1]:
            each = message(offset, type_, size)
            verdict = self.core.admit(each)
            assert verdict is self.model.admit(offset, type_, size, self.now)
            if verdict is Verdict.TAKEN:
                self.unstored.append(each)
        self.count += many

    @precondition(lambda self: self.unstored)
    @rule(most=st.integers(1, 6))
    def stored(self, most: int) -> None:
        lot, self.unstored = self.unstored[:most], self.unstored[most:]
        self.core.add(lot, self.now)
        self.model.add([each.place.offset for each in lot], self.now)
        if self.model.stopping:
            for type_ in TYPES:
                self.model.close(type_, FlushReason.STOP)

    @precondition(lambda self: self.unstored)
    @rule()
    def not_stored(self) -> None:
        each = self.unstored.pop()
        self.core.cancel([each])
        self.model.messages = [one for one in self.model.messages if one.offset != each.place.offset]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.model.tick(self.now)

    @rule(type_=st.none() | NAMES)
    def flush(self, type_: str | None) -> None:
        self.core.flush(type_)
        for each in TYPES:
            if type_ in (None, each):
                self.model.close(each, FlushReason.EXPLICIT)

    @rule(type_=NAMES)
    def take(self, type_: str) -> None:
        bulk, expected = self.core.take(type_), self.model.take(type_)
        assert (bulk is None) == (expected is None)
        if bulk is None or expected is None:
            return
        members = [each for each in self.model.messages if each.bulk == expected]
        assert offsets(bulk) == [each.offset for each in members]
        assert [each.body is None for each in bulk.messages] == [each.spilled for each in members]
        assert (bulk.type, bulk.reason) == self.model.closed[expected]
        for each, one in zip(bulk.messages, members, strict=True):
            each._note(body=message(each.place.offset, each.type, each.bytes).message)
            one.spilled = False
        self.core.loaded(bulk)
        self.running.append(bulk)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        bulk = self.running.pop(0)
        ends: list[Result] = []
        for each in bulk.messages:
            end = data.draw(st.sampled_from(["done", "again", "another's"]))
            [one] = [one for one in self.model.messages if one.offset == each.place.offset]
            if end == "again" and not self.model.stopping:
                one.state, one.bulk, one.due = "retry", -1, self.now + 1.5
                self.model.messages.remove(one)
                self.model.messages.append(one)
            else:
                self.model.messages.remove(one)
            if end != "another's":
                status = OutcomeStatus.COLLECTED if end == "again" else OutcomeStatus.SUCCEEDED
                ends.append(Result(each.place, status, None, 1.5 if end == "again" else None))
        self.core.settle(bulk, ends, self.now)

    @precondition(lambda self: self.count > 10)
    @rule()
    def stop(self) -> None:
        self.core.stop()
        self.model.stopping = True
        for type_ in TYPES:
            self.model.close(type_, FlushReason.STOP)
        self.model.messages = [each for each in self.model.messages if each.state != "retry"]

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "core"):
            return
        assert (self.core.held_bytes, len(self.core.held)) == (self.model.held, len(self.model.messages))
        assert self.core.deadline() == self.model.deadline()
        for type_ in TYPES:
            assert self.core.waiting_bulks(type_) == len(self.model.waiting(type_))
        active = [each for each in self.model.messages if each.state in ("open", "waiting", "running")]
        assert self.core.is_idle == (not active)

    def teardown(self) -> None:
        for type_ in TYPES if hasattr(self, "core") else ():
            while self.core.waiting_bulks(type_):
                for bulk in self.running:
                    self.core.settle(bulk, results(bulk, OutcomeStatus.SUCCEEDED), self.now)
                    done = set(offsets(bulk))
                    self.model.messages = [one for one in self.model.messages if one.offset not in done]
                self.running.clear()
                self.take(type_)


TestCoreAndModel = CoreAndModel.TestCase
TestCoreAndModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_largest_bulk_is_closed_where_all_bytes_reach_their_limit() -> None:
    """The largest bulk is closed when all bytes reach the limit, and not before."""
    core = core_of(dict.fromkeys("abc", ExecutorOptions()), bytes_max=3 * ENTRY_BYTES + 60)
    for offset, (type_, size) in enumerate({"a": 10, "b": 30, "c": 20}.items()):
        assert core.take("b") is None
        put(core, offset, type_, size)
    assert (taken(core, "b").reason, core.take("a"), core.take("c")) == (FlushReason.TOTAL_BYTES, None, None)


def test_adopted_messages_have_no_body_and_their_own_time() -> None:
    """Messages of a member that died count without their bodies, and wait for their retry where one is due."""
    core = core_of({"a": ExecutorOptions(bulk_messages=1)})
    now_due = Collected(MessageId(STREAM, 1), "m1", "a", 100, None, attempts=1), 0.0
    later = Collected(MessageId(STREAM, 2), "m2", "a", 100, None, attempts=2), 3.0
    assert core.adopt([now_due, now_due, later], 5.0) == [now_due[0].place]
    assert (len(core.held), core.held_bytes, core.deadline()) == (2, 2 * ENTRY_BYTES, 8.0)
    bulk = taken(core)
    assert [(each.place.offset, each.attempts, each.body) for each in bulk.messages] == [(1, 1, None)]


def test_lost_messages_are_released() -> None:
    """Lost messages are released at once if they wait for a retry, else with their bulk, and can be taken again."""
    core = core_of({"a": ExecutorOptions(bulk_messages=2)})
    put(core, 0)
    put(core, 1)
    failed = taken(core)
    core.settle(failed, results(failed, OutcomeStatus.COLLECTED, 600.0), 0.0)
    put(core, 2)
    core.lose([MessageId(STREAM, 0), MessageId(STREAM, 2)])
    assert [put(core, 0), put(core, 1), put(core, 2)] == [Verdict.TAKEN, Verdict.KNOWN, Verdict.KNOWN]
    lost = taken(core)
    core.settle(lost, [], 0.0)
    assert (offsets(lost), put(core, 2), core.deadline()) == ([2], Verdict.TAKEN, 600.0)


def test_room_for_others_ends_at_the_limit() -> None:
    """No more is taken over than fits, and nothing once the collector stops."""
    core = core_of({"a": ExecutorOptions(queue_bulks=1, bulk_messages=1)}, bytes_max=4 * ENTRY_BYTES)
    assert (core.room_for_others(1000), core.room_for_others(1)) == ((2, ["a"]), (1, ["a"]))
    put(core, 0)
    assert core.room_for_others(1000) == (1, [])
    core.stop()
    assert core.room_for_others(1000) == (0, [])
    assert core_of({"a": ExecutorOptions()}, bytes_max=1).room_for_others(1000) == (1, ["a"])


def test_back_off_doubles_up_to_an_hour() -> None:
    """Each attempt waits twice as long as the one before, at most an hour."""
    options = ExecutorOptions(backoff_s=1.5)
    assert [options.backoff_after(attempts) for attempts in (1, 2, 3)] == [1.5, 3.0, 6.0]
    assert options.backoff_after(1000) == 3600
