"""docker/compose.yaml's recorder, brought up as the file's first lines say."""

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum.store import make_engine
from tests.acceptance._command import Relatum
from tests.support import declare_stream, publish_plain, unique_name, wait_until
from tests.support.ports import free_port

LIMIT_S = 900
"""Seconds one command may take: the first builds the image, and fetches those it is made from."""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2 * LIMIT_S)]

STREAMS = ("orders", "parcels")
PASSWORD = "another"

IMAGES = """
services:
  migrate: {{image: {name}}}
  recorder: {{image: {name}}}
"""
"""What is laid over the file, so that the user's own image stays what it is."""

COUNTED = sa.text("SELECT stream, count(*) FROM relatum.relations GROUP BY stream ORDER BY stream")


@dataclass(frozen=True)
class Profile:
    """The file's services in a project of their own: own ports, password, volumes and image."""

    compose: tuple[str, ...]
    environment: dict[str, str]
    relatum: Relatum
    metrics_url: str

    def run(self, *arguments: str) -> str:
        """Run a command of Compose."""
        return _printed(*self.compose, *arguments, environment=self.environment)

    def recorder(self, *arguments: str) -> str:
        """Run a command of Compose for the profile."""
        return self.run("--profile", "recorder", *arguments)

    def state(self, of: str) -> str:
        """A field of the recorder's container: `Health.Status`, `ExitCode`."""
        container = self.recorder("ps", "--all", "--quiet", "recorder").strip()
        return _printed(self.compose[0], "inspect", "--format", f"{{{{.State.{of}}}}}", container).strip()

    def metrics(self) -> list[str]:
        """The lines that the recorder's port gives outside of its container; none while it does not answer."""
        try:
            with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
                return str(answer.read().decode()).splitlines()
        except OSError:
            return []

    def rows(self) -> list[tuple[str, int]]:
        """The relationships of each stream, counted."""
        engine = make_engine(self.relatum.database_url)
        try:
            with engine.connect() as connection:
                return [(stream, count) for stream, count in connection.execute(COUNTED)]
        finally:
            engine.dispose()


def _printed(*words: str, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert ended.returncode == 0, f"{' '.join(words)}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture
def profile(docker_command: str, docker_compose_file: str, tmp_path: Path) -> Iterator[Profile]:
    """The two servers, up, and their recorder's profile, which is the test's to bring up."""
    project = unique_name("relatum-profile")
    (tmp_path / "images.yaml").write_text(IMAGES.format(name=project))
    amqp = free_port((0, -120, 1, 2, 3))
    ports = {"AMQP": amqp, "STREAM": amqp - 120, "MANAGEMENT": amqp + 1, "POSTGRESQL": amqp + 2, "METRICS": amqp + 3}
    files = ("-f", docker_compose_file, "-f", str(tmp_path / "images.yaml"))
    made = Profile(
        (docker_command, "compose", "-p", project, *files),
        {
            **os.environ,
            **{f"RELATUM_{name}_PORT": str(port) for name, port in ports.items()},
            "RELATUM_PASSWORD": PASSWORD,
            "RELATUM_STREAMS": " ".join(STREAMS),
        },
        Relatum(
            f"amqp://relatum:{PASSWORD}@127.0.0.1:{amqp}/",
            f"rabbitmq-stream://relatum:{PASSWORD}@127.0.0.1:{amqp - 120}/",
            f"postgresql://relatum:{PASSWORD}@127.0.0.1:{amqp + 2}/relatum",
        ),
        f"http://127.0.0.1:{amqp + 3}/metrics",
    )
    try:
        made.run("up", "--detach", "--wait")
        yield made
    finally:
        made.recorder("down", "--volumes", "--timeout", "60")
        if _printed(docker_command, "image", "ls", "--quiet", project):
            _printed(docker_command, "image", "rm", project)


def test_the_recorder_of_the_profile_records(profile: Profile) -> None:
    """It migrates, records what look-ups find, tells its metrics to the host, is not root, and ends in order."""
    relatum = profile.relatum
    profile.recorder("run", "--rm", "migrate")
    relatum.ok("keys", "add", "order_id")
    for stream in STREAMS:
        declare_stream(relatum.broker_url, stream)
        publish_plain(relatum.broker_url, stream, [(b"x", {"order_id": number}) for number in range(3)])
    profile.recorder("up", "--detach")
    try:
        wait_until(lambda: profile.rows() == [(stream, 3) for stream in STREAMS], 120, what="all rows", every_s=0.5)
        recorded = {f'relatum_recorded_offset{{stream="{stream}"}} 2.0' for stream in STREAMS}
        wait_until(lambda: recorded.issubset(profile.metrics()), what="the recorded offsets", every_s=0.5)
        wait_until(lambda: profile.state("Health.Status") == "healthy", 120, what="its health", every_s=1)
    except AssertionError as error:
        error.add_note(profile.recorder("logs", "migrate", "recorder"))
        raise
    found = relatum.json("find", "order_id", "1")
    assert (found["status"], sorted(found["streams"])) == ("found", sorted(STREAMS)), found
    assert profile.recorder("exec", "-T", "recorder", "stat", "-c", "%U", "/proc/1").strip() == "relatum"
    profile.recorder("stop", "recorder")
    assert profile.state("ExitCode") == "0", profile.recorder("logs", "recorder")
