"""The ports and the password of a private server, stored in its directory."""

import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from relatum.checks import checked_name
from relatum.errors import ServerStartFailed

PORT_MIN: Final = 15_200
PORT_MAX: Final = 32_000
"""Below 32,768, from which Linux assigns ports to outgoing connections."""

PORT_TRIES_MAX: Final = 500
"""Random ports to try before an error."""


@dataclass(frozen=True)
class Identity:
    """A server's password, and its base port, to which offsets are added for other ports."""

    port: int
    password: str

    @classmethod
    def of(cls, file: Path, *, offsets: Sequence[int]) -> "Identity":
        """Return the identity stored in `file`, with other ports if its ports are taken; or a new one."""
        kept = cls(**json.loads(file.read_text())) if file.exists() else None
        if kept is not None and _is_free(kept.port, offsets):
            return kept
        identity = cls(free_port(offsets), kept.password if kept else secrets.token_hex(16))
        write_private(file, json.dumps(asdict(identity)))
        return identity


def ports_free(port: int, offsets: Sequence[int]) -> bool:
    """Whether nothing listens on the loopback ports `port + offset`."""
    return all(_port_free(port + offset) for offset in offsets)


def claim(port: int, offsets: Sequence[int]) -> ExitStack:
    """Keep other private servers from choosing the ports `port + offset`, until the result is closed.

    A stopped or killed server can thus start again on its ports. A name in Linux's abstract namespace belongs to one
    process, is visible where the loopback interface is, and ends with the process.

    Raises:
        OSError: One of the ports is claimed already.
    """
    with ExitStack() as claims:
        for offset in set(offsets):
            claims.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0relatum port {port + offset}")
        return claims.pop_all()


def free_port(offsets: Sequence[int]) -> int:
    """Return a port for which each `port + offset` is free on loopback and not claimed.

    Raises:
        ServerStartFailed: No such port was found.
    """
    for _ in range(PORT_TRIES_MAX):
        port = PORT_MIN + secrets.randbelow(PORT_MAX - PORT_MIN)
        if _is_free(port, offsets):
            return port
    raise ServerStartFailed(f"No free ports on 127.0.0.1 between {PORT_MIN} and {PORT_MAX}.")


def _is_free(port: int, offsets: Sequence[int]) -> bool:
    try:
        claim(port, offsets).close()
    except OSError:
        return False
    return ports_free(port, offsets)


def _port_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read at any time. If the process is killed, the file is whole or missing."""
    unfinished = file.with_name(f"{file.name}.new")
    descriptor = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    unfinished.replace(file)


def checked_directory(directory: Any) -> Path:
    """Return the absolute path of a directory, which need not exist.

    Raises:
        InvalidInput: The value is not a path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    return Path(checked_name("directory", path)).absolute()
