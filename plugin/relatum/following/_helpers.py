"""What has to wait for an answer, done beside the thread that reads: connections are opened, leaders are asked."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from relatum.errors import RelatumError, StreamUnavailable, UsedAfterClose
from relatum.following._course import Doubt, Finding
from relatum.reading import Agreement, Broker, BrokerAddress, SocketConnection, StreamReader, agreement

HELPERS_MAX: Final = 3
"""Threads that ask at once: one that waits for a node that is frozen stops no other."""

_Answer = TypeVar("_Answer")


class Helpers:
    """A few threads, while there is something to ask; answers are given to the thread that had it asked.

    Args:
        tell: Has that thread do something.
        name: The name of the threads.
    """

    def __init__(self, tell: Callable[[Callable[[], None]], None], name: str = "relatum-follower-asks") -> None:
        self._tell = tell
        self._name = name
        self._lock = threading.Lock()
        self._questions: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._untaken: set[SocketConnection] = set()
        self._is_closed = False

    def ask(self, question: Callable[[], _Answer], answered: Callable[[_Answer | Exception], None]) -> None:
        """Ask, and have the thread call with the answer, or with what was raised instead."""

        def run() -> None:
            try:
                answer: _Answer | Exception = question()
            except Exception as error:  # noqa: BLE001 - whoever asked is told of it
                answer = error
            with self._lock:
                is_told = not self._is_closed
                if is_told and isinstance(answer, SocketConnection):
                    self._untaken.add(answer)
            if is_told:
                self._tell(lambda: take(answer))
            elif isinstance(answer, SocketConnection):
                answer.close()

        def take(answer: _Answer | Exception) -> None:
            if isinstance(answer, SocketConnection):
                with self._lock:
                    self._untaken.discard(answer)
            answered(answer)

        with self._lock:
            self._questions.append(run)
            if len(self._threads) < HELPERS_MAX and not self._is_closed:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.add(thread)
                thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or not self._questions:
                    self._threads.discard(threading.current_thread())
                    return
                question = self._questions.popleft()
            question()

    def close(self) -> None:
        """Ask nothing more. What is asked now ends by itself, and its answer is nobody's."""
        with self._lock:
            self._is_closed = True
            self._questions.clear()
            untaken, self._untaken = self._untaken, set()
        # That thread ends, and is told nothing any more.
        for connection in untaken:
            connection.close()


class Questions:
    """The one reader by which a follower, and its owner, ask.

    Args:
        address: The broker.
        timeout_s: Seconds for an answer.
        heartbeat_s: Seconds of heartbeat asked for.
    """

    def __init__(self, address: BrokerAddress, timeout_s: float, heartbeat_s: int) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.heartbeat_s = heartbeat_s
        self._opening = threading.Lock()
        self._reader: StreamReader | None = None
        self._is_closed = False

    def reader(self) -> StreamReader:
        """The reader, opened where there is none.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: none can be opened.
        """
        reader = self._reader
        if reader is not None and not self._is_closed:
            return reader
        # One opens for all who ask; who closes waits for nobody.
        with self._opening:
            if self._reader is None and not self._is_closed:
                self._reader = StreamReader.open(self.address, timeout_s=self.timeout_s, heartbeat_s=self.heartbeat_s)
            if self._reader is None or self._is_closed:
                self.close()
                raise UsedAfterClose("the follower was closed: open another one")
            return self._reader

    def close(self) -> None:
        """Close the reader."""
        self._is_closed = True
        if self._reader is not None:
            self._reader.close()

    # --- what is asked ------------------------------------------------------------------------------------------------

    def look(self, stream: str, doubt: Doubt) -> Finding:
        """Ask who leads the stream about a doubt.

        Raises:
            StreamUnavailable: nobody can say now.
            RelatumError: as of the reader.
        """
        reader = self.reader()
        found = None if doubt.known is None else agreement(reader, stream, doubt.known)
        if found is Agreement.UNKNOWN:
            raise StreamUnavailable(
                f"{stream!r} does not show offset {doubt.known and doubt.known.offset}, which was read: a node is "
                "behind, or starts, or the leader cannot be asked; nothing is concluded",
                stream=stream,
            )
        is_enough = doubt.is_end and found in (Agreement.SAME, Agreement.EXPIRED)
        return Finding(found, None if is_enough else reader.bounds(stream))

    def link(self, node: Broker | None) -> SocketConnection:
        """A connection to a node.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: none can be opened.
        """
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
