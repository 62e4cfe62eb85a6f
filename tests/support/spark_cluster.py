"""A standalone Spark cluster of real processes whose nodes get Relatum by --py-files and --archives, as on any."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import pyspark

from tests.support._jvm import SPARK_START
from tests.support._processes import processes_naming
from tests.support._waiting import START_S, wait_until
from tests.support.ports import free_port
from tests.support.spark import JDBC_JAR

SPARK_HOME: Final = Path(pyspark.__file__).parent
HOST: Final = "127.0.0.1"

OF_EVERY_NODE: Final = ("pyarrow", "pandas")
"""What PySpark itself asks of a node's interpreter for Arrow."""

OF_EXTRAS: Final = ("psycopg-binary", "mmh3")
"""What the wheel requires through extras: `psycopg[binary]`, and its own `spark`."""

DEPENDENCIES: Final = "relatum_dependencies"
"""The name under which an executor finds the unpacked archive, in its own working directory."""


def installed_files(*distributions: str) -> dict[Path, str]:
    """The files of installed distributions and of all they require: where each is, and its path in site-packages."""
    waiting, seen, found = list(distributions), set[str](), dict[Path, str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for requirement in distribution.requires or ():
            required = re.match(r"[\w.-]+", requirement)
            with suppress(importlib.metadata.PackageNotFoundError):
                if required and "extra ==" not in requirement and required[0] != "pyspark":
                    importlib.metadata.distribution(required[0])
                    waiting.append(required[0])
        for file in distribution.files or ():
            if not file.as_posix().startswith("..") and "__pycache__" not in file.parts:
                found[Path(str(file.locate()))] = file.as_posix()
    return {path: name for path, name in found.items() if path.is_file()}


def zip_dependencies(target: Path) -> Path:
    """Pack what `relatum[spark]` requires and a node has not."""
    own = {file.locate() for file in importlib.metadata.distribution("relatum").files or ()}
    with zipfile.ZipFile(target, "w") as archive:
        for path, name in installed_files("relatum", *OF_EXTRAS).items():
            if path not in own:
                archive.write(path, name)
    return target


def build_wheel_zip(project: Path, directory: Path) -> Path:
    """Build the wheel, pure Python, which a zip needs, and name it as `--py-files` takes it: Spark refuses .whl."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(project)]
    subprocess.run(pip, check=True, capture_output=True, env=os.environ | {"CC": "no-such-compiler"})
    (wheel,) = directory.glob("*.whl")
    return wheel.rename(wheel.with_suffix(".zip"))


def make_bare_interpreter(directory: Path) -> Path:
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    (site,) = directory.glob("lib/python*/site-packages")
    for path, name in installed_files(*OF_EVERY_NODE).items():
        top = name.split("/")[0]
        source = Path(str(path)[: -len(name)]) / top
        if not (site / top).exists():
            (site / top).symlink_to(source)
    return python


@dataclass
class SparkCluster:
    """A master and workers of one core and one executor each, all processes of their own, as a context manager."""

    directory: Path
    workers: int
    python: Path = field(init=False)
    master_url: str = field(init=False)
    _processes: "list[subprocess.Popen[bytes]]" = field(init=False, default_factory=list)
    _ui_port: int = field(init=False)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.python = make_bare_interpreter(self.directory / "python")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        port = free_port((0, 1))
        self._ui_port = port + 1
        self.master_url = f"spark://{HOST}:{port}"
        ports = ["--port", str(port), "--webui-port", str(self._ui_port)]
        self._launch("master", "org.apache.spark.deploy.master.Master", "--host", HOST, *ports)
        wait_until(
            lambda: self._workers_alive() is not None, START_S, what=f"the master of {self.directory}", every_s=0.2
        )
        for number in range(self.workers):
            offer = ["--cores", "1", "--memory", "1024m"]
            where = ["--host", HOST, "--webui-port", "0", "--work-dir", str(self.directory / f"work{number}")]
            worker = "org.apache.spark.deploy.worker.Worker"
            self._launch(f"worker{number}", worker, *offer, *where, self.master_url)
        wait_until(lambda: self._workers_alive() == self.workers, START_S, what="all workers registered", every_s=0.2)

    def _launch(self, name: str, *arguments: str) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            command = [str(SPARK_HOME / "bin" / "spark-class"), *arguments]
            environment = self.environment | {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": SPARK_START}
            self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the cluster's processes: nothing that says where Relatum or its servers are."""
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME", "TMPDIR", "LANG") if name in os.environ
        }
        return kept | {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "PYSPARK_PYTHON": str(self.python),
        }

    def _workers_alive(self) -> int | None:
        assert self._processes[0].poll() is None, (self.directory / "master.log").read_text()
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._ui_port}/json/", timeout=10) as answer:
                state: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):  # for a moment this page is an ordinary web page
            return None
        return sum(worker["state"] == "ALIVE" for worker in state["workers"])

    def submit(
        self, script: Path, *arguments: str, py_files: Path, archive: Path, environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """Start `spark-submit` of a script: its driver in `environment`, its executors in the bare interpreter."""
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.master_url, "--jars", str(JDBC_JAR)]
        command += ["--py-files", str(py_files), "--archives", f"{archive}#{DEPENDENCIES}"]
        for name, value in (self._settings() | {"spark.executorEnv.PYTHONPATH": DEPENDENCIES}).items():
            command += ["--conf", f"{name}={value}"]
        # The driver's machine plans data sources with the nodes' interpreter, which gets no archives there, and for a
        # streaming query no --py-files either.
        unpacked = self.directory / "driver" / DEPENDENCIES
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(unpacked)
        own = {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYTHONPATH": f"{py_files}:{unpacked}"}
        with (self.directory / "driver.log").open("ab") as output:
            driver = self.environment | own | dict(environment)
            return subprocess.Popen([*command, str(script), *arguments], env=driver, stdout=output, stderr=output)

    def _settings(self) -> dict[str, str]:
        return {
            "spark.driver.host": HOST,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.driver.extraJavaOptions": SPARK_START,
            "spark.executor.extraJavaOptions": SPARK_START,
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "4",
            "spark.ui.enabled": "false",
            "spark.ui.liveUpdate.period": "0",  # so that the driver's counts of tasks are never stale
            "spark.log.level": "WARN",
        }

    def stop(self) -> None:
        """End all processes, the workers before the master, and executors that outlived their worker."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for executor in processes_naming(str(self.directory)):
            with suppress(ProcessLookupError):
                os.kill(executor, signal.SIGKILL)
