"""What is asked of brokers: all of it waits for an answer, and is called in a thread beside the loop."""

import threading

from relatum.errors import RelatumError, StreamUnavailable, UsedAfterClose
from relatum.following._followed import Finding
from relatum.reading import Agreement, Broker, BrokerAddress, Position, SocketConnection, StreamReader
from relatum.reading import agreement as agreement_with


class Questions:
    """The one reader by which a follower, and its owner, ask."""

    def __init__(self, address: BrokerAddress, timeout_s: float, heartbeat_s: int) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._opening = threading.Lock()
        self._reader: StreamReader | None = None
        self._is_closed = False

    def reader(self) -> StreamReader:
        """The reader, opened where there is none."""
        reader = self._reader
        if reader is not None and not self._is_closed:
            return reader
        # One opens for all who ask; closing waits for nobody.
        with self._opening:
            if self._reader is None and not self._is_closed:
                self._reader = StreamReader.open(
                    self._address, timeout_s=self._timeout_s, heartbeat_s=self._heartbeat_s
                )
            if self._reader is None or self._is_closed:
                self.close()
                raise UsedAfterClose("the follower was closed: open another one")
            return self._reader

    def close(self) -> None:
        """Close the reader."""
        self._is_closed = True
        if self._reader is not None:
            self._reader.close()

    def look(self, stream: str, known: Position | None, is_end: bool) -> Finding:
        """Ask the stream's leader how it stands to what is known, and where it begins.

        `is_end` says that its begin need not be asked for where it agrees. Where nobody can say now, it raises
        `StreamUnavailable`.
        """
        reader = self.reader()
        found = None if known is None else agreement_with(reader, stream, known)
        if found is Agreement.UNKNOWN:
            raise StreamUnavailable(
                f"{stream!r} does not show offset {known and known.offset}, which was read: a node is "
                "behind, or starts, or the leader cannot be asked; nothing is concluded",
                stream=stream,
            )
        is_enough = is_end and found in (Agreement.SAME, Agreement.EXPIRED)
        return Finding(found, None if is_enough else reader.bounds(stream))

    def link(self, node: Broker | None) -> SocketConnection:
        """A connection to a node, logged in; None for the node that is connected first."""
        return self.reader().link(node)

    def why_missing(self, stream: str) -> RelatumError | None:
        """Why a node does not know a stream: there is none, or a queue of that name. None where it was declared now."""
        try:
            self.reader().bounds(stream)
        except StreamUnavailable:
            return None
        except RelatumError as error:
            return error
        return None
