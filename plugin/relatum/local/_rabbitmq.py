"""A private RabbitMQ from the installation on the machine."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import pika
import pika.exceptions

from relatum.common.checks import checked_names, shown
from relatum.common.client_logs import own_connection
from relatum.errors import InvalidInput, ServerStartFailed
from relatum.local._server import LAST_LINES, LocalServer, write_private

PACKAGED_SERVER: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The server script of the packages for Debian and Ubuntu. Debian's wrapper `/usr/sbin/rabbitmq-server` accepts only
the users root and rabbitmq, and runs the server as rabbitmq."""

SERVER_VARIABLE: Final = "RELATUM_RABBITMQ_SERVER"
"""Environment variable with the path of another server script, such as that of RabbitMQ's generic Unix archive."""

USER: Final = "relatum"
"""The broker's only user, an administrator."""

STREAM_OFFSET: Final = -120
"""Distance from the AMQP port to the stream port, as from 5672 to 5552."""

DISTRIBUTION_OFFSET: Final = 1
"""Distance from the AMQP port to the port of Erlang's distribution."""

CRASH_REPORT_LINES: Final = 200
"""Last lines that are searched for the reason of a failed boot. Erlang's crash reports after it had 30 to 60 lines."""

REASON_LINES: Final = 6
"""Lines of the reason, beginning with "BOOT FAILED"."""


class LocalRabbitMQ(LocalServer):
    """A private RabbitMQ with the stream plugin. Any user can run it; other RabbitMQ servers do not affect it.

    It does not start epmd, Erlang's port mapper: epmd would outlive the server, and other nodes would share it.
    Instead, `-erl_epmd_port` sets the node's distribution port (since Erlang 23.1); `rabbitmqctl` needs the same
    option to reach the node.

    Args:
        directory: The directory for all of the server's files; created if missing, accessible to this user only.
        configuration: Additional settings of rabbitmq.conf by name. Each start writes them, so you may change them
            between starts. None (default): no settings.
        plugins: Names of the plugins to enable. Default: `rabbitmq_stream`.
        start_timeout_s: Maximum seconds of a start, above 0. Default: 120; a start usually takes 3 to 4 s.

    Source: https://www.rabbitmq.com/docs/configure, https://www.erlang.org/doc/apps/erts/erl_cmd.html
    """

    name = "RabbitMQ"
    _port_offsets: ClassVar[Sequence[int]] = (0, STREAM_OFFSET, DISTRIBUTION_OFFSET)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        configuration: Mapping[str, str] | None = None,
        plugins: Sequence[str] = ("rabbitmq_stream",),
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(directory, start_timeout_s=start_timeout_s)
        if configuration is not None and not isinstance(configuration, Mapping):
            raise InvalidInput(f"configuration= takes a mapping, not {shown(configuration)}")
        self.configuration = dict(configuration or {})
        self._plugins = checked_names("plugins", plugins)

    @property
    def stream_port(self) -> int:
        """The port of the stream protocol."""
        return self.port + STREAM_OFFSET

    @property
    def broker_url(self) -> str:
        """The `amqp://` URL, with user and password."""
        return f"amqp://{USER}:{self._identity.password}@127.0.0.1:{self.port}/"

    @property
    def stream_url(self) -> str:
        """The `rabbitmq-stream://` URL, with user and password."""
        return f"rabbitmq-stream://{USER}:{self._identity.password}@127.0.0.1:{self.stream_port}/"

    def _prepare(self) -> None:
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "stream.listeners.tcp.1": f"127.0.0.1:{self.stream_port}",
            "stream.advertised_host": "127.0.0.1",
            "stream.advertised_port": str(self.stream_port),
            "default_user": USER,
            "default_pass": self._identity.password,
            "log.console.level": "info",
            **self.configuration,
        }
        if "rabbitmq_stream" not in self._plugins:
            settings = {name: value for name, value in settings.items() if not name.startswith("stream.")}
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        write_private(self.directory / "rabbitmq.conf", "".join(lines))
        write_private(self.directory / "enabled_plugins", f"[{','.join(self._plugins)}].\n")
        write_private(self.directory / "rabbitmq-env.conf", "")

    def _command(self) -> list[str]:
        configured = os.environ.get(SERVER_VARIABLE)
        script = Path(configured) if configured else PACKAGED_SERVER
        if not script.exists():
            raise ServerStartFailed(
                f"RabbitMQ is not installed ({script} is missing). Install it "
                "(Debian, Ubuntu: apt-get install --no-install-recommends rabbitmq-server), set "
                f"{SERVER_VARIABLE} to its server script, or use Docker: docker compose -f docker/compose.yaml up."
            )
        return [str(script)]

    def _environment(self) -> dict[str, str]:
        # Settings of the machine's RabbitMQ or of another Erlang node must not affect this node.
        excluded = ("RABBITMQ_", "ERL_", "NOTIFY_SOCKET")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(excluded)}
        distribution_port = self.port + DISTRIBUTION_OFFSET
        return {
            **inherited,
            "HOME": str(self.directory),  # for the Erlang cookie
            "RABBITMQ_NODENAME": "relatum@localhost",
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "rabbitmq-env.conf"),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.directory / "advanced.config"),
            "RABBITMQ_CONFIG_FILES": str(self.directory / "conf.d"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(self.directory),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                # A name here starts Erlang's distribution before RabbitMQ, which then does not call epmd.
                f"-sname relatum@localhost -start_epmd false -erl_epmd_port {distribution_port}"
                " -kernel inet_dist_use_interface {127,0,0,1}"
            ),
            "ERL_CRASH_DUMP_BYTES": "0",
        }

    def _answers(self) -> bool:
        try:
            if "rabbitmq_stream" in self._plugins:
                socket.create_connection(("127.0.0.1", self.stream_port), timeout=1.0).close()
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()  # fails faster than pika
            parameters = pika.URLParameters(self.broker_url)
            parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = 5.0
            with own_connection():
                pika.BlockingConnection(parameters).close()
        except (OSError, pika.exceptions.AMQPError):
            return False
        return True

    def _failure_output(self) -> str:
        # The reason follows "BOOT FAILED". After it, Erlang's crash reports repeat it at length.
        lines = self.last_lines(CRASH_REPORT_LINES).splitlines()
        headlines = [number for number, line in enumerate(lines) if "BOOT FAILED" in line]
        return "\n".join(lines[: headlines[-1] + REASON_LINES][-LAST_LINES:]) if headlines else self.last_lines()
