"""The plans of placements, predecessors, moves and consumers at 300,000 rows: an index for each, whatever is known."""

from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from relatum.contexts import _move_store as moving
from relatum.contexts import _placement_prune as prune
from relatum.contexts import _placement_store as store
from relatum.contexts import _serial_status as status
from relatum.contexts import _serial_store as consuming
from relatum.contexts import _super_stream_rows as opening
from relatum.contexts._router_sets import RECORDED
from tests.support.plans import EACH_MODE, MAKE_PARTS, PARTS, changed_in_place, nodes_of, pages_in, plan_of_statement

NAMES = 150_000
MOVES = 30_000
CONSUMERS = 200
OURS = {"super_stream_id": 1}
NOW = NAMES + 1_000_000

FILL = f"""
{MAKE_PARTS}
INSERT INTO relatum.super_streams (name, header, generation) VALUES ('orders', 'h', {NOW}), ('other', 'h', {NOW});
INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place, open_sets)
  SELECT 1 + n % 2, 's' || n, n::text, n / 2, 0 FROM generate_series(0, 199) AS n;
INSERT INTO relatum.placements (super_stream_id, name, partition_id, epoch, first_epoch, generation, used_at)
  SELECT 1 + n % 2, 'n' || n, 1 + n % 200, n, n, n, now() - make_interval(secs => n)
  FROM generate_series(1, {NAMES}) AS n;
INSERT INTO relatum.placements
    (super_stream_id, name, partition_id, epoch, first_epoch, generation, state, released_at)
  SELECT 1 + n % 2, 'r' || n, 1 + n % 200, n, n, n, 'released', now() - make_interval(secs => n / 10.0)
  FROM generate_series(1, {NAMES}) AS n;
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, state, contexts, fence_epoch, epoch,
    scan_from, target_scan_from, fence_offset, marker_offset, ended_at, generation)
  SELECT 1 + n % 2, 1 + n % 200, 1 + (n + 2) % 200, 'switched', 5, n, n, n, n, n, n, now(), 0
  FROM generate_series(1, {MOVES}) AS n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT m, 'n' || (m * 7 + n * 30000) % {NAMES}, 0 FROM generate_series(1, {MOVES}) AS m, generate_series(0, 4) AS n;
SELECT setval('relatum.placement_epochs', {NOW});
INSERT INTO relatum.serial_consumers (super_stream_id, name)
  SELECT 1 + n % 2, 'c' || n FROM generate_series(1, {CONSUMERS}) AS n;
INSERT INTO relatum.serial_members (consumer_id, holder, lease_expires_at)
  SELECT c, 'm' || m, now() + interval '1 hour' FROM generate_series(1, {CONSUMERS}) c, generate_series(1, 20) m;
INSERT INTO relatum.serial_positions (consumer_id, partition_id, position, holder)
  SELECT c, p, {MOVES}, 'm' || p % 20 + 1 FROM generate_series(1, {CONSUMERS}) AS c, generate_series(1, 200) AS p;
INSERT INTO relatum.serial_holds (consumer_id, partition_id, source_id, move_id, epoch, marker_offset, cursor,
    fence_offset)
  SELECT 1 + n % 10, 1 + (n + 2) % 200, 1 + n % 200, n, n, n, n, n FROM generate_series(1, {MOVES}, 7) AS n
  UNION ALL SELECT c, 1 + (n + 2) % 200, 1 + n % 200, n, n, n, n, n
  FROM generate_series(11, {CONSUMERS}) AS c, generate_series(1, 40) AS n;
UPDATE relatum.context_moves SET state = 'fencing', ended_at = NULL, fence_offset = NULL, marker_offset = NULL
  WHERE move_id BETWEEN {MOVES} - 19 AND {MOVES};
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
    target_scan_from, generation)
  SELECT 1, 2, 4, 500, {MOVES} + n, {MOVES} + n, 0, 0, 0 FROM generate_series(1, 3) AS n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT {MOVES} + m, 'n' || (1000 * m + 2 * n), 0 FROM generate_series(1, 3) AS m, generate_series(1, 500) AS n;
UPDATE relatum.placements SET state = 'moving', move_id = {MOVES} + 1
  WHERE super_stream_id = 1 AND name = ANY (SELECT name FROM relatum.moved_contexts WHERE move_id = {MOVES} + 1);
INSERT INTO relatum.streams (stream_id, name, super_stream) OVERRIDING SYSTEM VALUE
  SELECT n, 'orders-' || n, 'orders' FROM generate_series(1, 50) AS n;
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n / 50, n * 1000::bigint, 1 + n % 50, 1 + n % 2, 'm' || n, n * {PARTS} / 300000
  FROM generate_series(0, 299999) AS n;
"""
"""300,000 placements in two super streams of a hundred partitions; each name moved once or twice, half are over.

Ten consumers wait for every seventh move, 190 of twenty members for forty; three moves of 500 contexts are under way.
The rows of 300,000 messages are of fifty partitions and two keys, an id for each.
"""

