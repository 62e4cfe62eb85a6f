"""`relatum web`: the installed command, as it is started, asked and ended."""

import signal

import httpx
import pytest

from tests.acceptance._command import LIMIT_S, Relatum
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
                assert "one" in client.get(f"message?stream={stream_name}&offset=0").text
                assert client.get("static/../pyproject.toml").status_code == 404
        finally:
            process.send_signal(number)
        said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "Traceback" not in said[1]


def test_where_anyone_could_look_it_makes_a_token(relatum: Relatum, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address lets one in, once; one that is given is not printed."""
    with relatum.start("web", "--host", "0.0.0.0", "--port", "0") as process:
        try:
            assert process.stdout is not None
            address, _, token = process.stdout.readline().strip().removeprefix(ADDRESS).partition("?token=")
            with httpx.Client(base_url=address.replace("0.0.0.0", "127.0.0.1"), timeout=LIMIT_S) as client:
                assert client.get("api/keys").status_code == 401
                assert client.get(f"api/keys?token={token}").status_code == 303
                assert client.get("api/keys").status_code == 200
        finally:
            process.terminate()
        process.communicate(timeout=LIMIT_S)
    monkeypatch.setenv("RELATUM_WEB_TOKEN", "given-by-whoever-starts-it")
    with relatum.start("web", "--host", "0.0.0.0", "--port", "0") as process:
        try:
            assert process.stdout is not None
            assert "token" not in process.stdout.readline()
        finally:
            process.terminate()
        assert "given-by" not in str(process.communicate(timeout=LIMIT_S))
