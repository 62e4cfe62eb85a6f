"""Where streams begin and end, asked again and again by the process that plans a streaming query."""

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from relatum.errors import StreamNotFound, Transient
from relatum.reading import StreamBounds, StreamReader
from relatum.waiting import Outages
from relatum_spark._where import Broker

_log: Final = logging.getLogger("relatum.spark")

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 2.0
"""Between two attempts to reach a broker that is away."""

CONFIRM_S: Final = 2.0
"""For how long a stream must be missing, empty or shorter than it was, to be believed: a broker that has just started,
and a replica that lags, say so of streams in good health."""

_WHO: Final = "asking where streams end"

_Result = TypeVar("_Result")


class Tails:
    """Asks a broker for the ends of streams over one connection, kept between the questions.

    Args:
        broker: Where the streams are.
        patience_s: Seconds for which a question is repeated while the broker is away.
    """

    def __init__(self, broker: Broker, *, patience_s: float) -> None:
        self._broker = broker
        self._patience_s = patience_s
        self._reader: StreamReader | None = None
        self._outages = Outages(_log, broker=str(broker.address))

    def ask(self, question: Callable[[StreamReader], _Result]) -> _Result:
        """The answer to a question, asked anew over a new connection where the broker was away.

        Raises:
            Transient: the broker was away for `patience_s`.
        """
        limit, pause_s = time.monotonic() + self._patience_s, PAUSE_S_MIN
        while True:
            try:
                if self._reader is None:
                    self._reader = self._broker.open()
                answer = question(self._reader)
            except Transient as error:
                self.close()
                if time.monotonic() + pause_s > limit:
                    self._outages.forget(_WHO)
                    raise
                self._outages.failed(_WHO, error)
            except BaseException:
                self._outages.forget(_WHO)
                raise
            else:
                self._outages.over(_WHO)
                return answer
            time.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    def partitions(self, super_stream: str) -> list[str]:
        """The streams of a super stream; empty where there is no such super stream."""
        return self.ask(lambda reader: reader.partitions(super_stream))

    def bounds(self, stream: str, *, read_to: int | None = None) -> StreamBounds | None:
        """The first and the last offset; None where there is no such stream.

        Args:
            stream: The stream's name.
            read_to: The offset up to which it was there already: where it is missing, empty or shorter, it is asked
                for again for `CONFIRM_S`. None where nothing is known of it.
        """
        doubted_at: float | None = None
        while True:
            found = self._bounds_once(stream)
            if read_to is None or (found is not None and found.end >= read_to):
                return found
            now = time.monotonic()
            if doubted_at is None:
                doubted_at = now
            elif now - doubted_at > CONFIRM_S:
                return found
            self.close()
            time.sleep(PAUSE_S_MIN)

    def _bounds_once(self, stream: str) -> StreamBounds | None:
        try:
            return self.ask(lambda reader: reader.bounds(stream))
        except StreamNotFound:
            return None

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
