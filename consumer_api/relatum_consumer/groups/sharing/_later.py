"""Groups whose dead letters are not taken now: kept by their member until they are, while others are given."""

import time
from dataclasses import dataclass
from typing import Final

from relatum.waiting import Pauses
from relatum_consumer.groups.sharing._claim_outcomes import GivenUp

MESSAGES_MAX: Final = 10_000
"""Messages held for later; with more of them, who gives groups waits for the dead letters."""

PAUSE_S: Final = 1.0
"""Seconds until dead letters are tried again, at least; the longer they are not taken, the more."""


@dataclass(frozen=True, slots=True)
class _Kept:
    outcome: GivenUp
    due_at: float


class Later:
    """What is to be given up again at a later time. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._pauses: dict[str, Pauses] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    @property
    def is_full(self) -> bool:
        """Whether as many messages are held as may."""
        return sum(len(kept.outcome.messages) for kept in self._kept) >= MESSAGES_MAX

    def keep(self, outcome: GivenUp, error: BaseException) -> float:
        """Keep a group whose dead letters were not taken; gives the seconds until it is its turn again."""
        pause_s = PAUSE_S + self._pauses.setdefault(outcome.claim.group_id, Pauses()).after(error)
        self._kept.append(_Kept(outcome, time.monotonic() + pause_s))
        return pause_s

    def due(self) -> list[GivenUp]:
        """Those whose time has come; they are not kept any more."""
        now = time.monotonic()
        due = [kept.outcome for kept in self._kept if kept.due_at <= now]
        self._kept = [kept for kept in self._kept if kept.due_at > now]
        return due

    def end(self, group_id: str) -> None:
        """A group was given up in the end."""
        self._pauses.pop(group_id, None)
