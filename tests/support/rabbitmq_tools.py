"""RabbitMQ's own tools, run on a private broker; and users there that may do little."""

import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from relatum.local import LocalRabbitMQ
from tests.support._waiting import START_S, wait_until
from tests.support.ports import DISTRIBUTION_OFFSET

PASSWORD = "secret"


def run_tool(
    server: LocalRabbitMQ, name: str, *arguments: str, node: str = "relatum@localhost", port: int | None = None
) -> str:
    """Run a tool to its end, at a node of Erlang's distribution that listens on a port; gives what it printed."""
    script = Path(server._command()[0]).with_name(name)
    # A private broker has no epmd; the tool must not listen where the broker does.
    distribution = f"-start_epmd false -erl_epmd_port {port or server.port + DISTRIBUTION_OFFSET} -dist_listen false"
    own = {"RABBITMQ_CTL_ERL_ARGS": distribution, "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ""}
    environment = server._environment() | own
    command = [str(script), "--node", node, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def evaluate(server: LocalRabbitMQ, expression: str) -> str:
    """Evaluate Erlang on a broker, by `erl_call`: `rabbitmqctl eval` takes a second of a processor."""
    return erl_call(f"127.0.0.1:{server.port + DISTRIBUTION_OFFSET}", server.directory, expression)


def erl_call(address: str, home: Path, expression: str) -> str:
    """The same at an address of Erlang's distribution, by the cookie in a directory."""
    # By a random name: a node refuses a name that it believes to be connected, such as that of one that has just left.
    cookie = (home / ".erlang.cookie").read_text()
    command = ["erl_call", "-r", "-address", address, "-c", cookie, "-timeout", "90", "-e"]
    ended = subprocess.run(command, input=f"{expression}.\n", capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.startswith("{ok, "), (expression, ended.stdout, ended.stderr)
    return ended.stdout.removeprefix("{ok, ").rstrip()[:-1]


def renew(server: LocalRabbitMQ) -> None:
    """Make a running broker as it was when it first started, which takes a sixth of what a start takes."""
    change_stopped(
        partial(evaluate, server),
        # For RabbitMQ 3.12 and later, and for earlier versions.
        "ok = try rabbit_db:reset() catch error:undef -> rabbit_mnesia:reset() end,"
        " application:set_env(rabbit, trace_vhosts, [])",
    )
    wait_until(server._answers, what="an answer")


def change_stopped(evaluate: Callable[[str], str], change: str) -> None:
    """Stop a running broker, evaluate a change, and start it again."""
    # It answers before its start has ended; a second start then gets "ok", and nothing is started.
    wait_until(lambda: evaluate("whereis(rabbit_boot)") == "undefined", what="the end of its start")
    evaluate(f"ok = rabbit:stop(), {change}, ok = rabbit:start()")


def add_users(server: LocalRabbitMQ, users: Mapping[str, tuple[str, str, str]]) -> None:
    rows = ",".join("{" + ",".join(f'<<"{text}">>' for text in (name, *rights)) + "}" for name, rights in users.items())
    made = (
        f'[begin ok = rabbit_auth_backend_internal:add_user(U, <<"{PASSWORD}">>, <<"x">>),'
        ' ok = rabbit_auth_backend_internal:set_permissions(U, <<"/">>, C, W, R, <<"x">>) end'
        " || {U, C, W, R} <- [ROWS]]"
    )
    evaluate(server, made.replace("ROWS", rows.replace("\\", "\\\\")))


def as_user(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()
