"""The store of placements: all processes that place a name agree, and every cache notices each change."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa

from relatum import Broker
from relatum.common.limits import INTEGER_MAX
from relatum.contexts import AffinitySets, SerializationContexts, forget_placements
from relatum.contexts._move_store import MoveStore
from relatum.contexts._placement_prune import forget_moves, forget_released
from relatum.contexts._placements import Move, PartitionRow, PartitionState, PlacementState
from relatum.errors import DatabaseUnavailable, MoveConflict, RowRefused, SuperStreamConflict, TooManyOpenSets
from relatum.store.database import Database, sql
from relatum.superstreams import Layout
from tests.support.standstill import somebody_waits

LAYOUT = Layout.numbered("orders", 3)
HEADER = "affinity_set"
RETIRE = "UPDATE relatum.super_stream_partitions SET state = 'retired'"
CHANGES_MAX = 10_000
"""How many changes are returned one by one."""


def least(_name: str, partitions: Sequence[PartitionRow]) -> PartitionRow:
    return min(partitions, key=lambda partition: partition.open_sets)


def in_place(place: int) -> Callable[[str, Sequence[PartitionRow]], PartitionRow]:
    return lambda _name, partitions: partitions[place]


@contextmanager
def stored(database_url: str, vhost: str = "/", super_stream: str = "orders") -> Iterator[MoveStore]:
    with closing(Database(database_url, writes=True)) as database:
        yield MoveStore(database, vhost, super_stream)


@pytest.fixture
def store(database_url: str) -> Iterator[MoveStore]:
    with stored(database_url) as opened:
        opened.open(HEADER, LAYOUT)
        yield opened


def counted(store: MoveStore) -> list[int]:
    """The open sets of each partition, as they are counted on."""
    counts = [partition.open_sets for partition in store.partitions()]
    placed = Counter(placement.stream for placement in store.placements())
    assert counts == [placed[partition.stream] for partition in store.partitions()]
    return counts


def execute(store: MoveStore, *statements: str, **parameters: str | int) -> None:
    with store.database.engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement), parameters)


def existing(move: Move | None) -> Move:
    assert move is not None
    return move


def test_what_publishers_rely_on_comes_from_no_standby(store: MoveStore, database_url: str) -> None:
    """No answer that a publisher relies on comes from a server that calls itself a standby, since it may be behind."""
    store.place(["x"], in_place(0))
    standby_says = "CREATE FUNCTION behind.pg_is_in_recovery() RETURNS boolean RETURN true"
    execute(store, "CREATE SCHEMA behind", standby_says)
    path = "?options=-csearch_path%3Dbehind%2Cpg_catalog"
    with stored(database_url + path) as standby:
        standby.open(HEADER, LAYOUT)
        for ask in (
            lambda: standby.changes(None),
            lambda: standby.changes(0),
            lambda: standby.fence_after("x", 0, "orders-0"),
            lambda: standby.fence_after("unknown", 0, "orders-0"),
            lambda: standby.place(["x"], in_place(0)),
        ):
            with pytest.raises(DatabaseUnavailable, match="standby"):
                ask()
        assert list(standby.find(["x"])) == ["x"]  # values that are only shown may be a moment old


def in_state(store: MoveStore, state: PlacementState) -> int:
    in_it = sql("SELECT 1 FROM relatum.placements WHERE state = :state::text")
    return len(store.database.rows(in_it, {"state": str(state)}))


class Moves:
    """Moves of one name each, as a mover stores them; a move goes by its number."""

    def __init__(self, store: MoveStore, contexts: SerializationContexts) -> None:
        self._store, self._moves = store, contexts._store

    def stored(self) -> list[int]:
        return [each.move_id for each in self._moves.moves(latest=99)]

    def begin(self, name: str, target: int) -> int:
        source, to = self._store.find([name])[name].stream, self._store.partitions()[target].stream
        begun = self._moves.begin(source, to, frozenset([name]), 0, 0, name)
        return self._moves.assign_fence_epoch(begun.move_id).move_id

    def end(self, move_id: int, offset: int = 5) -> None:
        """End it, with fence and marker at the offset."""
        attempt = self._moves.look(move_id).attempt
        self._moves.set_fenced(move_id, attempt, offset)
        self._moves.switch(move_id, attempt, offset)

    def move(self, name: str, target: int, offset: int = 5) -> int:
        move_id = self.begin(name, target)
        self.end(move_id, offset)
        return move_id


@pytest.fixture
def moves(store: MoveStore, database_url: str) -> Iterator[Moves]:
    with SerializationContexts("orders", database_url) as contexts:
        yield Moves(store, contexts)


def test_where_a_fence_without_an_epoch_lies_is_not_stored(store: MoveStore, moves: Moves) -> None:
    """The offset of a fence without an epoch, as of an earlier release's mover, is not stored."""
    store.place(["x"], in_place(0))
    move_id = moves.begin("x", 1)
    moves._moves.set_fenced(move_id, 1, 5)
    found = moves._moves.look(move_id)
    assert (found.state, found.fence_offset, found.attempt) == ("fencing", None, 2)


