"""A router's thread for affinity sets: it stores their use, and closes those that have ended.

Publishers never wait for it.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from relatum.checks import seconds_text
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._publication import POLL_S
from relatum.contexts._router_core import RouterCore
from relatum.contexts._super_stream_rows import IDLE_S_MIN, USED_EVERY_S
from relatum.errors import ContextMoving, RelatumError
from relatum.waiting import Outages, backoff

logger = logging.getLogger("relatum.affinity")

BATCH_S: Final = 0.1
"""Seconds for which ended sets are gathered into one transaction."""

CHECK_S: Final = 0.5
"""Seconds between two checks for unchecked messages: the last ones before a router paused."""

CLOSE_S: Final = 5.0
"""Seconds that closing a router waits for PostgreSQL."""


class SetKeeper:
    """The sets of one router. Thread-safe. `settle` is called in the keeper's thread."""

    def __init__(self, core: RouterCore, settle: Callable[[str], None]) -> None:
        self._core = core
        self._settle = settle
        self._use_at = time.monotonic() + USED_EVERY_S
        self._changed = threading.Condition()
        self._used: set[str] = set()
        self._ending: dict[str, int] = {}
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def used(self, name: str, epoch: int, *, is_last: bool) -> None:
        """Note a confirmed message of a set: the set is in use, or ends with this message."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="relatum affinity sets", daemon=True)
                self._thread.start()
            if not is_last:
                self._used.add(name)
                return
            self._ending[name] = epoch
            self._used.discard(name)
            if len(self._ending) == 1:
                self._changed.notify_all()

    def is_ending(self, name: str) -> bool:
        """Whether this router ended a set that is not closed yet."""
        return name in self._ending

    def end_now(self, name: str) -> None:
        """Close a set that this router ended, so that the next message with its name opens a new set. May block.

        All its messages must be settled.
        """
        epoch = self._ending.get(name)
        if epoch is None:
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
        self._ended(name, epoch)

    def _ended(self, name: str, epoch: int) -> None:
        self._core.publications.cache.forget([name])
        with self._changed:
            if self._ending.get(name) == epoch:
                del self._ending[name]

    def close(self) -> None:
        """Close the sets that have ended, and end the thread; wait some seconds for PostgreSQL."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._stop.set()
        if self._ending:
            logger.warning(
                "%d affinity sets of %r that ended are still open: `relatum affinity close` closes them",
                len(self._ending),
                self._core.super_stream,
            )

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        core, pauses = self._core, backoff()
        who = f"closing affinity sets of {core.super_stream!r}"
        outages = Outages(logger, broker=str(core.control_streams.address), database=core.store.database.address.name)
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._closing.is_set(), CHECK_S)
                is_last = self._closing.is_set()
            self._closing.wait(BATCH_S)
            try:
                is_done = self._keep(is_last=is_last)
            except Exception as error:  # noqa: BLE001 it is logged, and the thread continues
                if self._stop.is_set():
                    return  # the connections are closed
                is_done = False
                outages.failed(who, error)
            else:
                outages.over(who)
            if is_last and is_done:
                return
            if is_done:
                pauses = backoff()
            else:
                self._stop.wait(next(pauses))

    def _keep(self, *, is_last: bool) -> bool:
        """Do what is due; return whether all of it is done."""
        with self._changed:
            ending = dict(self._ending)
        self._check()
        is_done = self._end(ending)
        if is_last or time.monotonic() >= self._use_at:
            self._use()
            self._use_at = time.monotonic() + USED_EVERY_S
        return is_done

    def _check(self) -> None:
        """Make earlier messages valid: a set that has ended is not checked again."""
        unchecked = self._core.publications.unchecked
        if not len(unchecked):
            return
        mark = unchecked.mark()
        self._core.publications.look()
        for name in unchecked.names():
            # A few: their placement changed by a move, or another process closed the set.
            if unchecked.of(name, mark):
                self._settle(name)

    def _end(self, ending: dict[str, int]) -> bool:
        """Close the ended sets; return whether all are closed."""
        if not ending:
            return True
        moving = self._core.store.release(ending.items())
        for name, epoch in ending.items():
            if name not in moving:
                self._ended(name, epoch)
        return not moving

    def _use(self) -> None:
        """Store the use of sets, and close idle ones."""
        with self._changed:
            used, self._used = self._used, set()
        try:
            if used:
                self._core.store.touch(used)
            # The stored value may have changed.
            idle_s = self._core.store.idle_s()
            if idle_s is not None:
                # A stored `idle_s` may be shorter than the minimum, and other routers may store their latest use later.
                close_idle(self._core.store, max(idle_s, IDLE_S_MIN) + USED_EVERY_S)
        except RelatumError:
            with self._changed:
                self._used |= used
            raise


def close_idle(store: PlacementStore, idle_s: float) -> int:
    """Close the sets without use for so many seconds, and return their number. Moving sets stay open."""
    closed = 0
    while idle := store.idle(idle_s):
        waiting = store.release([(each.name, each.epoch) for each in idle])
        closed += len(idle) - len(waiting)
        if waiting:
            break
    return closed
