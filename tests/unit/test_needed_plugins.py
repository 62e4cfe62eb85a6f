"""Which of RabbitMQ's plugins a private one has at hand."""

import shutil
from pathlib import Path

import pytest

from relatum.errors import ServerStartFailed
from relatum.local import LocalRabbitMQ

APPLICATIONS = {
    "rabbit": "kernel, stdlib,ranch\n ,ra",
    "ranch": "ssl",
    "ra": "aten",
    "aten": "",
    "rabbitmq_stream": "rabbit,osiris",
    "osiris": "",
    "rabbitmq_management": "rabbit,cowboy",
    "cowboy": "",
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server script of a package, by a link as Debian has them. It ends at once."""
    theirs = tmp_path / "lib" / "rabbitmq_server-1"
    for name, needs in APPLICATIONS.items():
        (theirs / "plugins" / f"{name}-1.2" / "ebin").mkdir(parents=True)
        described = (
            f'%% of it\n{{application, {name},\n [{{vsn, "1.2"}},\n {{applications,\t[{needs}]}},\n {{env, []}}]}}.'
        )
        (theirs / "plugins" / f"{name}-1.2" / "ebin" / f"{name}.app").write_text(described)
    (theirs / "plugins" / "README").touch()
    for file in ("escript/rabbitmqctl", "sbin/rabbitmq-server", "sbin/rabbitmq-env"):
        (theirs / file).parent.mkdir(exist_ok=True)
        (theirs / file).write_text("#!/bin/sh\nexit 1\n")
        (theirs / file).chmod(0o755)
    link = tmp_path / "rabbitmq-server"
    link.symlink_to(theirs / "sbin" / "rabbitmq-server")
    monkeypatch.setenv("RELATUM_RABBITMQ_SERVER", str(link))
    return link


def home_of(script: Path, directory: Path, *plugins: str) -> set[str] | None:
    """The plugins in the home that a server is started with; None where it is started with its own."""
    server = LocalRabbitMQ(directory, plugins=["rabbitmq_stream", *plugins])
    with pytest.raises(ServerStartFailed, match="ended with status 1"):
        server.start()
    home = directory / "home"
    if not home.exists():
        return None
    names = {each.name.removesuffix("-1.2") for each in (home / "plugins").iterdir()}
    assert all((home / "plugins" / f"{name}-1.2" / "ebin" / f"{name}.app").exists() for name in names)
    assert {each.name for each in (home / "sbin").iterdir()} == {"rabbitmq-server", "rabbitmq-env"}
    assert (home / "escript" / "rabbitmqctl").exists()
    return names


def test_what_is_needed_is_there_with_what_that_needs(script: Path, tmp_path: Path) -> None:
    """The enabled ones, the server and all below them; the scripts beside; another start makes it anew."""
    least = {"rabbit", "ranch", "ra", "aten", "rabbitmq_stream", "osiris"}
    assert home_of(script, tmp_path / "server", "rabbitmq_management") == least | {"rabbitmq_management", "cowboy"}
    assert home_of(script, tmp_path / "server") == least


def test_what_lies_otherwise_stays_as_it_is(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of somebody's own, a plugin that is elsewhere, and one that says nothing of its needs."""
    assert home_of(script, tmp_path / "server") is not None
    assert home_of(script, tmp_path / "server", "rabbitmq_delayed_message_exchange") is None
    next(script.resolve().parent.parent.glob("plugins/osiris-*/ebin/osiris.app")).write_text("{application, osiris}.")
    assert home_of(script, tmp_path / "server") is None
    own = tmp_path / "own" / "start-rabbitmq"
    own.parent.mkdir()
    shutil.copy(script, own)
    monkeypatch.setenv("RELATUM_RABBITMQ_SERVER", str(own))
    assert home_of(own, tmp_path / "server") is None