STATEMENTS: dict[str, tuple[sa.Executable, dict[str, Any]]] = {
    "super stream": (opening.FIND_SUPER_STREAM, {"vhost": "/", "name": "orders"}),
    "generation": (opening.GENERATION, OURS),
    "partitions": (opening.PARTITIONS, OURS),
    "find": (store.FIND, OURS | {"names": [f"n{2 * n}" for n in range(50)]}),
    "changes, none": (store.CHANGES, OURS | {"since": NAMES, "most": 10_001}),
    "changes, a few": (store.CHANGES, OURS | {"since": NAMES - 20, "most": 10_001}),
    "changes, too many": (store.CHANGES, OURS | {"since": 0, "most": 501}),
    "idle": (store.IDLE, OURS | {"idle_s": 1000.0, "most": 100}),
    "list": (store.LISTED[False], OURS | {"most": 50, "first": ""}),
    "list on": (store.LISTED[False], OURS | {"most": 50, "first": "n5"}),
    "place": (store.PLACE, OURS | {"names": ["n2", "r4", "x"], "partition_ids": [1, 3, 5]}),
    "place, bounded": (store.PLACE_BOUNDED, OURS | {"names": ["n2", "r4", "x"], "partition_ids": [1, 3, 5]}),
    "release": (store.RELEASE, OURS | {"names": ["n2", "n4", "r6"], "epochs": [2, 4, 6]}),
    "touch": (store.TOUCH, OURS | {"names": ["n2", "n4", "r6"]}),
    "fence after": (moving.FENCE_AFTER, OURS | {"name": "n14", "stream": "s2", "above": 0}),
    "forget released": (prune.FORGET_RELEASED, OURS | {"older_s": 100.0, "most": 100}),
}

MOVED = [f"n{2 * number}" for number in range(500)]
MOVE = {"move_id": MOVES + 1}

OF_MOVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (moving.ONE, OURS | MOVE),
    "under way": (moving.UNDER_WAY, OURS),
    "latest": (moving.LATEST, OURS | {"latest": 20}),
    "lock named": (moving.LOCK_NAMED, OURS | {"names": MOVED}),
    "add contexts": (moving.ADD_CONTEXTS, OURS | {"move_id": 1, "names": ["n100000", "n100002"]}),
    "stop": (moving.STOP, OURS | MOVE | {"names": MOVED, "generation": 5}),
    "set fenced": (moving.SET_FENCED, MOVE | {"attempt": 1, "fence_offset": 5}),
    "set aborting": (moving.SET_ABORTING, OURS | MOVE | {"reason": None}),
    "lock moving": (moving.LOCK_MOVING, OURS | MOVE),
    "go on": (moving.GO_ON, OURS | MOVE | {"names": MOVED, "partition_id": 4, "epoch": 5, "generation": 5}),
    "attend": (moving.ATTEND, MOVE | {"holder": "me", "lease_s": 5.0}),
    "take abandoned": (moving.TAKE_ABANDONED, OURS | {"holder": "me", "lease_s": 5.0}),
    "placed in": (opening.PLACED_IN, {"partition_id": 2}),
    "moves of": (opening.MOVES_OF, OURS | {"partition_id": 2}),
}

OF_PRUNING: dict[str, tuple[Any, dict[str, Any]]] = {
    "ended moves": (prune.ENDED_MOVES, OURS | {"after": 7_000, "most": 50}),
    "forget contexts": (
        prune.FORGET_CONTEXTS,
        {"moves": list(range(7_000, 7_050)), "partition_ids": list(range(1, 201)), "firsts": [MOVES] * 200},
    ),
    "forget moves": (prune.FORGET_MOVES, {"moves": list(range(7_000, 7_050))}),
}

ME = {"consumer_id": 17, "partition_id": 9, "holder": "m10"}
MEMBER, KEYS = {"within": 17, "holder": "m10"}, list(range(1, 101))
TOKEN = {"token": UUID(int=7), "tokens_before": [UUID(int=6)]}
LAST = {"last_offset": 4, "last_fingerprint": 1, "last_chunk_ms": 2}
RANGE = {**ME, "from_offset": 100, "to_offset": 1000}

