"""`relatum web` and `relatum mcp`: the installed commands, as they are started, asked and ended."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import publish_plain
from tests.support.agents import over_http

ADDRESS = "RELATUM_WEB_URL="


@contextmanager
def web(relatum: Relatum, *arguments: str, end: signal.Signals = signal.SIGTERM) -> Iterator[tuple[str, list[str]]]:
    said = list[str]()
    with relatum.start("web", "--port", "0", *arguments) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line.startswith(ADDRESS), process.communicate()
            yield line.removeprefix(ADDRESS), said
        finally:
            process.send_signal(end)
            said += process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_ended(relatum: Relatum, amqp_url: str, stream_name: str, end: signal.Signals) -> None:
    """The command prints its address, answers people and agents there, and ends with 0 and without errors."""
    publish_plain(amqp_url, stream_name, [b"one"])
    with web(relatum, "--mcp", end=end) as (address, said):
        with httpx.Client(base_url=address, timeout=LIMIT_S) as client:
            assert client.get("api/health").json() == {"is_well": True}
            assert "one" in client.get(f"message?stream={stream_name}&offset=0").text
            assert client.get("static/../pyproject.toml").status_code == 404
        with over_http(address) as agent:
            assert agent.answer("read", stream=stream_name, offset=0)["body"]["part"] == "one"
    assert f"Tools for agents are at {address}mcp\n" in said[1]
    assert "Traceback" not in said[1]


def test_where_anyone_could_look_it_makes_a_token(relatum: Relatum, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all interfaces the command makes a token, which its address has; a token that was given is not printed."""
    with web(relatum, "--host", "0.0.0.0") as (shown, _):
        address, _, token = shown.partition("?token=")
        with httpx.Client(base_url=address.replace("0.0.0.0", "127.0.0.1"), timeout=LIMIT_S) as client:
            assert client.get("api/keys").status_code == 401
            assert client.get(f"api/keys?token={token}").status_code == 303
            assert client.get("api/keys").status_code == 200
    monkeypatch.setenv("RELATUM_WEB_TOKEN", "given-by-whoever-starts-it")
    with web(relatum, "--host", "0.0.0.0") as (shown, said):
        assert "token" not in shown
    assert "given-by" not in str(said)


HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


def _ask(process: "subprocess.Popen[str]", **message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()


def test_stdout_has_the_protocol_alone(relatum: Relatum, amqp_url: str, stream_name: str, tmp_path: Path) -> None:
    """Each line on stdout is an answer, logs go to stderr, and the end of stdin ends the command with 0."""
    publish_plain(amqp_url, stream_name, [b"one"])
    logged = tmp_path / "stderr"
    with relatum.start("mcp", stdin=subprocess.PIPE, stderr=logged) as process:
        assert process.stdout is not None
        _ask(process, id=1, method="initialize", params=HELLO)
        first = json.loads(process.stdout.readline())
        assert first["result"]["serverInfo"]["name"] == "relatum"
        _ask(process, method="notifications/initialized")
        read = {"name": "read", "arguments": {"stream": stream_name, "offset": 0}}
        _ask(process, id=2, method="tools/call", params=read)
        answer = json.loads(process.stdout.readline())["result"]
        assert answer["structuredContent"]["answer"]["body"]["part"] == "one"
        _ask(process, id=3, method="tools/call", params={"name": "find", "arguments": {"key": "no", "value": "x"}})
        failed = json.loads(process.stdout.readline())["result"]
        assert failed["isError"]
        assert failed["content"][0]["text"].endswith("No key is defined.")
        rest, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in logged.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_it_waits(relatum: Relatum, number: signal.Signals) -> None:
    """A signal ends `relatum mcp` with 0, though a thread waits for stdin."""
    with relatum.start("mcp", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        _ask(process, id=1, method="initialize", params=HELLO)
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) == 0
        said = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in said[1]


def test_without_servers_it_says_which_it_lacks(relatum: Relatum) -> None:
    """On stderr, with the code of configuration."""
    ended = Relatum("", "", relatum.database_url).run("mcp")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert "RELATUM_BROKER_URL" in ended.stderr
