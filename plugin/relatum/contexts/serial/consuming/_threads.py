"""What the asyncio face does in threads, and undoes where nobody waits for it any more."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], *, undo: Callable[[], Any]) -> T:
    """Call a function in a thread; gives what it returned.

    Args:
        call: The function.
        undo: Called in a thread where the task was cancelled meanwhile, once the function has returned after all.
    """
    calling = asyncio.create_task(asyncio.to_thread(call))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        # Shielded: a task that is cancelled once more leaves, and what was begun is undone all the same.
        await asyncio.shield(asyncio.create_task(_undone(calling, undo)))
        raise


async def _undone(calling: "asyncio.Task[Any]", undo: Callable[[], Any]) -> None:
    # A function that raised has left nothing behind; the error of a call that was cancelled is nobody's.
    with suppress(Exception):
        await calling
        await asyncio.to_thread(undo)
