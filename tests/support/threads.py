"""Telling the threads of a test from what earlier ones left running in the same process."""

import logging
import threading


class Threads:
    """The threads of now, which are not those that are begun later."""

    def __init__(self) -> None:
        self._earlier = set(threading.enumerate())

    def begun(self) -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in self._earlier]

    def told(self, record: logging.LogRecord) -> bool:
        """Whether a line of a log may be a later one's: no earlier component logged it."""
        # Threads of the process are no component's. The number of a thread that has ended may belong to another by now.
        if record.threadName in ("relatum-calls", "relatum-connecting"):
            return True
        return not any(
            each.ident == record.thread and each.is_alive() for each in self._earlier if each.name.startswith("relatum")
        )
