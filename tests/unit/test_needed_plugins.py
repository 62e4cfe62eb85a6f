"""Which of RabbitMQ's plugins a private one has at hand."""

from pathlib import Path

import pytest

from relatum.local._needed_plugins import needed_home

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
def script(tmp_path: Path) -> Path:
    """The server script of a package, by a link as Debian has them."""
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
        (theirs / file).touch()
    link = tmp_path / "rabbitmq-server"
    link.symlink_to(theirs / "sbin" / "rabbitmq-server")
    return link


def test_what_is_needed_is_there_with_what_that_needs(script: Path, tmp_path: Path) -> None:
    """The enabled ones, the server and all below them; the scripts beside; another start makes it anew."""
    home = tmp_path / "home"
    for plugins, more in ((["rabbitmq_management"], {"rabbitmq_management", "cowboy"}), ((), set())):
        assert needed_home(script, home, ["rabbitmq_stream", *plugins]) == home / "sbin"
        names = {each.name.removesuffix("-1.2") for each in (home / "plugins").iterdir()}
        assert names == {"rabbit", "ranch", "ra", "aten", "rabbitmq_stream", "osiris"} | more
        assert all((home / "plugins" / f"{name}-1.2" / "ebin" / f"{name}.app").exists() for name in names)
        assert {each.name for each in (home / "sbin").iterdir()} == {"rabbitmq-server", "rabbitmq-env"}
        assert (home / "escript" / "rabbitmqctl").exists()


def test_what_lies_otherwise_stays_as_it_is(script: Path, tmp_path: Path) -> None:
    """A script of somebody's own, a plugin that is elsewhere, and one that says nothing of its needs."""
    home, own = tmp_path / "home", tmp_path / "own" / "start-rabbitmq"
    own.parent.mkdir()
    own.touch()
    assert needed_home(script, home, ["rabbitmq_stream"]) is not None
    assert needed_home(own, home, ["rabbitmq_stream"]) is None
    assert not home.exists()
    assert needed_home(script, home, ["rabbitmq_delayed_message_exchange"]) is None
    next(script.resolve().parent.parent.glob("plugins/osiris-*/ebin/osiris.app")).write_text("{application, osiris}.")
    assert needed_home(script, home, ["rabbitmq_stream"]) is None
    assert not home.exists()
