"""A serial consumer in PostgreSQL: its name, its first positions, and its members."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from relatum.contexts._context_options import SerialOptions
from relatum.contexts._partition_log import MovedBefore, consistent_starts
from relatum.contexts._super_stream_rows import FIND_SUPER_STREAM, asking, partitions_in
from relatum.following import Reach
from relatum.store.database import AnyDatabase, Database, sql
from relatum.store.members import Member, Share, Sharing
from relatum.store.settling import Tokens, forget_settlements
from relatum.waiting import Deadline

POOL: Final = 4
"""Connections to keep. More are opened on demand: each transaction of an application holds one."""

DRAINED: Final = 2**63 - 1
"""The position in a deleted stream: after everything."""

PARTITIONS: Final = Sharing(
    "serial_members",
    ("consumer_id", "integer"),
    "serial_positions",
    "partition_id",
    "holder",
    of_rows="consumer_id",
    are=f"position < {DRAINED}",
    # This fences off pending writes of the previous holder.
    taken="version = version + 1",
)
"""Partitions, shared by the members of one consumer name."""

_STREAMS: Final = sql("""
    SELECT s.stream FROM relatum.super_stream_partitions s
    JOIN relatum.serial_consumers c ON c.super_stream_id = s.super_stream_id
    WHERE c.consumer_id = :consumer_id::integer""")

SHARED: Final = sql(f"""
    SELECT p.partition_id, s.stream
    FROM relatum.serial_positions p JOIN relatum.super_stream_partitions s ON s.partition_id = p.partition_id
    WHERE p.consumer_id = :consumer_id::integer AND p.position < {DRAINED}
    ORDER BY p.partition_id""")

_FIND_CONSUMER: Final = sql("""
    SELECT consumer_id FROM relatum.serial_consumers
    WHERE super_stream_id = :super_stream_id::integer AND name = :name::text""")

_ADD_CONSUMER: Final = sql("""
    INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (:super_stream_id::integer, :name::text)
    ON CONFLICT DO NOTHING""")

LOCK_CONSUMER: Final = sql("""
    SELECT 1 FROM relatum.serial_consumers WHERE consumer_id = :consumer_id::integer FOR UPDATE""")

_MOVES: Final = sql("""
    SELECT source_id, target_id, fence_offset, coalesce(marker_offset, target_scan_from)
    FROM relatum.context_moves WHERE super_stream_id = :super_stream_id::integer""")
"""The fields of `MovedBefore`, in order."""

_HAS_POSITIONS: Final = sql("""
    SELECT 1 FROM relatum.serial_positions WHERE consumer_id = :consumer_id::integer LIMIT 1""")

_ADD_POSITION: Final = sql("""
    INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
    VALUES (:consumer_id::integer, :partition_id::integer, :position::bigint)
    ON CONFLICT DO NOTHING""")

ADD_NEW_PARTITIONS: Final = sql("""
    INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
    SELECT c.consumer_id, s.partition_id, 0
    FROM relatum.serial_consumers c
    JOIN relatum.super_stream_partitions s ON s.super_stream_id = c.super_stream_id
    WHERE c.consumer_id = :consumer_id::integer AND NOT EXISTS (
        SELECT FROM relatum.serial_positions p
        WHERE p.consumer_id = c.consumer_id AND p.partition_id = s.partition_id)
    ON CONFLICT DO NOTHING""")


class MemberStore:
    """The rows of one consumer name and one of its members. Blocking, thread-safe."""

    def __init__(
        self,
        super_stream: str,
        name: str,
        database: AnyDatabase,
        *,
        vhost: str,
        lease_s: float = SerialOptions().lease_s,
    ) -> None:
        self.super_stream = super_stream
        self.name = name
        self.vhost = vhost
        self.tokens = Tokens()
        self.ending = Deadline(None)
        """Set when the member ends, which must not wait for an unavailable database."""
        # Replaced after a failed start; the member leaves when it is closed.
        self.database = Database(
            database, refusing=None, ending=self.ending, pool_size=POOL, is_bounded=False, idle_s=lease_s
        )
        # A reserved connection: applications' transactions may hold all others for long.
        self._of_lease = Database(self.database.address, refusing=None, ending=self.ending, pool_size=1, idle_s=lease_s)
        self._member = Member(PARTITIONS, 0, lease_s=lease_s)

    @property
    def renewal_s(self) -> float:
        return self._member.renewal_s

    @property
    def consumer_id(self) -> int:
        return int(self._member.within)

    @property
    def me(self) -> dict[str, Any]:
        """Statement parameters: the consumer and this member."""
        return {"consumer_id": self.consumer_id, "holder": self._member.holder}

    def _mine(self, partition_id: int) -> dict[str, Any]:
        return {**self.me, "partition_id": partition_id}

    def dispose(self) -> None:
        self.database.close()
        self._of_lease.close()

    def find_header(self) -> str | None:
        """Read the header that names the super stream's contexts, or None."""
        row = self._super_stream()
        return None if row is None else str(row.header)

    def _super_stream(self) -> Any:
        named = {"vhost": self.vhost, "name": self.super_stream}
        return next(iter(self.database.rows(FIND_SUPER_STREAM, named)), None)

    def ensure(self, beginnings: Callable[[Sequence[str]], Mapping[str, int]]) -> None:
        """Create missing rows of this consumer; `beginnings` returns the first positions of a new one."""
        super_stream_id = self._super_stream().super_stream_id
        with self.database.transaction() as connection:
            ask = asking(connection, super_stream_id=super_stream_id, name=self.name)
            ask(_ADD_CONSUMER)
            consumer_id = int(ask(_FIND_CONSUMER).scalar_one())
            is_new = ask(_HAS_POSITIONS, consumer_id=consumer_id).first() is None
            partitions = {row.stream: row.partition_id for row in partitions_in(connection, super_stream_id)}
        # Before the moves are read: markers of later moves are then after all these positions.
        ends = beginnings(list(partitions)) if is_new else {}
        with self.database.transaction() as connection:
            ask = asking(connection, super_stream_id=super_stream_id, consumer_id=consumer_id)
            ask(LOCK_CONSUMER)
            if is_new and ask(_HAS_POSITIONS).first() is None:
                starts = {partition_id: ends.get(stream, 0) for stream, partition_id in partitions.items()}
                moves = [MovedBefore(*row) for row in ask(_MOVES)]
                for partition_id, at in consistent_starts(starts, moves).items():
                    ask(_ADD_POSITION, partition_id=partition_id, position=at)
            ask(ADD_NEW_PARTITIONS)
            forget_settlements(connection)
        self._member.within = consumer_id

    def partitions(self) -> frozenset[str]:
        """Read the streams of all partitions, past ones included."""
        return frozenset(row.stream for row in self.database.rows(_STREAMS, self.me))

    def share(self, reach: Reach, *, is_busy: bool) -> tuple[Share, dict[int, str]]:
        """Renew the lease, take free partitions up to this member's share, and return the partitions with streams.

        If the lease had expired, this becomes a new member, and pending writes of the old one are refused. A member
        that is cut off from the broker takes nothing, and others may take its partitions, unless its application has a
        batch in use (`is_busy`).
        """
        # A member that can no longer commit keeps no lease.
        self.database.check_open()
        with self._of_lease.transaction() as connection:
            connection.execute(ADD_NEW_PARTITIONS, self.me)
            rows = connection.execute(SHARED, self.me).all()
            streams = {row.partition_id: row.stream for row in rows}
            if reach.is_cut_off or reach.is_returning:
                share = self._member.hold_on(connection, streams, leased=is_busy or reach.is_returning)
            else:
                share = self._member.beat(connection, streams)
        return share, {partition_id: streams[partition_id] for partition_id in sorted(share.held)}

    def release(self, partition_id: int) -> None:
        with self._of_lease.transaction() as connection:
            self._member.release(connection, [partition_id])

    def leave(self) -> None:
        """Release all partitions to other members at once."""
        with self._of_lease.transaction() as connection:
            self._member.leave(connection)