def test_a_partition_that_is_bound_by_another_key_is_noticed(store: MoveStore) -> None:
    """A partition that is bound by another key makes every cached placement wrong."""
    store.place(["a"], in_place(1))
    before = store.generation()
    store.open(HEADER, Layout.of("orders", [("orders-0", "0"), ("orders-1", "one"), ("orders-2", "2")]))
    assert store.changes(before)[1] is None
    assert store.find(["a"])["a"].binding_key == "one"


def test_a_partition_that_another_process_adds_by_another_key_is_noticed(store: MoveStore, database_url: str) -> None:
    """Of two processes that add a partition by different keys, the second invalidates what was placed by the first."""
    before = store.generation()
    with ThreadPoolExecutor(1) as threads:
        with store.database.engine.begin() as connection:
            add = "INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place) VALUES"
            connection.execute(sa.text(f"{add} (:id, 'orders-3', 'old', 3)"), {"id": store.super_stream_id})
            opened = threads.submit(store.open, HEADER, Layout.numbered("orders", 4))
            somebody_waits(database_url)
        assert [row.binding_key for row in opened.result(90)] == ["0", "1", "2", "3"]
    assert store.changes(before)[1] is None


def test_placing_and_releasing_at_once_keeps_the_counts(database_url: str, store: MoveStore) -> None:
    """Every count is right and epochs ascend while many threads place and release the same names."""
    seen: dict[str, list[int]] = {}
    lock = threading.Lock()

    def work(seed: int) -> None:
        with stored(database_url) as mine:
            mine.open()
            for turn in range(25):
                names = [f"n{(seed + turn + step) % 7}" for step in range(3)]
                placed = mine.place(names, least)
                with lock:
                    for name, each in placed.items():
                        seen.setdefault(name, []).append(each.epoch)
                assert mine.release([(name, each.epoch) for name, each in placed.items()]) == frozenset()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert counted(store) == [0, 0, 0]
    assert in_state(store, PlacementState.RELEASED) == 7
    last = {name: each.epoch for name, each in store.place(sorted(seen), least).items()}
    assert all(max(epochs) < last[name] for name, epochs in seen.items())


def test_a_released_name_is_placed_anew_with_a_higher_epoch(store: MoveStore) -> None:
    """A released name shows up as a change and may be placed elsewhere, where its old release has no effect."""
    first = store.place(["a"], in_place(0))["a"]
    since = store.generation()
    assert store.release([("a", first.epoch)]) == frozenset()
    assert store.find(["a"]) == {}
    (change,) = store.changes(since)[1] or ()
    assert (change.name, change.state, change.epoch) == ("a", PlacementState.RELEASED, first.epoch)
    second = store.place(["a"], in_place(2))["a"]
    assert second.epoch > first.epoch
    assert second.stream == "orders-2"
    assert store.release([("a", first.epoch)]) == frozenset()
    assert store.find(["a"])["a"] == second
    (again,) = store.changes(since)[1] or ()
    assert again == second
    assert store.changes(store.generation())[1] == []
    assert counted(store) == [0, 0, 1]


def test_a_set_that_moves_cannot_be_released_until_it_has_arrived(
    store: MoveStore, moves: Moves, database_url: str
) -> None:
    """A set that moves cannot be released; once it has arrived, a release with its old epoch counts."""
    placed = store.place(["a", "b"], in_place(0))
    move_id = moves.begin("a", 1)
    assert store.find(["a"])["a"].state is PlacementState.MOVING
    assert store.release([(name, each.epoch) for name, each in placed.items()]) == {"a"}
    with AffinitySets("orders", database_url) as sets, pytest.raises(MoveConflict) as caught:
        sets.close_set("a")
    assert (caught.value.move_id, caught.value.state) == (move_id, "fencing")
    assert in_state(store, PlacementState.MOVING) == 1
    moves.end(move_id)
    assert store.release([("a", placed["a"].epoch)]) == frozenset()
    assert store.find(["a"]) == {}
    assert counted(store) == [0, 0, 0]


