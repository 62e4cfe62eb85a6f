"""The parent's handle on one supervised server process."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from relatum.errors import ServerStartFailed
from relatum.local import _supervisor

LOCK_WAIT_S = 5.0
"""Seconds to wait for a directory whose former owner was killed: its supervisor needs 3 at most."""

STOP_WAIT_S = 15.0
"""Seconds beyond the grace after which a supervisor that does not end is an error."""


class SupervisedProcess:
    """A server, started below a supervisor that ends it when this process is gone.

    Args:
        lock: A descriptor from `lock_directory`, which stays the caller's to close.
        log: The file that takes its output, appended.
        stop_signal: Asks it to end in order.
        abandon_signal: Asks it to end at once, when this process is gone.
        grace_s: Seconds it has after `stop_signal` before it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        directory: Path,
        lock: int,
        log: Path,
        stop_signal: signal.Signals,
        abandon_signal: signal.Signals,
        grace_s: float,
    ) -> None:
        self._grace_s = grace_s
        self._log = log
        arguments = [os.getpid(), int(stop_signal), int(abandon_signal), grace_s, lock]
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", _supervisor.__file__, *map(str, arguments), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=directory,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C at a terminal is for the parent, which then stops it in order
            )

    @property
    def running(self) -> bool:
        """Whether the server, or its supervisor, still runs."""
        return self._supervisor.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The status it ended with, 128 + n after signal n; None while it runs."""
        return self._supervisor.poll()

    @property
    def pids(self) -> list[int]:
        """The ids of the server's processes, the first one first; the supervisor's is not among them."""
        return _supervisor.descendants(self._supervisor.pid) if self.running else []

    def last_lines(self, count: int) -> str:
        """Return the last lines the server wrote since this start."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-count:])

    def stop(self) -> None:
        """Ask the server to end, kill what is left after the grace, and wait for it."""
        if self.running:
            self._supervisor.terminate()
        self._supervisor.wait(self._grace_s + STOP_WAIT_S)

    def kill(self) -> None:
        """Send SIGKILL to all of the server's processes at once and wait until none is left."""
        limit = time.monotonic() + STOP_WAIT_S
        while self.running and time.monotonic() < limit:
            self.signal(signal.SIGKILL)
            try:
                self._supervisor.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        self._supervisor.wait(0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of the server's processes."""
        for process in self.pids:
            _supervisor.send(process, number)


@contextmanager
def lock_directory(directory: Path) -> Iterator[int]:
    """Hold a directory's lock; a supervisor that is given the descriptor holds it on until it ends.

    Raises:
        ServerStartFailed: Another server runs in the directory, and did not end within LOCK_WAIT_S.
    """
    descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        limit = time.monotonic() + LOCK_WAIT_S
        while not _try_lock(descriptor):
            if time.monotonic() > limit:
                raise ServerStartFailed(f"Another server runs in {directory}. Stop it, or choose another directory.")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
