"""Recording one stream, for ever: wait for the lease, open, catch up, tail, and begin again after whatever happens."""

import logging
import random
import threading
import time
from typing import Final

import sqlalchemy as sa

from relatum.errors import Conflict, RelatumError, StreamNotFound
from relatum.reading import StreamBounds, StreamReader
from relatum.recording._batch import readable
from relatum.recording._committer import Committer
from relatum.recording._housekeeping import Housekeeping
from relatum.recording._metrics import RecorderMetrics
from relatum.recording._opening import note, open_tail, pass_over
from relatum.recording._readers import SharedReader
from relatum.recording._writer import RecordedListener, Writer
from relatum.store import StreamRow, streams, translated_errors
from relatum.waiting import QUESTION_S, Outages, Server, backoff, ended

logger = logging.getLogger("relatum.recorder")

IDLE_S: Final = 0.25
"""How often a reader with nothing to read looks whether it should stop, in a process of few streams."""

IDLE_S_MAX: Final = 2.0
"""How often it looks in a process of many: 250 looks a second altogether cost little."""

LOOK_S: Final = 30.0
"""How often the stream is asked where it begins and ends: for the metrics, and to prune what retention dropped."""

SETTLED_S: Final = 5.0
"""Seconds a session lasts, at least, or it records something, before the pauses after failures begin anew."""


class Shared:
    """What all recorders of a process have in common.

    Attributes:
        engine: The database.
        reader: The broker.
        keeper: The leases.
        committer: Who commits.
        outages: What is away.
        metrics: Where to count.
        on_recorded: Called after each commit that holds receipts.
    """

    def __init__(
        self,
        engine: sa.Engine,
        reader: SharedReader,
        keeper: Housekeeping,
        committer: Committer,
        outages: Outages,
        metrics: RecorderMetrics,
        on_recorded: RecordedListener | None,
    ) -> None:
        self.engine = engine
        self.reader = reader
        self.keeper = keeper
        self.committer = committer
        self.outages = outages
        self.metrics = metrics
        self.on_recorded = on_recorded
        self.streams = 0


