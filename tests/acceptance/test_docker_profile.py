"""docker/compose.yaml's recorder, brought up as its first lines say: it records, and its metrics answer outside."""

import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from relatum.local._identity import free_port
from tests.acceptance._command import Relatum
from tests.support import declare_stream, publish_plain, unique_name, wait_until

UP_S = 900
"""Seconds to build the image and start all; the first time, images are fetched."""

STREAMS = ("orders", "parcels")
EXIT_CODE = "{{.State.ExitCode}}"


@dataclass(frozen=True)
class Profile:
    """The profile with ports and a password of its own."""

    compose: tuple[str, ...]
    environment: dict[str, str]
    relatum: Relatum
    metrics_url: str

    def run(self, *arguments: str) -> str:
        """Run a command of Compose, which must succeed; return what it printed."""
        words = [*self.compose, *arguments]
        ended = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=UP_S)
        assert ended.returncode == 0, f"{arguments}: {ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def recorder(self, *arguments: str) -> str:
        """Run a command of Compose for the profile."""
        return self.run("--profile", "recorder", *arguments)

    def metrics(self) -> str:
        """What the recorder's port says to somebody outside of its container; nothing while it is not there."""
        try:
            with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


@pytest.fixture
def profile(pytestconfig: pytest.Config, docker_compose_file: str) -> Iterator[Profile]:
    """The two servers, up: as the file says, the recorder's profile comes later."""
    if not pytestconfig.getoption("--docker"):
        pytest.skip("brings up Docker containers: --docker runs it (make test-docker)")
    if shutil.which("docker") is None:
        pytest.fail("--docker needs a Docker engine and Compose v2, and there is no command `docker`", pytrace=False)
    amqp = free_port((0, -120, 1, 2, 3))
    ports = {"AMQP": amqp, "STREAM": amqp - 120, "MANAGEMENT": amqp + 1, "POSTGRESQL": amqp + 2, "METRICS": amqp + 3}
    password = "another"
    made = Profile(
        ("docker", "compose", "-p", unique_name("relatum-profile"), "-f", docker_compose_file),
        {
            **os.environ,
            **{f"RELATUM_{name}_PORT": str(port) for name, port in ports.items()},
            "RELATUM_PASSWORD": password,
            "RELATUM_STREAMS": " ".join(STREAMS),
        },
        Relatum(
            f"amqp://relatum:{password}@127.0.0.1:{amqp}/",
            f"rabbitmq-stream://relatum:{password}@127.0.0.1:{amqp - 120}/",
            f"postgresql://relatum:{password}@127.0.0.1:{amqp + 2}/relatum",
        ),
        f"http://127.0.0.1:{amqp + 3}/metrics",
    )
    try:
        made.run("up", "--detach", "--wait")
        yield made
    finally:
        made.recorder("down", "--volumes", "--timeout", "60")


def test_the_recorder_of_the_profile_records(profile: Profile) -> None:
    """It builds, migrates, records, tells its metrics to the host, and stops in order; and it is not root."""
    relatum = profile.relatum
    relatum.ok("migrate")
    relatum.ok("keys", "add", "order_id")
    for stream in STREAMS:
        declare_stream(relatum.broker_url, stream)
        publish_plain(relatum.broker_url, stream, [(b"x", {"order_id": number}) for number in range(3)])
    profile.recorder("up", "--build", "--detach")
    counted = "SELECT stream, count(*) FROM relatum.relations GROUP BY stream ORDER BY stream"
    with psycopg.connect(relatum.database_url, autocommit=True) as database:
        rows = [(stream, 3) for stream in STREAMS]
        try:
            wait_until(lambda: database.execute(counted).fetchall() == rows, 120, what="all rows", every_s=0.5)
        except AssertionError as error:
            raise AssertionError(profile.recorder("logs", "recorder")) from error
    recorded = [f'relatum_recorded_offset{{stream="{stream}"}} 2.0' for stream in STREAMS]
    wait_until(lambda: all(line in profile.metrics() for line in recorded), 60, what="the recorded offsets")
    assert relatum.json("find", "order_id", "1")["status"] == "found"
    wait_until(lambda: "(healthy)" in profile.recorder("ps", "recorder"), 120, what="the recorder's health")
    assert profile.recorder("exec", "-T", "recorder", "id", "-u").strip() != "0"
    container = profile.recorder("ps", "--all", "--quiet", "recorder").strip()
    profile.recorder("stop", "recorder")
    inspected = subprocess.run(
        ["docker", "inspect", "--format", EXIT_CODE, container], capture_output=True, text=True, check=True
    )
    assert inspected.stdout.strip() == "0"
