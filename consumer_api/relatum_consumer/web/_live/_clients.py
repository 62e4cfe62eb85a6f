"""Who looks, and what waits for each, bounded."""

import json
from collections import deque
from dataclasses import dataclass
from typing import Final

from relatum.waiting import Bell
from relatum_consumer.web._live._filter import Filter

QUEUE_MAX: Final = 25
"""Events that wait for a client: five seconds' worth. What falls out is counted."""


@dataclass(frozen=True, slots=True)
class Frame:
    """An event as bytes, of which all clients of a filter have the same; how many messages it tells of, and shows."""

    content: bytes
    told: int
    shown: int


class Client:
    """One who looks.

    Args:
        by: What it wants to see.
        who: Whose connection it is, for limits.

    Attributes:
        shown: How many messages it was sent.
        end: Why it is to end; empty while it is not.
    """

    def __init__(self, by: Filter, who: str) -> None:
        self.by = by
        self.who = who
        self.shown = 0
        self.end = ""
        self._frames: deque[Frame] = deque()
        self._lost = 0
        self._bell = Bell()
        self._said = ("", "")
        self.say("connecting", "")

    def put(self, frame: Frame) -> None:
        """Let it have an event; the oldest is lost where too many wait."""
        if len(self._frames) >= QUEUE_MAX:
            self._lost += self._frames.popleft().told
        self._frames.append(frame)
        self._bell.ring(1)

    def say(self, state: str, words: str) -> None:
        """Tell it how it stands, where that is another than before; of several the last."""
        if (state, words) == self._said:
            return
        self._said, self._has_news = (state, words), True
        self._state = event("state", json.dumps({"state": state, "words": words}))
        self._bell.ring(1)

    def stop(self, why: str) -> None:
        """Let it go."""
        self.end = why
        self._bell.ring(1)

    async def take(self, wait_s: float) -> bytes:
        """What is to be sent next, after so many seconds at most: the state, where there is nothing else."""
        if not (self._frames or self._has_news or self.end):
            await self._bell.wait(wait_s)
        parts = [event("lost", f'{{"count":{self._lost}}}')] if self._lost else []
        frames, self._frames = self._frames, deque()
        parts += [frame.content for frame in frames]
        self.shown += sum(frame.shown for frame in frames)
        if self._has_news or not parts:
            parts.append(self._state)
        self._lost, self._has_news = 0, False
        return b"".join(parts)


def event(name: str, data: str, number: str = "") -> bytes:
    """An event of a stream of them; `data` is JSON, which has no line's end."""
    numbered = f"id: {number}\n" if number else ""
    return f"event: {name}\n{numbered}data: {data}\n\n".encode("utf-8", "replace")
