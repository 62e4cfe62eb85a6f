"""The threads beside the work: one stores, one watches the clock, one keeps the lease and takes over from the dead."""

import time
from collections.abc import Callable
from typing import Final

from relatum.collecting._shared import Shared, logger
from relatum.store import renewal_s

TAKE_OVER_S: Final = 1.0
"""How often messages of members that died are looked for."""

TAKE_OVER_MESSAGES: Final = 1000
"""Messages taken over in one transaction."""

PARTITIONS_S: Final = 30.0
"""How often super streams are asked for new partitions."""

GATHER_MESSAGES: Final = 500
"""Messages that are stored in one transaction, where workers have bulks in the meantime."""

GATHER_S: Final = 0.02
"""How long they are waited for, at most."""

WAIT_S: Final = 1.0
"""How often a thread that waits for a change looks up; nothing depends on it."""


def store_until_end(shared: Shared) -> None:
    """Store what is gathered, again and again: while one lot is committed, the next one is gathered."""
    while True:
        with shared.changed:
            while not shared.intake.is_anything_gathered:
                if shared.input_ended or shared.abandoned.is_set():
                    return
                shared.changed.wait(WAIT_S)
            _let_gather(shared)
            lots = shared.intake.next()
        for gathered in lots:
            shared.store_gathered(gathered)


def _let_gather(shared: Shared) -> None:
    """Let more come into one transaction while no worker waits for it; the lock is held."""
    until = time.monotonic() + GATHER_S
    while shared.core.has_waiting_bulks and shared.intake.gathered < GATHER_MESSAGES and not shared.stopping.is_set():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        shared.changed.wait(left_s)


def tick_until_end(shared: Shared) -> None:
    """Close bulks when their time has come, and begin retries."""
    with shared.changed:
        while not shared.abandoned.is_set():
            now = time.monotonic()
            if shared.core.tick(now):
                shared.changed.notify_all()
            deadline = shared.core.deadline()
            shared.changed.wait(WAIT_S if deadline is None else max(0.0, min(WAIT_S, deadline - now)))


def keep_until_end(shared: Shared, lease_s: float) -> None:
    """Renew the lease, and take over messages of members whose lease has lapsed."""
    who, renewed_at = shared.who("keeping its lease"), time.monotonic()
    while not shared.abandoned.wait(min(TAKE_OVER_S, renewal_s(lease_s))):
        now = time.monotonic()
        try:
            if now - renewed_at >= renewal_s(lease_s):
                _renew(shared, lease_s)
                renewed_at = now
            if shared.reach is not None:
                shared.reach.look()
            has_asked = not shared.is_cut_off and take_over(shared)
        except Exception as error:  # noqa: BLE001 - it is tried again; the lease lapses where it must
            shared.outages.failed(who, error)
        else:
            if has_asked:
                shared.outages.over(who)


def look_until_end(shared: Shared, look: Callable[[], None]) -> None:
    """Look for new partitions, beside what keeps the lease: a broker that does not answer must not hold that up."""
    who = shared.who("looking for partitions")
    while not shared.stopping.wait(PARTITIONS_S):
        try:
            look()
        except Exception as error:  # noqa: BLE001 - it is tried again
            shared.outages.failed(who, error)
        else:
            shared.outages.over(who)


def _renew(shared: Shared, lease_s: float) -> None:
    if not shared.store.renew(shared.member):
        # Another member took all there was. What is still in memory is found to be another's when it is stored.
        logger.info("collector %r: the lease had run out, joining anew", shared.store.name)
        shared.member = shared.store.open(shared.core.types, lease_s)


def take_over(shared: Shared) -> bool:
    """Take over what members that died have left, as far as there is room; False where nobody was asked."""
    while True:
        with shared.changed:
            room, types = shared.core.room_for_entries(TAKE_OVER_MESSAGES), shared.core.types_with_room()
        if not room or not types:
            return False
        entries = shared.store.take_over(shared.member, types, room)
        if not entries:
            return True
        text = "collector %r: %d messages of members that ended are taken over"
        logger.info(text, shared.store.name, len(entries), extra={"messages": len(entries)})
        with shared.changed:
            shared.core.adopt(entries, time.monotonic())
            shared.changed.notify_all()
