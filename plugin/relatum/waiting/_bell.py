"""What a task waits for that a call-back tells, for a time: without a timer for each wait."""

import asyncio
import math
from typing import Final

SILENT: Final = 0
"""What a wait gives where the time was over."""


class Bell:
    """Wakes the one task that waits for it.

    Timers are most of what short waits cost. So one serves many waits: as it goes off it looks whether the wait of that
    moment is over, and is set anew if not. One that waits no more leaves it to go off for nothing.
    """

    __slots__ = ("_at", "_came", "_loop", "_timer", "_until")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._came: asyncio.Future[int] | None = None
        self._at = self._until = math.inf

    def ring(self, what: int) -> None:
        """Wake who waits; nothing where nobody does."""
        came = self._came
        if came is not None and not came.done():
            came.set_result(what)

    async def wait(self, seconds: float) -> int:
        """What it is rung with first from now on; `SILENT` after so many seconds."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # A timer of another loop may never go off.
            self._loop, self._timer = loop, None
        until = self._until = loop.time() + seconds
        if self._timer is None or until < self._at:
            self._set(loop, until)
        came: asyncio.Future[int] = loop.create_future()
        self._came = came
        try:
            return await came
        finally:
            self._came = None

    def _set(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at, self._timer = until, loop.call_at(until, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._came is None:
            return
        if self._until <= self._at:
            self.ring(SILENT)
        else:
            self._set(loop, self._until)