def test_a_set_is_released_that_arrives_just_then(store: MoveStore, moves: Moves, database_url: str) -> None:
    """A release that waited for the end of a move releases the set where the move has left it."""
    epoch = store.place(["a"], in_place(0))["a"].epoch
    move_id = moves.begin("a", 1)
    with ThreadPoolExecutor(1) as threads:
        with store.database.engine.begin() as connection:
            connection.execute(sa.text("SELECT FROM relatum.placements WHERE name = 'a' FOR UPDATE"))
            released = threads.submit(store.release, [("a", epoch)])
            somebody_waits(database_url)
            arrived = "UPDATE relatum.placements SET state = 'open', move_id = NULL, epoch = epoch + 1 WHERE name = 'a'"
            connection.execute(sa.text(arrived))
        assert released.result(90) == frozenset()
    assert store.find(["a"]) == {}
    assert moves.stored() == [move_id]
    assert counted(store) == [0, 0, 0]


def test_no_more_sets_are_open_than_may_be(database_url: str, store: MoveStore) -> None:
    """No more sets than the limit are ever open, and names that do not fit are not placed at all."""

    def place(number: int) -> tuple[int, int] | None:
        with stored(database_url) as mine:
            mine.open()
            try:
                mine.place([f"n{number}"], in_place(number % 3), open_sets_max=10)
            except TooManyOpenSets as error:
                return error.open_sets, error.open_sets_max
            return None

    with ThreadPoolExecutor(8) as pool:
        refused = [answer for answer in pool.map(place, range(24)) if answer is not None]
    assert refused == [(10, 10)] * 14
    assert sum(counted(store)) == 10
    name = next(iter(store.placements())).name
    with pytest.raises(TooManyOpenSets):
        store.place([name, "x"], least, open_sets_max=10)
    assert store.find([name, "x"]).keys() == {name}


def test_only_a_retired_partition_is_taken_for_one(store: MoveStore) -> None:
    """A row that PostgreSQL refuses for another reason is reported with that reason."""
    function = "CREATE FUNCTION divide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM 1 / 0; END $$"
    trigger = "CREATE TRIGGER divides BEFORE INSERT ON relatum.placements FOR EACH ROW EXECUTE FUNCTION divide()"
    execute(store, function, trigger)
    with pytest.raises(RowRefused, match="division by zero"):
        store.place(["a"], least)


def test_nothing_new_is_placed_in_a_retired_partition(store: MoveStore) -> None:
    """A retired partition gets no new name, even if it was retired between the choice and the write."""

    def retire(stream: str) -> None:
        execute(store, f"{RETIRE} WHERE stream = :stream", stream=stream)

    def choose(_name: str, partitions: Sequence[PartitionRow]) -> PartitionRow:
        retire(partitions[0].stream)
        return partitions[0] if len(partitions) == 3 else partitions[1]

    assert store.place(["a"], choose)["a"].stream == "orders-2"
    assert [each.state for each in store.partitions()].count(PartitionState.RETIRED) == 2
    retire("orders-2")
    with pytest.raises(SuperStreamConflict):
        store.place(["b"], least)
    assert store.find(["a"])["a"].stream == "orders-2"


