"""Running the installed command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from relatum import Broker
from tests.support import JVM_VARIABLES, wait_until
from tests.support.zygote import forking

COMMAND = Path(sys.executable).with_name("relatum")
"""The console script of this environment: what a user runs."""

IMPORTED = ("relatum.*", "relatum_consumer.*", "relatum_cli.*", "rich.table", "pydantic.type_adapter")
"""What the commands import, all but Spark's: the more there is of it, the quicker they begin."""

LIMIT_S = 240
"""Seconds any one command of the tests may take, on a machine however busy."""


@dataclass(frozen=True)
class Relatum:
    """The command with the URLs of this test in its environment."""

    broker_url: str
    stream_url: str
    database_url: str

    @property
    def broker(self) -> Broker:
        return Broker(self.broker_url, stream_url=self.stream_url)

    @property
    def environment(self) -> dict[str, str]:
        urls = zip(("BROKER", "STREAM", "DATABASE"), (self.broker_url, self.stream_url, self.database_url), strict=True)
        named = {f"RELATUM_{name}_URL": url for name, url in urls}
        return {**os.environ, **JVM_VARIABLES, **named, "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, environment=self.environment)

    def ok(self, *arguments: str) -> str:
        ended = self.run(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def json(self, *arguments: str) -> Any:
        """Run it with `--json`, whatever its exit code; return the document."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def start(self, *arguments: str, stderr: Path | None = None, stdin: int | None = None) -> "subprocess.Popen[str]":
        """Start it, to be ended by the caller; what it says goes to a file, if one is given."""
        with stderr.open("a") if stderr is not None else nullcontext(subprocess.PIPE) as errors:
            files = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": errors}
            return subprocess.Popen([COMMAND, *arguments], env=self.environment, text=True, **files)

    @contextmanager
    def running(self, *arguments: str, stderr: Path | None = None) -> "Iterator[subprocess.Popen[str]]":
        process = self.start(*arguments, stderr=stderr)
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=LIMIT_S)

    def await_recorded(self, stream: str) -> dict[str, Any]:
        def status() -> dict[str, Any] | None:
            ended = self.run("status", stream, "--json")
            found: dict[str, Any] = json.loads(ended.stdout)[0] if ended.returncode == 0 else {}
            return found if found.get("lag_offsets") == 0 and found["covered"]["time"] else None

        return wait_until(status, LIMIT_S, what=f"the recording of {stream}", every_s=0.25)


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in a process of its own that was forked of one with its imports."""
    return _ended(_forking(), COMMAND, *arguments, environment=environment)


def run_installed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _ended(COMMAND, *arguments)


def _ended(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    given = environment or {name: value for name, value in os.environ.items() if not name.startswith("RELATUM_")}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, env=given, timeout=LIMIT_S, **options)


@cache
def _forking() -> Path:
    return forking("relatum_cli.start:main", *IMPORTED)
