"""The tasks beside the work: one stores, one watches the clock, one keeps the lease and takes over from the dead."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._collector_state import logger
from relatum.collecting._keeping import PARTITIONS_S, TAKE_OVER_MESSAGES, TAKE_OVER_S, WAIT_S
from relatum.store import renewal_s


async def store_until_end(shared: AsyncShared) -> None:
    """Store what is gathered, again and again: while one lot is committed, the next one is gathered."""
    while True:
        while not shared.intake.is_anything_gathered:
            await shared.changed.wait(WAIT_S)
        for gathered in shared.intake.next():
            await shared.store_gathered(gathered)


async def tick_until_end(shared: AsyncShared) -> None:
    """Close bulks when their time has come, and begin retries."""
    while True:
        now = time.monotonic()
        if shared.core.tick(now):
            shared.changed.notify()
        deadline = shared.core.deadline()
        await shared.changed.wait(WAIT_S if deadline is None else max(0.0, min(WAIT_S, deadline - now)))


async def look_until_end(shared: AsyncShared, look: Callable[[], Awaitable[None]]) -> None:
    """Look for new partitions, beside what keeps the lease: a broker that does not answer must not hold that up."""
    who = shared.who("looking for partitions")
    while True:
        await asyncio.sleep(PARTITIONS_S)
        try:
            await look()
        except Exception as error:  # noqa: BLE001 - it is tried again
            shared.outages.failed(who, error)
        else:
            shared.outages.over(who)


async def keep_until_end(shared: AsyncShared, lease_s: float) -> None:
    """Renew the lease, and take over messages of members whose lease has lapsed.

    Args:
        shared: What the collector's tasks share.
        lease_s: Seconds the lease holds.
    """
    who, renewed_at = shared.who("keeping its lease"), time.monotonic()
    while True:
        await asyncio.sleep(min(TAKE_OVER_S, renewal_s(lease_s)))
        now = time.monotonic()
        try:
            if now - renewed_at >= renewal_s(lease_s):
                await _renew(shared, lease_s)
                renewed_at = now
            has_asked = await take_over(shared)
        except Exception as error:  # noqa: BLE001 - it is tried again; the lease lapses where it must
            shared.outages.failed(who, error)
        else:
            if has_asked:
                shared.outages.over(who)


async def _renew(shared: AsyncShared, lease_s: float) -> None:
    if not await shared.in_thread(partial(shared.store.renew, shared.member)):
        # Another member took all there was. What is still in memory is found to be another's when it is stored.
        logger.info("collector %r: the lease had run out, joining anew", shared.store.name)
        shared.member = await shared.in_thread(partial(shared.store.open, shared.core.types, lease_s))


async def take_over(shared: AsyncShared) -> bool:
    """Take over what members that died have left, as far as there is room; False where nobody was asked."""
    while True:
        room, types = shared.core.room_for_entries(TAKE_OVER_MESSAGES), shared.core.types_with_room()
        if not room or not types:
            return False
        entries = await shared.in_thread(partial(shared.store.take_over, shared.member, types, room))
        if not entries:
            return True
        text = "collector %r: %d messages of members that ended are taken over"
        logger.info(text, shared.store.name, len(entries), extra={"messages": len(entries)})
        shared.core.adopt(entries, time.monotonic())
        shared.changed.notify()