def test_more_changes_than_can_be_told_are_everything(store: MoveStore) -> None:
    """A publisher that missed more changes than the limit must forget everything."""
    row = "INSERT INTO relatum.placements (super_stream_id, name, partition_id, epoch, first_epoch, generation) "
    rows = row + f"SELECT {store.super_stream_id}, 'n' || n, {store.partitions()[0].partition_id}, n, n, 2 + n % 2 "
    rows += f"FROM generate_series(1, {CHANGES_MAX + 1}) AS n"
    execute(store, rows, "UPDATE relatum.super_streams SET generation = 3")
    assert store.changes(1) == (3, None)
    generation, changed = store.changes(2)
    assert (generation, len(changed or ())) == (3, CHANGES_MAX // 2 + 1)


def test_the_first_move_after_an_epoch_is_found(store: MoveStore, moves: Moves) -> None:
    """A message is fenced by the first move of its name out of or into its partition above the message's epoch."""
    first = store.place(["a", "b"], in_place(0))["a"]
    assert store.fence_after("a", first.epoch, "orders-0") is None
    one = moves.move("a", 1)
    second = store.find(["a"])["a"]
    two = moves.begin("a", 0)
    out = existing(store.fence_after("a", first.epoch, "orders-0"))
    assert (out.move_id, out.source, out.target, out.fence_offset) == (one, "orders-0", "orders-1", 5)
    into = existing(store.fence_after("a", out.fence_epoch, "orders-0"))
    assert (into.move_id, into.fence_offset, into.target) == (two, None, "orders-0")
    assert existing(store.fence_after("a", second.epoch, "orders-1")).move_id == two
    assert store.fence_after("a", into.epoch, "orders-0") is None
    assert store.fence_after("b", 0, "orders-0") is None
    assert store.fence_after("a", 0, "orders-2") is None


def test_a_move_that_is_aborted_before_its_fence_hides_no_earlier_fence(store: MoveStore, moves: Moves) -> None:
    """An aborted move without a fence has an epoch already; messages behind an earlier move's fence stay strays."""
    first = store.place(["a"], in_place(0))["a"]
    one = moves.move("a", 1)
    moves.move("a", 0)
    begun = moves._moves.begin("orders-0", "orders-1", frozenset("a"), 9, 9, "holder")
    aborted = moves._moves.set_aborting(begun.move_id, None)
    assert (aborted.fence_epoch, aborted.epoch > first.epoch) == (0, True)
    assert existing(store.fence_after("a", first.epoch, "orders-0")).move_id == one


def release_earlier(store: MoveStore, interval: str) -> None:
    """Have the name "a" released that much earlier than now."""
    execute(store, f"UPDATE relatum.placements SET released_at = now() - interval '{interval}' WHERE name = 'a'")


def test_what_was_released_long_ago_is_forgotten(store: MoveStore) -> None:
    """A name that was released an hour ago is deleted, and publishers that may have it cached forget everything."""
    placed = store.place(["a", "b", "c"], least)
    since = store.generation()
    store.release([("a", placed["a"].epoch)])
    of_a = store.generation()
    store.release([("b", placed["b"].epoch)])
    release_earlier(store, "61 minutes")
    assert forget_released(store.database.engine, store.super_stream_id) == 1
    assert forget_released(store.database.engine, store.super_stream_id) == 0
    assert in_state(store, PlacementState.RELEASED) == 1
    assert store.changes(since)[1] is None
    assert [each.name for each in store.changes(of_a)[1] or ()] == ["b"]
    assert store.place(["a"], least)["a"].epoch > placed["c"].epoch


def test_the_last_move_of_a_context_at_each_end_is_kept(store: MoveStore, moves: Moves) -> None:
    """Moves are forgotten once retention has dropped both ends, but for the last of a context at each end."""
    store.place(["a", "b"], in_place(0))
    ids = [row.partition_id for row in store.partitions()]
    moved = [moves.move(*each) for each in (("a", 1, 10), ("a", 0, 20), ("a", 1, 30), ("b", 1, 5))]

    def kept(first_offsets: dict[int, int]) -> list[int]:
        forget_moves(store.database.engine, store.super_stream_id, first_offsets)
        return sorted(moves.stored())

    assert kept({ids[0]: 20, ids[1]: 21}) == moved
    assert kept({ids[0]: 21, ids[1]: 20}) == moved
    assert kept({ids[0]: 99}) == moved
    consumer = (
        f"INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES ({store.super_stream_id}, 'billing')"
    )
    columns = "consumer_id, partition_id, source_id, move_id, epoch, marker_offset, cursor, fence_offset"
    hold = f"INSERT INTO relatum.serial_holds ({columns}) VALUES (1, {ids[1]}, {ids[0]}, {moved[0]}, 1, 10, 11, 10)"
    execute(store, consumer, hold)
    assert kept({ids[0]: 21, ids[1]: 21}) == moved
    execute(store, "DELETE FROM relatum.serial_holds")
    assert kept({ids[0]: 21, ids[1]: 21}) == moved[1:]
    assert kept({ids[0]: 31, ids[1]: 31}) == kept({ids[0]: 99, ids[1]: INTEGER_MAX}) == moved[2:]
    assert existing(store.fence_after("a", 1, "orders-0")).move_id == moved[2]
    assert kept({ids[0]: INTEGER_MAX, ids[1]: INTEGER_MAX}) == []


def test_pruning_looks_at_what_the_streams_still_hold(database_url: str, broker: Broker, stream_name: str) -> None:
    """All super streams of a virtual host are pruned; a missing stream counts as dropped only if it is retired."""
    layout = Layout.of(stream_name, [(stream_name, "0"), (f"{stream_name}-gone", "1"), (f"{stream_name}-lost", "2")])
    with stored(database_url, broker.vhost, stream_name) as store:
        assert forget_placements(store.database.engine, broker) == 0
        store.open(HEADER, layout)
        placed = store.place(["a", "b"], in_place(1))
        with SerializationContexts(stream_name, database_url) as contexts:
            moves = Moves(store, contexts)
            move_id = moves.move("b", 2)
            store.release([("a", placed["a"].epoch)])
            release_earlier(store, "2 hours")
            assert forget_placements(store.database.engine, broker) == 1
            assert moves.stored() == [move_id]
            execute(store, f"{RETIRE} WHERE place > 0")
            assert forget_placements(store.database.engine, broker) == 2
            assert moves.stored() == []
