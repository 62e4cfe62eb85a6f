"""The base class of private servers: chooses ports and password; starts, stops, kills, freezes and awaits a server."""

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from relatum.common.checks import checked_count, checked_seconds, checked_text, seconds_text
from relatum.common.closing import close_when_dropped
from relatum.common.processes import refuse_in_child
from relatum.errors import ServerStartFailed
from relatum.local import _supervisor

LAST_LINES = 20
"""Lines of a server's output that the error of a failed start shows."""

ANSWER_POLL_S = 0.05
"""Seconds between attempts to connect to a starting server; an attempt takes about a millisecond."""

LOCK_WAIT_S = 5.0
"""Seconds to wait for a directory's lock. If the last owner was killed, its supervisor ends within 3."""

STOP_WAIT_S = 15.0
"""Seconds after the grace period within which a supervisor must end."""

PORT_MIN: Final = 15_200
PORT_MAX: Final = 32_000
"""Below the ports that Linux assigns to outgoing connections, which begin at 32,768."""

PORT_TRIES_MAX: Final = 500
"""Random ports that are tried before an error."""


class LocalServer(ABC):
    """A private server in its own directory, on ports of 127.0.0.1 that stay the same.

    A context manager: entering starts the server, leaving stops it. The server never outlives this process. Its data
    remains in the directory for a later start. Not thread-safe.

    Args:
        directory: The directory for all of the server's files; created if missing, accessible to this user only.
        start_timeout_s: Maximum seconds of a start, above 0. Default: 120.
    """

    name: ClassVar[str]
    _port_offsets: ClassVar[Sequence[int]] = (0,)
    _stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    _abandon_signal: ClassVar[signal.Signals] = signal.SIGKILL
    _grace_s: ClassVar[float] = 20.0

    def __init__(self, directory: str | os.PathLike[str], *, start_timeout_s: float = 120.0) -> None:
        self.directory = checked_directory(directory)
        self._start_timeout_s = checked_seconds("start_timeout_s", start_timeout_s, zero=False)
        refuse_in_child(self, "a private server")
        self._kept: Identity | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._claims = ExitStack()
        close_when_dropped(self, self._claims.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._claims.close()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<{type(self).__name__} {state} in {self.directory}>"

    @property
    def data(self) -> Path:
        """The directory of the server's data. Copy it only while the server does not run."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """The file with the server's output since its first start."""
        return self.directory / "server.log"

    @property
    def port(self) -> int:
        """The server's port; RabbitMQ's is for AMQP 0.9.1. It stays the same after the first start."""
        return self._identity.port

    @property
    def running(self) -> bool:
        """Whether the server has a running process."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def pids(self) -> list[int]:
        """The ids of the server's processes, the main process first; empty if the server is not running."""
        return _supervisor.descendants(self._supervisor.pid) if self._supervisor and self.running else []

    def last_lines(self, count: int = LAST_LINES) -> str:
        """Return at most `count` last lines of output since the latest start; "" if this object has not started it."""
        checked_count("count", count, least=0)
        if self._supervisor is None:
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(deque(filter(str.strip, lines), maxlen=count))

    def start(self) -> None:
        """Start the server, and wait until it answers. No effect if it is running.

        Raises:
            ServerStartFailed: The server is not installed, cannot use its directory, exited, or did not answer in time
                (these two messages end with its last lines). No process of the server is left; you can start it again.
        """
        self.launch()
        self.await_answer()

    def launch(self) -> None:
        """Start the server, and return before it answers. Call `await_answer` next. Raises errors as `start` does."""
        if self.running:
            return
        if sys.platform != "linux":
            raise ServerStartFailed("Private servers need Linux; elsewhere use Docker: docker/compose.yaml.")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.directory) as lock, self.log.open("ab") as output:
                self._log_start = output.tell()
                self._choose_ports()
                self._prepare()
                options = [os.getpid(), int(self._stop_signal), int(self._abandon_signal), self._grace_s, lock]
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", "-S", _supervisor.__file__, *map(str, options), *self._command()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    cwd=self.directory,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C at a terminal must only reach the parent, which stops the server
                )
        except OSError as error:
            location = f" at {error.filename}" if error.filename and str(error.filename) != str(self.directory) else ""
            reason = f"{error.strerror or error}{location}"
            raise ServerStartFailed(
                f"{self.directory} cannot be used for {self.name}'s data: {reason}. Choose a directory that this user "
                "may write to."
            ) from error

    def await_answer(self) -> None:
        """Wait until the launched server answers. Raises errors as `start` does."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self._answers():
            if not self.running:
                status = None if self._supervisor is None else self._supervisor.returncode
                raise self._start_failed(f"exited with status {status}")
            if time.monotonic() > deadline:
                self.kill()
                raise self._start_failed(f"did not answer within {seconds_text(self._start_timeout_s)}")
            time.sleep(ANSWER_POLL_S)

    def stop(self) -> None:
        """Shut the server down gracefully, and wait; its processes are killed after 20 s. Idempotent."""
        if self._supervisor is not None:
            if self.running:
                self._supervisor.terminate()
            self._supervisor.wait(self._grace_s + STOP_WAIT_S)

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, and wait until they are gone."""
        if self._supervisor is None:
            return
        deadline = time.monotonic() + STOP_WAIT_S
        while self.running and time.monotonic() < deadline:
            self._signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(0.02)
        self._supervisor.wait(0)

    def restart(self) -> None:
        """Stop the server if it is running, then start it with the same ports and data.

        Raises:
            ServerStartFailed: As `start`, also if another process listens on one of the ports.
        """
        self.stop()
        self.start()

    def freeze(self) -> None:
        """Suspend all processes of the server (SIGSTOP) until `thaw`: connections stay open, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume a frozen server (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.pids:
            _supervisor.send(process, number)

    @property
    def _identity(self) -> "Identity":
        if self._kept is None:
            raise RuntimeError(f"{self.name} has no ports and no password before its first start: start it first")
        return self._kept

    def _choose_ports(self) -> None:
        while self._kept is None:
            identity = Identity.of(self.directory / "identity.json", offsets=self._port_offsets)
            with suppress(OSError):  # Another server has just claimed the same ports.
                self._claims.enter_context(claim(identity.port, self._port_offsets))
                self._kept = identity

    def _start_failed(self, what: str) -> ServerStartFailed:
        lines = self._failure_output() or "(no output)"
        return ServerStartFailed(f"{self.name} in {self.directory} {what}. Its last lines:\n{lines}")

    def _failure_output(self) -> str:
        """Return the lines of output that explain why a start failed."""
        return self.last_lines()

    @abstractmethod
    def _prepare(self) -> None:
        """Write the files that the server needs to start."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the program's absolute path and arguments."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Return the complete environment of the server."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether a client can use the server now."""


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Hold a directory's lock in the block; a supervisor that inherits the descriptor holds it until it ends."""
    descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerStartFailed(
                        f"Another server runs in {directory}. Stop it, or choose another directory."
                    ) from None
                time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Identity:
    """A server's password and base port, the same for each start. Its other ports are at offsets from the base port."""

    port: int
    password: str

    @classmethod
    def of(cls, file: Path, *, offsets: Sequence[int]) -> "Identity":
        """Return the identity in `file`, with a new base port if its ports are in use; create it if it is missing."""
        stored = cls(**json.loads(file.read_text())) if file.exists() else None
        port = free_port(offsets, stored.port if stored else None)
        identity = cls(port, stored.password if stored else secrets.token_hex(16))
        if identity != stored:
            write_private(file, json.dumps(asdict(identity)))
        return identity


