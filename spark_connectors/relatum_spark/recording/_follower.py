"""How far a back-fill in many tasks has come: looked up in the coverage while they run."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import sqlalchemy as sa

from relatum.errors import Transient
from relatum.recording import Plan, unrecorded
from relatum.store import CoverageRow, coverage_of, database_name, translated_errors
from relatum.waiting import Outages

logger = logging.getLogger("relatum.spark")

LOOK_S: Final = 1.0
"""Seconds between two looks; each is one query of few rows."""

_WHO: Final = "looking how far a back-fill is"

STOP_S: Final = 10.0
"""Seconds a look that hangs is waited for at the end."""


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far one stream has come: of `total_offsets` that lacked a key when this round began, so many are covered.

    Offsets that retention took meanwhile are never covered; they begin the stream's next round as done.
    """

    stream: str
    done_offsets: int
    total_offsets: int


ProgressListener = Callable[[FillProgress], None]


class Follower:
    """Tells a listener how far streams have come, from a thread of its own; a context manager.

    Leaving tells the end, and raises what the listener raised.

    Args:
        engine: The database.
        plans: What is being filled.
        listener: Whom to tell; None for nobody, which costs nothing.
    """

    def __init__(self, engine: sa.Engine, plans: Sequence[Plan], listener: ProgressListener | None) -> None:
        self._engine = engine
        self._outages = Outages(logger, database=database_name(engine))
        self._plans = plans
        self._listener = listener
        self._told: dict[str, FillProgress] = {}
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relatum-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._listener is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is None:
            return
        self._stop.set()
        self._thread.join(STOP_S)
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_S):
                self._look()
            self._look()
        except BaseException as error:  # noqa: BLE001 - raised where the back-fill was called
            self._error = error

    def _look(self) -> None:
        assert self._listener is not None, "nobody looks for nobody"
        for seen in self._seen():
            if self._told.get(seen.stream) != seen:
                self._told[seen.stream] = seen
                self._listener(seen)

    def _seen(self) -> list[FillProgress]:
        try:
            with translated_errors(), self._engine.connect() as connection:
                rows = coverage_of(connection, [plan.stream.stream_id for plan in self._plans])
        except Transient as error:
            # The tasks notice it too, and say so.
            self._outages.failed(_WHO, error)
            return []
        self._outages.over(_WHO)
        return [self._of(plan, [row for row in rows if row.stream_id == plan.stream.stream_id]) for plan in self._plans]

    def _of(self, plan: Plan, rows: Sequence[CoverageRow]) -> FillProgress:
        total = left = 0
        for segment in plan.segments:
            within = (segment.from_offset, segment.to_offset)
            total += within[1] - within[0]
            left += sum(gap.to_offset - gap.from_offset for gap in unrecorded(rows, within, segment.key_ids))
        return FillProgress(plan.stream.name, total - left, total)
