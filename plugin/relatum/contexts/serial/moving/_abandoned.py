"""Going on with moves whose mover is gone: whoever is there and meets one does it, one of them at a time.

Nobody looks for such moves by itself. A router that waits for a move, a consumer's member as it renews its lease and a
mover before it begins are told by what they read anyway. Then one statement takes the move: the first of them has it,
the others find it attended. Two who perform it side by side would do no harm, so nothing rests on that.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from relatum.contexts.serial.moving import _move_steps as moving
from relatum.contexts.serial.moving._controls import ControlStreams
from relatum.contexts.serial.moving._move_store import MoveStore, logger
from relatum.contexts.serial.moving._mover import Mover
from relatum.errors import Conflict, NotFound
from relatum.processes import new_holder
from relatum.reading import BrokerAddress
from relatum.waiting import QUESTION_S, Outages, Server, backoff, log_failure

if TYPE_CHECKING:
    from relatum.contexts.placement._placement_core import RouterCore

LOOK_S: Final = 1.5
"""Seconds between two looks of a process whether a move is abandoned, while it waits for one; half of it by chance."""

RETRY_S: Final = 10.0
"""Seconds for which a step of such a move is tried again; then it is left to another, or to a later look."""

CLOSE_S: Final = 2.0
"""Seconds a process that ends waits for a move it goes on with; another goes on with that then."""


_WHO: Final = "going on with abandoned moves"

OpenStreams: TypeAlias = Callable[[], AbstractContextManager[ControlStreams]]


class Where(NamedTuple):
    """What it takes to go on with the moves of a super stream."""

    moves: MoveStore
    address: BrokerAddress


class Abandoned:
    """Goes on, in a thread, with the moves of one super stream that nobody attends. Threads may share it."""

    def __init__(self, where: Callable[[], Where]) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._next_look = 0.0
        self._outages = Outages(logger)
        self._pauses = backoff(QUESTION_S)

    def look(self) -> None:
        """Look soon whether a move is abandoned, and go on with it. Returns at once; called as often as one likes."""
        now = time.monotonic()
        if now < self._next_look or self._stop.is_set():
            return
        with self._lock:
            if now < self._next_look or (self._thread is not None and self._thread.is_alive()):
                return
            self._next_look = now + LOOK_S * (0.5 + random.random() / 2)  # noqa: S311 - spreads looks
            self._thread = threading.Thread(target=self._run, name="relatum abandoned moves", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Begin with no further move, and wait for a moment for the one under way."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_S)

    def _run(self) -> None:
        # Of many that wait for the same move, most find it attended.
        self._stop.wait(random.random() * LOOK_S / 3)  # noqa: S311 - spreads looks
        if self._stop.is_set():
            return
        try:
            where = self._where()
            # Shared with those who move: a server that is away is one line for all.
            self._outages = where.moves.outages
            self._outages.name(Server.BROKER, str(where.address))
            if go_on_with_abandoned(where.moves, lambda: ControlStreams(where.address), stop=self._stop):
                self._pauses = backoff(QUESTION_S)
            self._outages.over(_WHO)
        except Exception as error:  # noqa: BLE001 - it is logged; others, or a later look, go on with it
            # Whoever may not, or cannot, leaves it to others for longer each time.
            self._next_look = time.monotonic() + LOOK_S + next(self._pauses) * 10
            if not self._stop.is_set():
                self._outages.failed(_WHO, error)


def go_on_with_abandoned(
    moves: MoveStore,
    open_streams: OpenStreams,
    *,
    stop: threading.Event | None = None,
) -> int:
    """Go on with all moves that nobody attends, one after the other; gives their number.

    Args:
        moves: The moves of the super stream.
        open_streams: Opens the partitions, where there is such a move.
        stop: Set: begin with no further one.

    Raises:
        RelatumError: what stopped one; it stands as it was.
    """
    done = 0
    while stop is None or not stop.is_set():
        holder = new_holder()
        move_id = moves.take_abandoned(holder)
        if move_id is None:
            break
        logger.warning("move %d is gone on with: its mover is gone", move_id, extra={"move_id": move_id})
        try:
            with open_streams() as streams:
                Mover(moves, streams, retry_s=RETRY_S, holder=holder).run(moving.go_on(move_id))
        except (Conflict, NotFound) as error:
            # Another has ended it, or taken it back, meanwhile.
            log_failure(logger, error, f"move {move_id} is another's", level=logging.INFO)
        done += 1
    return done


def attend_for(core: "RouterCore") -> None:
    """Have a router go on with abandoned moves that its messages wait for."""

    def where() -> Where:
        store = core.store
        return Where(MoveStore(store.database, store.super_stream_id, core.super_stream), core.address)

    abandoned = Abandoned(where)
    core.when_waiting(abandoned.look, abandoned.close)
