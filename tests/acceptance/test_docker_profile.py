"""docker/compose.yaml, brought up by pytest-docker: its two servers, and the profile that records beside them."""

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from pytest_docker.plugin import DockerComposeExecutor, Services, execute

from relatum.store.database import make_engine
from tests.acceptance._command import Relatum
from tests.conftest import DOCKER_PASSWORD
from tests.support import declare_stream, publish_plain, unique_name, wait_until
from tests.support.ports import free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

IMAGES = """
services:
  migrate: {{image: {name}}}
  recorder: {{image: {name}}}
"""
"""What is laid over the file, so that the user's own image stays what it is."""

COUNTED = sa.text("SELECT stream, count(*) FROM relatum.relations GROUP BY stream ORDER BY stream")


@pytest.fixture
def relatum(docker_services: Services, docker_ip: str) -> Relatum:
    amqp, stream = (docker_services.port_for("rabbitmq", port) for port in (5672, 5552))
    at = f"relatum:{DOCKER_PASSWORD}@{docker_ip}"
    database = f"postgresql://{at}:{docker_services.port_for('postgresql', 5432)}/relatum"
    return Relatum(f"amqp://{at}:{amqp}/", f"rabbitmq-stream://{at}:{stream}/", database)


@pytest.fixture
def compose(
    relatum: Relatum,
    docker_compose_command: str,
    docker_compose_file: str,
    docker_compose_project_name: str,
    tmp_path: Path,
) -> Iterator[Callable[[str], str]]:
    image, images = unique_name("relatum-profile"), tmp_path / "images.yaml"
    images.write_text(IMAGES.format(name=image))
    files = [docker_compose_file, str(images)]
    executor = DockerComposeExecutor(docker_compose_command, files, docker_compose_project_name)
    try:
        yield lambda command: str(executor.execute(f"--profile recorder {command}").decode()).strip()
    finally:
        executor.execute("--profile recorder rm --stop --force migrate recorder")
        execute(f"docker image rm {image}", success_codes=(0, 1))


def test_its_recorder_records(compose: Callable[[str], str], relatum: Relatum, monkeypatch: pytest.MonkeyPatch) -> None:
    """It migrates, records what lookups find, serves its metrics to the host, is not root, and stops in order."""
    streams, port = (unique_name("orders"), unique_name("parcels")), free_port((0,))
    monkeypatch.setenv("RELATUM_STREAMS", " ".join(streams))
    monkeypatch.setenv("RELATUM_METRICS_PORT", str(port))
    compose("run --rm --build migrate")
    relatum.ok("keys", "add", "order_id")
    for stream in streams:
        declare_stream(relatum.broker_url, stream)
        publish_plain(relatum.broker_url, stream, [(b"x", {"order_id": number}) for number in range(3)])
    compose("up --detach recorder")
    container = compose("ps --quiet recorder").splitlines()[-1]

    def state(of: str) -> str:
        return str(execute(f"docker inspect --format '{{{{.State.{of}}}}}' {container}").decode()).strip()

    engine = make_engine(relatum.database_url)

    def is_recorded() -> bool:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(COUNTED)] == [(stream, 3) for stream in streams]

    try:
        wait_until(is_recorded, 120, what="all rows", every_s=0.5)
        wait_until(lambda: state("Health.Status") == "healthy", 120, what="its health", every_s=1)
    except AssertionError as error:
        error.add_note(compose("logs migrate recorder"))
        raise
    finally:
        engine.dispose()
    wanted = {f'relatum_recorded_offset{{stream="{stream}"}} 2.0' for stream in streams}

    def is_told() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return wanted <= set(answer.read().decode().splitlines())

    wait_until(is_told, what="the recorded offsets", every_s=0.5)
    found = relatum.json("find", "order_id", "1")
    assert (found["status"], sorted(found["streams"])) == ("found", sorted(streams)), found
    assert compose("exec -T recorder stat -c %U /proc/1").splitlines()[-1] == "relatum"
    compose("stop recorder")
    assert state("ExitCode") == "0", compose("logs recorder")