class TailRecorder:
    """Records one stream until it is told to stop.

    Args:
        shared: What it has in common with the others.
        stream: The stream's name.
        super_stream: The super stream it is a partition of.
    """

    def __init__(self, shared: Shared, stream: str, super_stream: str | None = None) -> None:
        self._shared = shared
        self._stream = stream
        self._who = f"recording of stream {stream!r}"
        self._progress = shared.metrics.stream(stream)
        self._place = shared.keeper.add(stream, super_stream, self._progress, self._who)
        self._was_missing = False
        self._is_hopeful = True
        self._has_settled = False

    def lacks(self, offset: int) -> bool:
        """Whether the offset is not recorded yet, and this recorder is about to do it.

        False also where it cannot: another process records the stream, or the last attempt failed.
        """
        writer = self._place.writer
        if writer is None:
            return self._is_hopeful and not self._place.is_refused
        return writer.recorded_to < offset

    @property
    def left(self) -> int | None:
        """Messages that are not recorded, of those that this recorder knows of; None where it has not looked yet.

        0 also where another process records the stream, or an error was told that keeps this one from it.
        """
        if self._progress.is_standby or self._place.is_refused:
            return 0
        known = self._progress.lag_offsets
        return known if known is not None or self._is_hopeful else 0

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set; the batch under way is committed. Errors are logged, never raised."""
        pauses = backoff(QUESTION_S)
        while not stop.is_set():
            row = self._shared.keeper.take(self._place, _look_s())
            if row is None and not self._place.is_new:
                if not stop.is_set():
                    self._look_from_afar()
                continue
            self._has_settled = False
            try:
                if row is None:
                    self._ask()
                    continue
                self._record(row, stop)
            except StreamNotFound as error:
                self._note_missing(row, error)
            except Conflict as error:
                # Nothing is wrong: another process is, or was, at it.
                logger.info("recording of stream %r begins anew: %s", self._stream, ended(error))
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                self._shared.outages.failed(self._who, error)
            else:
                pauses = backoff(QUESTION_S)
                continue
            self._is_hopeful = False
            self._shared.keeper.release(self._place)
            self._progress.reconnects += 1
            if self._has_settled:
                pauses = backoff(QUESTION_S)
            self._shared.outages.wait(next(pauses))

    def _ask(self) -> None:
        """See that it is a stream, and that this user may read it, before anything of it is written.

        Raises:
            RelatumError: it is not there (yet), a queue of another kind, not to be read; or the broker is away.
        """
        self._show_end()
        self._place.is_there = True

    def _look_from_afar(self) -> None:
        """See how far behind recording is while the database does not let this process record: the broker knows."""
        if self._place.is_held or self._progress.is_standby:
            return
        try:
            self._show_end()
        except StreamNotFound:
            self._progress.show(None)
        except Exception as error:  # noqa: BLE001 - said once, and asked again
            self._shared.outages.failed(self._who, error)

    def _show_end(self) -> None:
        """Ask the broker where the stream ends, for the metrics; it has answered then, whoever else does not."""
        outages = self._shared.outages
        self._progress.show(self._shared.reader.get().bounds(self._stream).last)
        outages.answered(Server.BROKER)
        outages.over(self._who, Server.BROKER)

    def _note_missing(self, row: StreamRow | None, missed: StreamNotFound) -> None:
        """Say once that the stream does not exist (yet, or any more); it may be declared at any moment."""
        self._shared.outages.failed(self._who, missed)
        self._progress.show(None)
        if self._was_missing:
            return
        if row is None:
            self._was_missing = True
            return
        try:
            with translated_errors(), self._shared.engine.begin() as connection:
                missing = sa.update(streams).where(streams.c.stream_id == row.stream_id).values(state="missing")
                connection.execute(missing)
                note(connection, row.stream_id, "missing")
        except RelatumError as error:
            self._shared.outages.failed(self._who, error)
        else:
            self._was_missing = True

    def _record(self, row: StreamRow, stop: threading.Event) -> None:
        shared = self._shared
        reader = shared.reader.get()
        opened = open_tail(shared.engine, reader, row)
        if opened.stream.stream_id != row.stream_id:
            shared.keeper.release(self._place)  # A new generation: begin again with a lease of its own.
            return
        self._was_missing = False
        self._progress.lost(opened.holes)
        shared.outages.answered(Server.BROKER, Server.DATABASE)
        shared.outages.over(self._who)
        start = opened.tail.to_offset
        extra = {"stream": self._stream, "from": start}
        logger.info("recording stream %r from offset %d on", self._stream, start, extra=extra)
        writer = Writer(opened, shared.committer.submit, self._progress, shared.on_recorded)
        self._place.writer = writer
        self._progress.begin(start - 1, opened.last, writer.unwritten)
        began_at = time.monotonic()
        try:
            self._follow(reader, writer, opened.stream, stop)
        except BaseException:
            self._abandon(writer)
            raise
        finally:
            self._place.writer = None
            self._progress.stop()
            self._has_settled = writer.recorded_to >= start or time.monotonic() - began_at >= SETTLED_S
        writer.finish()

    def _abandon(self, writer: Writer) -> None:
        """Commit what was read before the error; the error itself is what is told."""
        try:
            writer.finish()
        except RelatumError as error:
            extra = {"stream": self._stream}
            text = "the last batch of stream %r was not written; it is read and written again later: %s"
            logger.info(text, self._stream, ended(error), extra=extra)

    def _follow(self, reader: StreamReader, writer: Writer, row: StreamRow, stop: threading.Event) -> None:
        """Read from the coverage's end until there is a reason to open anew."""
        expected = start = writer.recorded_to + 1
        look_at = _next_look()
        idle_s = min(IDLE_S_MAX, IDLE_S + self._shared.streams / 250)
        for records in reader.batches(self._stream, start, follow=True, idle_s=idle_s):
            writer.check()
            if stop.is_set() or writer.must_reopen or not self._shared.reader.is_current(reader):
                return
            if time.monotonic() >= look_at:
                look_at = _next_look()
                self._look(reader, writer, expected)
            if records is None:
                self._progress.show(expected - 1)
                continue
            if records.first_offset > expected and self._is_hole(reader, expected):
                return
            for part, reason in readable(records):
                if reason is not None:
                    writer.finish()
                    pass_over(self._shared.engine, row, part.last_offset + 1, reason)
                    return
                self._progress.read(part.last_offset)
                writer.put(part)
            expected = records.last_offset + 1

    def _look(self, reader: StreamReader, writer: Writer, expected: int) -> None:
        """See where the stream begins and ends now: for the metrics, and for what may be pruned."""
        bounds = self._bounds(reader)
        self._progress.show(expected - 1 if bounds.last is None else bounds.last)
        if bounds.first is not None:
            writer.first_offset = bounds.first

    def _is_hole(self, reader: StreamReader, expected: int) -> bool:
        """Whether offsets are missing because retention took them; streams have gaps in good health too."""
        first = self._bounds(reader).first
        return first is not None and first > expected

    def _bounds(self, reader: StreamReader) -> StreamBounds:
        """The stream's ends, asked on another connection than the one that is busy with what follows."""
        return reader.bounds(self._stream)


def _next_look() -> float:
    """When the stream is asked for its ends the next time; those of many streams are spread."""
    return time.monotonic() + _look_s()


def _look_s() -> float:
    """Seconds between two looks."""
    return LOOK_S * (0.5 + random.random())  # noqa: S311 - nothing secret