OF_CONSUMERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "advance": (consuming.ADVANCE, {**ME, "version": 0, "position": 5, **LAST, **TOKEN}),
    "advance unread": (consuming.ADVANCE, {**ME, "version": 0, "position": 5, **dict.fromkeys(LAST), **TOKEN}),
    "begin": (consuming.BEGIN, ME),
    "renew": (consuming.PARTITIONS.renew, {**MEMBER, "lease_s": 4.0}),
    "alive": (consuming.PARTITIONS.alive, MEMBER),
    "bury": (consuming.PARTITIONS.bury, MEMBER),
    "shared": (consuming.SHARED, ME),
    "look": (consuming.PARTITIONS.look, {**MEMBER, "keys": KEYS}),
    "take": (consuming.PARTITIONS.take, {**MEMBER, "keys": KEYS, "holders": ["m10"] * len(KEYS), "at_most": 3}),
    "release": (consuming.PARTITIONS.release, {**MEMBER, "keys": KEYS}),
    "leave": (consuming.PARTITIONS.leave, MEMBER),
    "members up": (status.MEMBERS_UP, ME),
    "holds": (consuming.HOLDS_OF, ME),
    "scans": (moving.SCANS, ME),
    "floors": (moving.FLOORS, {**ME, "offset": 1000}),
    "lost controls": (moving.LOST_CONTROLS, RANGE),
    "begin a hold": (
        consuming.BEGIN_HOLD,
        {**ME, "move_id": 77, "source": "s3", "epoch": 9, "marker_offset": 1, "cursor": 2, "fence_offset": 3},
    ),
    "move a hold": (consuming.MOVE_HOLD, {**ME, "move_id": 6, "cursor": 9, "held": 4}),
    "end a hold": (consuming.END_HOLD, {**ME, "move_id": 6}),
    "complete holds": (consuming.COMPLETE_HOLDS, {**ME, "partition_ids": [3, 4, 5, 6, 7]}),
    "status": (status.POSITIONS_SHOWN, ME),
    "holds shown": (consuming.HOLDS_SHOWN, ME),
}

SMALL = {"super_streams", "super_stream_partitions"}
"""Tables that may be scanned: one row a super stream, one a partition, and one a router that publishes."""


OF_NAMES = {"serial_consumers", "settlements"}
"""One row a consumer's name, and none here."""

OF_EACH_PARTITION = {"serial_consumers", "serial_positions", "serial_members"}
"""Tables that consumers may scan: they have a row for each partition, at most."""

CASES = [
    *((f"placements: {name}", *each, SMALL, 1_000, 1_000) for name, each in STATEMENTS.items()),
    *((f"moves: {name}", *each, SMALL, 2_000, None) for name, each in OF_MOVES.items()),
    *((f"consumers: {name}", *each, SMALL | OF_NAMES, 2_000, None) for name, each in OF_CONSUMERS.items()),
    *((f"pruning: {name}", *each, SMALL | OF_EACH_PARTITION, None, 3_000) for name, each in OF_PRUNING.items()),
]


@EACH_MODE
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], case: tuple[Any, ...], mode: str) -> None:
    """No big table is scanned, and few rows and pages are read, whether values are known or not."""
    name, statement, wanted, may_be_scanned, most_rows, most_pages = case
    plan = plan_of_statement(filled, mode, statement, wanted)
    scanned = {node["Relation Name"] for node in nodes_of(plan) if node["Node Type"] == "Seq Scan"}
    assert scanned <= may_be_scanned, plan
    rows = max(node["Actual Rows"] * node["Actual Loops"] for node in nodes_of(plan))
    pages = pages_in(plan)
    factor = 5 if "too many" in name else 1
    assert most_rows is None or rows < most_rows * factor, plan
    assert most_pages is None or pages < most_pages * factor, plan


def test_moving_a_position_moves_nothing_in_an_index(filled: psycopg.Connection[Any]) -> None:
    """Each batch writes one row, which stays on its page where there is room."""
    with filled.transaction(force_rollback=True):
        assert changed_in_place(filled, "serial_positions", *OF_CONSUMERS["advance"]) == 1


@EACH_MODE
def test_predecessor_is_found_by_the_index(filled: psycopg.Connection[Any], mode: str) -> None:
    """A predecessor is found through the index of values in few pages, without a row of another id."""
    parameters = {"key_id": 1, "value": "m7774", "partitions": ["orders-1", "orders-25", "orders-50"], "vhost": "/"}
    plan = plan_of_statement(filled, mode, RECORDED, parameters)
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Index Name"] for node in reads} == {"relationships_lookup"}, plan
    assert plan["Actual Rows"] == 1, plan
    assert pages_in(plan) < 5 * PARTS, plan
