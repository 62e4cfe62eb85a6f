"""Seconds of the wall and of a processor that each file takes, with the programs and servers that it starts."""

import csv
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

BUDGET_S: Final = 600.0
"""Processor seconds a file may take with `--budget`, on a loaded machine: some start servers for the others."""

Taken = tuple[float, float, float]
"""Seconds of the wall, of a processor by this process, and by all that it started."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def now() -> Taken:
    ended, own = resource.getrusage(resource.RUSAGE_CHILDREN), time.process_time()
    return time.monotonic(), own, ended.ru_utime + ended.ru_stime + _living(os.getpid())


def _living(ancestor: int) -> float:
    below, seconds = defaultdict[int, list[int]](list), dict[int, float]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # ended between listing and reading
        below[int(fields[1])].append(int(entry.name))
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    found = list(below[ancestor])
    for process in found:
        found += below[process]
    return sum(seconds[process] for process in found)


class Clock:
    """A plugin of pytest. It sums by file, collects from the processes of pytest-xdist, and reports at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began, self._file, self._file_began = now(), "", now()
        self._files: dict[str, list[float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        """Count a test and its fixtures. A fixture of several files counts for the first one."""
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            self._file, self._file_began = file, now()
        result = yield
        if nextitem is None or nextitem.nodeid.partition("::")[0] != file:
            self._end_file()
        return result

    def _end_file(self) -> None:
        if self._file:
            self._add(self._file, [end - began for began, end in zip(self._file_began, now(), strict=True)])
            self._file = ""

    def _add(self, file: str, taken: list[float]) -> None:
        self._files[file] = [sum(both) for both in zip(self._files.get(file, [0.0] * 3), taken, strict=True)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, taken in getattr(node, "workeroutput", {}).get("clock", {}).items():
            self._add(file, taken)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what was counted, or write it down and look at the budgets."""
        self._end_file()
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["clock"] = self._files
        if hasattr(self._config, "workeroutput") or not self._files:
            return
        with (self._config.rootpath / ".venv" / "suite.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["file", "wall_s", "own_s", "started_s"])
            table.writerows([name, *(f"{each:.2f}" for each in self._files[name])] for _, name in self._dearest())
        if self._config.getoption("--budget") and self._over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _dearest(self) -> list[tuple[float, str]]:
        return sorted(((sum(taken[1:]), file) for file, taken in self._files.items()), reverse=True)

    def _over(self) -> list[str]:
        return [file for seconds, file in self._dearest() if seconds > BUDGET_S]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sum, the ten dearest files, and those over their budget."""
        if not self._files:
            return
        wall_s, own_s, started_s = (end - began for began, end in zip(self._began, now(), strict=True))
        in_files = sum(seconds for seconds, _ in self._dearest())
        terminalreporter.section("processor seconds: all of them in .venv/suite.csv")
        terminalreporter.write_line(f"{own_s + started_s:8.1f} in {wall_s:.0f} s, {in_files:.1f} of them in files")
        for seconds, file in self._dearest()[:10]:
            terminalreporter.write_line(f"{seconds:8.1f} {file}")
        for file in self._over():
            terminalreporter.write_line(f"{file} is over its budget of {BUDGET_S:.0f} s", red=True)
