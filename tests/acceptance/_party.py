"""Processes of a test, to be killed and frozen while they work."""

import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self


class Party:
    """Processes that do the same, each replaced by another when it is killed. All are ended with its block.

    Args:
        start: Starts the process of a number.
        count: How many there are.
    """

    def __init__(self, start: "Callable[[int], subprocess.Popen[bytes]]", count: int) -> None:
        self._start = start
        self.processes = [start(number) for number in range(count)]

    def kill(self, number: int) -> None:
        """Kill one of them, and start another."""
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self._start(number)

    def kill_any(self, chance: random.Random) -> None:
        """Kill any of them, and start another."""
        self.kill(chance.randrange(len(self.processes)))

    @contextmanager
    def frozen(self, number: int) -> "Iterator[subprocess.Popen[bytes]]":
        """Has one of them stand still, wherever it is just now."""
        self.processes[number].send_signal(signal.SIGSTOP)
        yield self.processes[number]
        self.processes[number].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End them in order."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(90)
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
