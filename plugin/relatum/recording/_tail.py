"""Recording one stream, for ever: take the lease, open, catch up, tail, and begin again after whatever happens."""

import logging
import threading
import time
from typing import Final, Literal

import sqlalchemy as sa

from relatum._failures import backoff, ended
from relatum.errors import RelatumError, StreamNotFound
from relatum.reading import BrokerAddress, StreamBounds, StreamReader
from relatum.recording._lease import RENEW_S, give_back, take
from relatum.recording._metrics import RecorderMetrics
from relatum.recording._opening import note, open_tail
from relatum.recording._writer import RecordedListener, Writer
from relatum.store import StreamRow, ensure_stream, streams, translated_errors

logger = logging.getLogger("relatum.recorder")

IDLE_S: Final = 0.25
"""How often a reader with nothing to read looks whether it should stop."""

LOOK_S: Final = 5.0
"""How often the stream is asked where it begins and ends: for the metrics, and to prune what retention dropped."""


class TailRecorder:
    """Records one stream until it is told to stop.

    Args:
        address: The broker.
        engine: The database.
        stream: The stream's name.
        holder: Who takes the lease.
        metrics: Where to count.
        super_stream: The super stream it is a partition of.
        on_recorded: Called after each commit that holds receipts.
    """

    def __init__(
        self,
        address: BrokerAddress,
        engine: sa.Engine,
        stream: str,
        *,
        holder: str,
        metrics: RecorderMetrics,
        super_stream: str | None = None,
        on_recorded: RecordedListener | None = None,
    ) -> None:
        self._address = address
        self._engine = engine
        self._stream = stream
        self._super_stream = super_stream
        self._holder = holder
        self._metrics = metrics
        self._on_recorded = on_recorded
        self._was_missing = False
        self._writer: Writer | None = None
        self._is_hopeful = True
        self._observer: StreamReader
        self._transport: Literal["auto", "stream"] = "auto"

    def lacks(self, offset: int) -> bool:
        """Whether the offset is not recorded yet, and this recorder is about to do it.

        False also where it cannot: another process records the stream, or the last attempt failed.
        """
        writer = self._writer
        return self._is_hopeful if writer is None else writer.recorded_to < offset

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set; the batch under way is committed. Errors are logged, never raised."""
        pauses = backoff()
        while not stop.is_set():
            try:
                if self._session(stop):
                    pauses = backoff()
                    continue
            except RelatumError as error:
                logger.warning("session ended: %s", ended(error), extra={"stream": self._stream})
            except Exception:
                logger.exception("session ended by a defect", extra={"stream": self._stream})
            self._is_hopeful = False
            self._metrics.reconnects.labels(self._stream).inc()
            stop.wait(next(pauses))

    def _session(self, stop: threading.Event) -> bool:
        """One lease, from taking it to giving it back. True where it ended in order."""
        with translated_errors(), self._engine.begin() as connection:
            row = ensure_stream(connection, self._address.vhost, self._stream, self._super_stream)
        self._is_hopeful = take(self._engine, row.stream_id, self._holder)
        if not self._is_hopeful:
            stop.wait(RENEW_S)
            return True
        try:
            return self._record(row, stop)
        except StreamNotFound:
            self._is_hopeful = False
            self._note_missing(row)
            stop.wait(RENEW_S)
            return True
        finally:
            self._give_back(row)

    def _give_back(self, row: StreamRow) -> None:
        try:
            give_back(self._engine, row.stream_id, self._holder)
        except RelatumError as error:
            # The lease runs out by itself; what ended the session matters more.
            logger.info("lease not given back: %s", ended(error), extra={"stream": self._stream})

    def _note_missing(self, row: StreamRow) -> None:
        """Say once that the stream does not exist (yet, or any more); it may be declared at any moment."""
        if self._was_missing:
            return
        self._was_missing = True
        logger.warning("no such stream", extra={"stream": self._stream})
        with translated_errors(), self._engine.begin() as connection:
            connection.execute(sa.update(streams).where(streams.c.stream_id == row.stream_id).values(state="missing"))
            note(connection, row.stream_id, "missing")

    def _record(self, row: StreamRow, stop: threading.Event) -> bool:
        with self._open_reader() as reader, self._open_reader() as self._observer:
            # A broker that starts answers by AMQP first; going back and forth would record the same range two ways.
            self._transport = reader.transport if reader.transport == "stream" else self._transport
            opened = open_tail(self._engine, reader, row)
            if opened.stream.stream_id != row.stream_id:
                return True  # A new generation: begin again with a lease of its own.
            self._was_missing = False
            start = opened.tail.to_offset
            logger.info("recording", extra={"stream": self._stream, "from": start})
            writer = Writer(self._engine, opened, self._holder, self._metrics, self._on_recorded)
            self._writer = writer
            try:
                self._follow(reader, writer, start, stop)
            except BaseException:
                self._abandon(writer)
                raise
            finally:
                self._writer = None
            writer.finish()
        return True

    def _open_reader(self) -> StreamReader:
        return StreamReader.open(self._address, transport=self._transport)

    def _abandon(self, writer: Writer) -> None:
        """Commit what was read before the error; the error itself is what is told."""
        try:
            writer.finish()
        except RelatumError as error:
            logger.info("last batch not written: %s", ended(error), extra={"stream": self._stream})

    def _follow(self, reader: StreamReader, writer: Writer, start: int, stop: threading.Event) -> None:
        """Read from the coverage's end until there is a reason to open anew."""
        expected = start
        looked_at = time.monotonic()
        for records in reader.batches(self._stream, start, follow=True, idle_s=IDLE_S):
            writer.check()
            if stop.is_set() or writer.must_reopen:
                return
            if time.monotonic() - looked_at >= LOOK_S:
                looked_at = time.monotonic()
                self._look(writer, expected)
            if records is None:
                self._metrics.show_end(self._stream, expected - 1, writer.recorded_to)
                continue
            if records.first_offset > expected and self._is_hole(expected):
                return
            writer.put(records)
            expected = records.last_offset + 1

    def _look(self, writer: Writer, expected: int) -> None:
        """See where the stream begins and ends now: for the metrics, and for what the writer may prune."""
        bounds = self._bounds()
        self._metrics.show_end(self._stream, bounds.last or expected - 1, writer.recorded_to)
        if bounds.first is not None:
            writer.first_offset = bounds.first

    def _is_hole(self, expected: int) -> bool:
        """Whether offsets are missing because retention took them; streams have gaps in good health too."""
        first = self._bounds().first
        return first is not None and first > expected

    def _bounds(self) -> StreamBounds:
        """The stream's ends, asked on a connection of its own: the reader's is busy with what follows."""
        return self._observer.bounds(self._stream)
