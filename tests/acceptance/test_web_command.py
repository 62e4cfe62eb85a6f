"""`relatum web`: the installed command, as it is started, asked and ended."""

import os
import signal
import subprocess

import httpx
import pytest

from relatum_consumer.web._passwords import is_password
from tests.acceptance._command import COMMAND, LIMIT_S, Relatum
from tests.support import publish_plain

ADDRESS = "RELATUM_WEB_URL="


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_stop(
    relatum: Relatum, amqp_url: str, stream_name: str, number: signal.Signals
) -> None:
    """It prints its address, answers there, and ends with 0 and without a word of errors."""
    publish_plain(amqp_url, stream_name, [b"one"])
    with relatum.start("web", "--port", "0") as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line.startswith(ADDRESS), process.communicate()
            address = line.removeprefix(ADDRESS)
            with httpx.Client(base_url=address, timeout=LIMIT_S) as client:
                assert client.get("api/health").json() == {"is_well": True}
                assert "one" in client.get(f"streams/{stream_name}/0").text
                assert client.get("static/../pyproject.toml").status_code == 404
        finally:
            process.send_signal(number)
        said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "Traceback" not in said[1]


def test_it_does_not_listen_where_anyone_could_look(relatum: Relatum) -> None:
    """Without a password it ends with the code of configuration, and says what to do."""
    ended = relatum.run("web", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 3
    assert "--hash-password" in ended.stderr


def test_a_password_is_hashed_and_not_shown() -> None:
    """Typed twice, and what is printed is its hash alone."""
    ended = subprocess.run(
        [COMMAND, "web", "--hash-password"],
        input="correct horse\ncorrect horse\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ,
        check=True,
    )
    assert is_password("correct horse", ended.stdout.strip())
    assert "correct horse" not in ended.stdout + ended.stderr
