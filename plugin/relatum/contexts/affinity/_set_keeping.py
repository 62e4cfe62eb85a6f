"""What the routers of both faces know of affinity sets beside their placements: ends, use, and predecessors."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from relatum.checks import seconds_text
from relatum.contexts.affinity._affinity_headers import Wish
from relatum.contexts.affinity._predecessors import Found, Recent, find_predecessor, place_in, read_predecessor
from relatum.contexts.affinity._set_upkeep import Upkeep
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import RouterCore
from relatum.contexts.placement._publication import POLL_S, Published
from relatum.errors import ContextMoving


class Place(NamedTuple):
    """Where a message is to go.

    Attributes:
        name: Its affinity set; None for none.
        stream: The partition of its predecessor; None where it has none.
        is_last: Whether its set ends with it.
    """

    name: str | None
    stream: str | None = None
    is_last: bool = False


class Keeping:
    """The sets of one router. Threads may share it."""

    def __init__(self, core: RouterCore, settle: Callable[[str], None], *, predecessors_max: int) -> None:
        self._core = core
        self._settle = settle
        self._recent = Recent(predecessors_max)
        self._lock = threading.Lock()
        self._upkeep: Upkeep | None = None

    def place_of(self, wish: Wish) -> Place:
        """Where a message that names a set or a predecessor is to go. It may read the stream and the table.

        Raises:
            PredecessorNotFound: its predecessor is not known; nothing was sent.
            DatabaseUnavailable, BrokerUnavailable: it could not be looked for; nothing was sent.
        """
        if wish.predecessor is None:
            return Place(wish.name, None, wish.is_last)
        found = self._recent.get(wish.predecessor) or self._find(wish.predecessor)
        return Place(found.name, found.stream, wish.is_last)

    def knows(self, wish: Wish) -> bool:
        """Whether `place_of` reads nothing."""
        return wish.predecessor is None or self._recent.get(wish.predecessor) is not None

    def _find(self, predecessor: str) -> Found:
        core = self._core
        partitions = [row.stream for row in core.store.partitions()]
        header = core.options.header
        at = place_in(predecessor, partitions)
        if at is not None:
            return read_predecessor(predecessor, at, header, core.reader)
        return find_predecessor(
            predecessor, partitions, header, engine=core.store.database.engine, vhost=core.vhost, reader=core.reader
        )

    def is_ending(self, name: str) -> bool:
        """Whether a set has ended here, and is not closed yet."""
        return self._upkeep is not None and self._upkeep.epoch_ending(name) is not None

    def end_now(self, name: str) -> None:
        """Close a set that has ended here, so that the next message of its name begins another. It may block.

        All that was sent of it must be settled.

        Raises:
            ContextMoving: a move keeps it open; nothing was sent.
            DatabaseUnavailable: it cannot be closed; nothing was sent.
        """
        upkeep = self._upkeep
        epoch = None if upkeep is None else upkeep.epoch_ending(name)
        if upkeep is None or epoch is None:
            return
        store, timeout_s = self._core.store, self._core.options.timeout_s
        deadline = time.monotonic() + timeout_s
        while name in store.release([(name, epoch)]):
            if time.monotonic() >= deadline:
                placement = store.find([name]).get(name)
                raise ContextMoving(
                    f"the affinity set {name!r} has ended, and is still being moved after {seconds_text(timeout_s)}; "
                    "nothing was sent",
                    context=name,
                    move_id=0 if placement is None else placement.move_id,
                )
            time.sleep(POLL_S)
        upkeep.ended(name, epoch)

    def published(self, published: Published, *, is_last: bool, message_id: str | None) -> None:
        """Note that the broker has a message of a set."""
        placement = published.placement
        if message_id:
            self._recent.add(message_id, Found(placement.name, placement.stream))
        upkeep = self._upkeep or self._begin()
        if is_last:
            upkeep.end(placement.name, placement.epoch)
        else:
            upkeep.used(placement.name)

    def published_plain(self, partition: PartitionRow, message_id: str | None) -> None:
        """Note that the client has taken a message of no set."""
        if message_id:
            self._recent.add(message_id, Found(None, partition.stream))

    def close(self) -> None:
        """Close the sets that have ended. Waits some seconds for PostgreSQL where that is away."""
        with self._lock:
            upkeep = self._upkeep
        if upkeep is not None:
            upkeep.close()

    def _begin(self) -> Upkeep:
        with self._lock:
            if self._upkeep is None:
                self._upkeep = Upkeep(self._core, self._settle)
            return self._upkeep
