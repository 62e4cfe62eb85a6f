"""Runs one server for a parent process, and ends all of the server's processes when the parent has ended.

It runs as a script, by path and with the standard library alone, so that it starts in milliseconds:

    _supervisor.py PARENT_PID STOP_SIGNAL ABANDON_SIGNAL GRACE_S LOCK_FD COMMAND...

On SIGTERM, it sends STOP_SIGNAL to the server and waits GRACE_S seconds. When the parent has ended, it sends
ABANDON_SIGNAL and waits ABANDONED_GRACE_S. Then it kills all remaining processes, and exits with the server's status.

PR_SET_PDEATHSIG on the server is not enough: the kernel sends it when the starting *thread* ends, clears it when the
server changes its user, and does not set it for children of Erlang and PostgreSQL.
"""

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.25
"""Seconds between checks that the parent is alive."""

ABANDONED_GRACE_S = 2.0
"""Seconds that a server has to remove its shared memory after the parent has ended."""

PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h: the supervisor adopts orphaned descendants, so it can kill all of them."""


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all live descendants of a process, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # the process has just ended
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(ancestor, ()))
    for process in found:
        found.extend(children.get(process, ()))  # a breadth-first search: the list grows during the iteration
    return found


def send(process: int, number: int) -> None:
    """Send a signal; no error if the process is gone."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return


def supervise(command: list[str], *, parent: int, stop: int, abandon: int, grace_s: float) -> int:
    """Run the server until it ends or is stopped; return its exit status."""
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = os.posix_spawn(command[0], command, os.environ, setsigmask=[], setsigdef=[signal.SIGINT, signal.SIGPIPE])
    deadline, abandoned = math.inf, False

    def end(number: int, grace_s: float) -> float:
        send(server, number)
        for process in descendants(os.getpid()):
            send(process, signal.SIGCONT)  # a frozen server could not handle the signal
        return time.monotonic() + grace_s

    while True:
        received = signal.sigtimedwait(signals, POLL_S)
        status = _reap(server)
        if status is None and time.monotonic() > deadline:
            status = 128 + signal.SIGKILL
        if status is not None:
            _kill_all()
            return status
        if received is not None and received.si_signo == signal.SIGTERM:
            deadline = end(stop, grace_s)
        if os.getppid() != parent and not abandoned:
            abandoned = True
            deadline = end(abandon, ABANDONED_GRACE_S)


def _reap(server: int) -> int | None:
    """Reap ended children; return the server's exit status if it has ended, else None."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if process == 0:
            return None
        if process == server:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_all() -> None:
    while True:
        for process in descendants(os.getpid()):
            send(process, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(arguments: list[str]) -> int:
    """Run the supervisor with these arguments; return its exit status."""
    parent, stop, abandon = (int(argument) for argument in arguments[:3])
    grace_s, lock, command = float(arguments[3]), int(arguments[4]), arguments[5:]
    os.set_inheritable(lock, False)  # the server must not inherit the lock: only this process holds it
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    return supervise(command, parent=parent, stop=stop, abandon=abandon, grace_s=grace_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
