"""What a private server keeps between starts."""

import socket
import stat
from pathlib import Path

import pytest

from relatum.local import LocalRabbitMQ
from tests.support.ports import Identity, claim, free_port


def test_an_identity_stays_the_same_but_for_ports_that_are_taken(tmp_path: Path) -> None:
    """A second start has the first one's ports and password, in a file of its user alone; taken ports are replaced."""
    file = tmp_path / "identity.json"
    first = Identity.of(file, offsets=(0, -120))
    assert Identity.of(file, offsets=(0, -120)) == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(first.password) == 32
    with socket.create_server(("127.0.0.1", first.port - 120)):
        second = Identity.of(file, offsets=(0, -120))
    assert second.port != first.port
    assert second.password == first.password
    assert Identity.of(file, offsets=(0, -120)) == second


def test_a_free_port_is_free_with_its_neighbours() -> None:
    """Each of the ports counted from a free one can be listened on."""
    port = free_port((0, -120, 1))
    for offset in (0, -120, 1):
        with socket.create_server(("127.0.0.1", port + offset)), pytest.raises(OSError, match="in use"):
            claim(port, (0, -120, 1))


def test_claimed_ports_are_nobody_elses_though_nothing_listens(tmp_path: Path) -> None:
    """A server that was killed comes back to its ports: others choose none of them before, nor the same at once."""
    file = tmp_path / "identity.json"
    first = Identity.of(file, offsets=(0, -120))
    with claim(first.port, (0, -120)):
        assert Identity.of(file, offsets=(0, 1)).port != first.port
        with pytest.raises(OSError, match="in use"):
            claim(first.port - 120, (0,))
    claim(first.port, (0, -120)).close()


def test_a_directory_may_have_a_long_path(tmp_path: Path) -> None:
    """Only its parts are limited, by the file system."""
    directory = tmp_path / ("d" * 200) / ("e" * 200)
    assert LocalRabbitMQ(directory).directory == directory
