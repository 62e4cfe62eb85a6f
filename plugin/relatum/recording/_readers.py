"""The one reader that all recorders of a process share: a connection for each stream followed, and one to ask by."""

import copy
import threading
import time

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, RelatumError
from relatum.reading import BrokerAddress, StreamReader


class SharedReader:
    """Opened when first asked for. The reader itself connects anew whenever a connection of its is lost.

    Where the stream port does not answer at first, AMQP 0.9.1 is used until it does: see `return_to_streams`.

    Args:
        address: The broker.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._failure: RelatumError | None = None
        self._failed_at = 0.0

    def get(self) -> StreamReader:
        """The reader.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: None can be opened.
        """
        asked_at = time.monotonic()
        with self._lock:
            if self._reader is None:
                # Whoever waited while another tried has its answer: a thousand streams do not try one after another.
                if self._failure is not None and self._failed_at >= asked_at:
                    raise copy.copy(self._failure) from self._failure
                try:
                    self._reader = StreamReader.open(self._address)
                except (BrokerUnavailable, AccessRefused, ConfigurationError) as error:
                    self._failure, self._failed_at = error, time.monotonic()
                    raise
            return self._reader

    def is_current(self, reader: StreamReader) -> bool:
        """Whether that is still the reader to use."""
        return reader is self._reader

    @property
    def may_return(self) -> bool:
        """Whether AMQP 0.9.1 is used though the broker may have a stream port."""
        reader = self._reader
        return reader is not None and reader.transport == "amqp" and self._address.stream_port is not None

    def return_to_streams(self) -> bool:
        """Take the stream protocol from now on, if it answers; those who follow by AMQP 0.9.1 see that by `is_current`.

        Raises:
            RelatumError: the broker does not answer at all.
        """
        reader = StreamReader.open(self._address)
        if reader.transport != "stream":
            reader.close()
            return False
        with self._lock:
            before, self._reader = self._reader, reader
        if before is not None:
            before.close()
        return True

    def close(self) -> None:
        """Close it, if it was opened."""
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