def claim(port: int, offsets: Sequence[int]) -> ExitStack:
    """Keep other private servers from choosing the loopback ports `port + offset`, until the result is closed.

    A claim is a name in Linux's abstract namespace, which is visible where the loopback interface is, and ends with the
    process. Raises `OSError` if one of the ports is already claimed, or a process listens on it.
    """
    with ExitStack() as claims:
        for offset in set(offsets):
            claims.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0relatum port {port + offset}")
            socket.create_server(("127.0.0.1", port + offset)).close()  # reuses ports of lingering connections
        return claims.pop_all()


def free_port(offsets: Sequence[int], preferred: int | None = None) -> int:
    """Return the preferred base port or a random one for which each `port + offset` can be claimed."""
    for _ in range(PORT_TRIES_MAX):
        port = preferred or PORT_MIN + secrets.randbelow(PORT_MAX - PORT_MIN)
        preferred = None
        with suppress(OSError):
            claim(port, offsets).close()
            return port
    raise ServerStartFailed(f"No free ports on 127.0.0.1 between {PORT_MIN} and {PORT_MAX}: stop other programs there.")


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can ever read. If the process is killed, the file is complete or missing."""
    temporary = file.with_name(f"{file.name}.new")
    temporary.touch(0o600)
    temporary.write_text(text)
    temporary.replace(file)


def checked_directory(directory: Any) -> Path:
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    return Path(checked_text("directory", path, least=1, what="a path")).absolute()
