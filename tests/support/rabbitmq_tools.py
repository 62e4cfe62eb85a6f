"""RabbitMQ's own tools, run on a private broker."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relatum.local import LocalRabbitMQ
from relatum.local._rabbitmq import DISTRIBUTION_OFFSET
from tests.support._waiting import START_S


def run_tool(server: LocalRabbitMQ, name: str, *arguments: str) -> str:
    """Run a tool, "rabbitmqctl" or "rabbitmq-streams", on a broker; gives what it printed."""
    script = Path(server._command()[0]).with_name(name)
    environment = {
        **server._environment(),
        # A private broker has no epmd; the tool must not listen where the broker does.
        "RABBITMQ_CTL_ERL_ARGS": (
            f"-start_epmd false -erl_epmd_port {server.port + DISTRIBUTION_OFFSET} -dist_listen false"
        ),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "",
    }
    command = [str(script), "--node", "relatum@localhost", *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@contextmanager
def traced_broker(directory: Path) -> Iterator[LocalRabbitMQ]:
    """A private broker whose firehose is on; its directory goes with it."""
    with LocalRabbitMQ(directory, start_timeout_s=START_S) as server:
        run_tool(server, "rabbitmqctl", "trace_on")
        yield server
    shutil.rmtree(directory, ignore_errors=True)
