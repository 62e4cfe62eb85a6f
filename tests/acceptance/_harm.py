"""Harm done at random moments to processes, to the lines between them and the servers, and to the servers."""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relatum.local import LocalServer, LocalServers
from tests.support import stream_available, wait_until
from tests.support.proxy import Proxy

LINE_HARMS = ("cut", "freeze", "lose answers of")
"""What happens to a line: its connections end; nothing arrives for now; or answers do not, and the connections end."""

PAUSE_S = (0.05, 1.0)
LOST_S = (0.02, 0.5)
"""Seconds for which what is sent arrives, and its answers do not, before the line is cut."""

WORKS_S = 300.0
"""Seconds within which work must continue after a harm, on a busy machine."""

Harms = Mapping[str, Callable[[], object]]

leaves_sockets = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)
"""A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector."""


def start_logged(log: Path, *command: object) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)


def assert_no_traceback(*logs: Path) -> None:
    for text in (log.read_text() for log in logs):
        assert "Traceback" not in text, text[-5000:]


class Party(AbstractContextManager["Party"]):
    """Processes that do the same, each replaced by another when it is killed. All are ended with its block."""

    def __init__(self, start: "Callable[[int], subprocess.Popen[Any]]", count: int) -> None:
        self._start = start
        self.processes = [start(number) for number in range(count)]

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].communicate()
        self.processes[number] = self._start(number)

    def kill_any(self, chance: random.Random) -> None:
        self.kill(chance.randrange(len(self.processes)))

    @contextmanager
    def frozen(self, number: int) -> "Iterator[subprocess.Popen[Any]]":
        self.processes[number].send_signal(signal.SIGSTOP)
        try:
            yield self.processes[number]
        finally:
            self.processes[number].send_signal(signal.SIGCONT)

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(90)
            process.kill()
            process.communicate()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Harm(AbstractContextManager["Harm"]):
    """Does harm to the lines and servers behind its URLs: each kind once, then for `lasts_s` any of them."""

    def __init__(self, servers: LocalServers, chance: random.Random, lasts_s: float) -> None:
        self.servers = servers
        self.done: Counter[str] = Counter()
        self.chance = chance
        self._lasts_s = lasts_s
        self._stack = ExitStack()
        urls = {"AMQP": servers.broker_url, "streams": servers.stream_url, "database": servers.database_url}
        self.lines = {name: self._stack.enter_context(Proxy.to(url)) for name, url in urls.items()}
        self.broker_url, self.stream_url, self.database_url = (self.lines[name].url(urls[name]) for name in urls)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.servers.database_url) as connection:
            return connection.execute(query.encode(), values or None).fetchall()

    def work(
        self,
        works: Callable[[], float],
        streams: Sequence[str],
        parties: Mapping[str, Party],
        *,
        frozen_s: float,
        more: Harms | None = None,
    ) -> None:
        """Do harm again and again, half of the time as soon as `works`, how much is done, has grown since the last.

        Processes of `parties`, lines and servers are frozen for up to `frozen_s`; `more` adds harms, or replaces some.
        """
        harms: dict[str, Callable[[], object]] = {}
        for name, party in parties.items():
            harms[f"kill {name}"] = partial(party.kill_any, self.chance)
            harms[f"freeze {name}"] = partial(self._freeze, party, frozen_s)
        lines = {
            f"{kind} {name}": partial(self._break, name, kind, frozen_s) for name in self.lines for kind in LINE_HARMS
        }
        for name, server in (("RabbitMQ", self.servers.rabbitmq), ("PostgreSQL", self.servers.postgresql)):
            harms[f"restart {name}"] = partial(self._restart, server, streams)
            harms[f"freeze {name}"] = partial(self._freeze_server, server, frozen_s)
        harms |= {**lines, **(more or {})}
        names = sorted(harms)
        if not self._lasts_s:
            # One kind of harm in each line.
            names = [name for name in names if name not in lines]
            names += [f"{self.chance.choice(LINE_HARMS)} {line}" for line in self.lines]
        first = self.chance.sample(names, len(names))
        began = time.monotonic()
        while first or time.monotonic() < began + self._lasts_s:
            time.sleep(self.chance.uniform(*PAUSE_S))  # Not a wait for a condition: the test is about this moment.
            harm = first.pop() if first else self.chance.choice(sorted(harms))
            before = works()
            print(time.strftime("%H:%M:%S"), harm)
            harms[harm]()
            self.done[harm] += 1
            for name, party in parties.items():
                assert all(each.poll() is None for each in party.processes), f"{name} ended by itself"
            if self.chance.random() < 0.5:
                wait_until(lambda before=before: works() > before, WORKS_S, what=f"work goes on after: {harm}")  # type: ignore[misc]
        before = works()
        wait_until(lambda: works() > before, WORKS_S, what="work goes on")
        print(f"{self.done.total()} harms in {time.monotonic() - began:.0f} s: {dict(sorted(self.done.items()))}")

    def _freeze(self, party: Party, most_s: float) -> None:
        with party.frozen(self.chance.randrange(len(party.processes))):
            time.sleep(self.chance.uniform(0.1, most_s))

    def _break(self, name: str, kind: str, most_s: float) -> None:
        line = self.lines[name]
        if kind == "cut":
            self.chance.choice((line.cut, line.reset))()
        elif kind == "freeze":
            line.mode = "frozen"
            time.sleep(self.chance.uniform(0.1, most_s))
            line.mode = "pass"
        else:
            # Nobody may connect: a connection could miss a part of its answers.
            line.accepts, line.mode = False, "blackhole_replies"
            time.sleep(self.chance.uniform(*LOST_S))
            line.reset()
            line.mode, line.accepts = "pass", True

    def _restart(self, server: LocalServer, streams: Sequence[str]) -> None:
        if self.chance.random() < 0.7:
            server.kill()
        server.restart()
        if server is self.servers.rabbitmq:
            for stream in streams:
                wait_until(partial(stream_available, self.servers.broker_url, stream), what=f"{stream} is served again")

    def _freeze_server(self, server: LocalServer, most_s: float) -> None:
        server.freeze()
        time.sleep(self.chance.uniform(0.1, most_s))
        server.thaw()
