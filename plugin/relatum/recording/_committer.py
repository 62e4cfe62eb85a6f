"""The one thread of a process that commits: what all its streams have ready goes into one transaction."""

import threading
import time
from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict, DatabaseUnavailable
from relatum.otel import Span
from relatum.recording._commit import Share, commit_shares, recording
from relatum.recording._statistics import RecorderMetrics
from relatum.recording._writer import Writer

HELD_UP_S: Final = 0.05
"""Seconds after which a stream whose range somebody else had locked is tried again."""


class Committer:
    """Commits what writers have, in the order in which they had it.

    Whatever is ready when the transaction before has ended goes into the next one: with one stream that is a lone
    message or a batch, with a thousand streams some hundred small batches, which the follower gathers. What PostgreSQL
    refuses is committed once more, each stream by itself: only those fail that are at fault.
    """

    def __init__(self, engine: sa.Engine, metrics: RecorderMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._changed = threading.Condition()
        self._ready: list[Writer] = []
        self._held_up: list[Writer] = []
        self._held_up_at = 0.0
        self._committing = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, writer: Writer) -> None:
        """Commit what a writer has in the next transaction: when the one before has ended, or by `go_on`."""
        with self._changed:
            self._ready.append(writer)

    def go_on(self) -> None:
        """Begin a transaction with what was submitted, unless one is under way."""
        with self._changed:
            if self._thread is None and self._ready:
                self._thread = threading.Thread(target=self._run, name="relatum-committer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def busy(self) -> int:
        """How many streams have something to commit, about."""
        return len(self._ready) + self._committing

    def stop(self, timeout_s: float) -> None:
        """End the thread, when what was submitted is committed."""
        with self._changed:
            self._stopping.set()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while writers := self._next():
            taken = [(writer, writer.take()) for writer in writers]
            pairs = [(writer, share) for writer, share in taken if share is not None]
            if not pairs:
                continue
            self._committing = len(pairs)
            begun = time.perf_counter()
            with recording([(writer.stream, share.batch) for writer, share in pairs]) as span:
                more = self._commit(pairs, span)
            self._metrics.batch_s.observe(time.perf_counter() - begun)
            if more:
                with self._changed:
                    self._ready.extend(more)

    def _next(self) -> list[Writer]:
        """The writers that have something; none at the stop."""
        with self._changed:
            while True:
                pause_s = self._held_up_at - time.monotonic() if self._held_up else None
                if pause_s is not None and pause_s <= 0:
                    self._ready.extend(self._held_up)
                    self._held_up, pause_s = [], None
                if self._ready:
                    found, self._ready = self._ready, []
                    return found
                if self._stopping.is_set():
                    return []
                self._changed.wait(pause_s)

    def _commit(self, pairs: Sequence[tuple[Writer, Share]], span: Span) -> list[Writer]:
        """Commit writers' shares; gives the writers that have more already."""
        try:
            commit_shares(self._engine, [share for _, share in pairs])
        except DatabaseUnavailable as error:
            span.failed(error)
            for writer, _ in pairs:
                writer.end(error)
            return []
        except Exception as error:  # noqa: BLE001 - handed to the stream at fault, which tells it
            if len(pairs) > 1:
                return [writer for pair in pairs for writer in self._commit([pair], span)]
            span.failed(error)
            pairs[0][0].end(error)
            return []
        more = []
        for writer, share in pairs:
            if share.is_committed:
                if _is_more(writer, share):
                    more.append(writer)
            elif share.is_held_up:
                with self._changed:
                    self._held_up.append(writer)
                    self._held_up_at = time.monotonic() + HELD_UP_S
            else:
                lost = _lost(writer.stream, share)
                span.failed(lost)
                writer.end(lost)
        return more


def _is_more(writer: Writer, share: Share) -> bool:
    try:
        return writer.committed(share)
    except Exception as error:  # noqa: BLE001 - a defect of one stream, or of who waits for it, stops no other
        writer.end(error)
        return False


def _lost(stream: str, share: Share) -> CoverageConflict:
    message = f"another recorder moved the coverage from {share.row.to_offset} first; nothing was written"
    return CoverageConflict(message, stream=stream)
