"""The Spark session of the command `relatum spark`: where it runs, and what it needs to run there."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from relatum.errors import ConfigurationError, InvalidInput
from relatum_spark.command._failures import failure_of
from relatum_spark.table._jdbc import jdbc_jar

LOCAL: Final = "local[*,4]"
"""Where it runs unless told otherwise: on this machine, a task for each core, each tried four times as on a cluster."""

SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set by `spark-submit`, whose settings then hold."""

PYTHON: Final = "spark.pyspark.python"
JARS: Final = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")

_SETTINGS: Final = {
    "spark.app.name": "relatum",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Otherwise Spark opens a port for a web page on all addresses.
    "spark.ui.enabled": "false",
}


def settings_of(pairs: Sequence[str]) -> dict[str, str]:
    """Settings given as NAME=VALUE; the last of one name holds.

    Raises:
        InvalidInput: one has no `=`, or its name does not begin with `spark.`.
    """
    settings: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.startswith("spark."):
            # Only the name: a value may be a password.
            raise InvalidInput(f"--conf takes spark.NAME=VALUE, not {name!r}")
        settings[name] = value
    return settings


def session_settings(
    master: str | None, given: Mapping[str, str], jars: Sequence[str], *, is_submitted: bool, shows_progress: bool
) -> dict[str, str]:
    """All settings of the session, those given before our own.

    Args:
        master: Where it runs; None for what `spark-submit` says, else `local[*,4]`.
        given: Settings of the user.
        jars: Jars of the user; none for PostgreSQL's JDBC driver where it is found.
        is_submitted: Whether `spark-submit` started this process: then only what is given is set.
        shows_progress: Whether Spark draws its bar of tasks on stderr.

    Raises:
        InvalidInput: a jar is no file.
    """
    for jar in jars:
        if "://" not in jar and not os.path.isfile(jar):  # noqa: PTH113 - a path as Spark takes it
            raise InvalidInput(f"--jars names {jar}, and there is no such file")
    settings = {} if is_submitted else _SETTINGS | {"spark.ui.showConsoleProgress": str(shows_progress).lower()}
    settings |= given
    if jars:
        settings["spark.jars"] = ",".join(filter(None, [given.get("spark.jars"), *jars]))
    elif not is_submitted and not any(name in settings for name in JARS):
        settings |= _found_jar()
    if master is not None:
        settings["spark.master"] = master
    elif not is_submitted:
        settings.setdefault("spark.master", LOCAL)
    return settings


def _found_jar() -> dict[str, str]:
    try:
        return {"spark.jars": jdbc_jar()}
    except ConfigurationError:
        return {}  # what needs it says so; resolve, backfill and verify do not


@contextmanager
def spark_session(master: str | None, conf: Sequence[str], jars: Sequence[str]) -> Iterator[SparkSession]:
    """A session while the block runs; errors of Spark in it become Relatum's.

    Args:
        master: `local[4]`, `spark://host:7077`, `yarn`, `k8s://…`, or `sc://host:15002` for Spark Connect.
        conf: Settings as NAME=VALUE.
        jars: Jars for driver and executors.

    Raises:
        InvalidInput: a setting or jar is wrong.
        ConfigurationError: Java is missing, or no Spark answers there.
        RelatumError: what a task or the driver met.
    """
    session = _start(master, conf, jars)
    try:
        yield session
    except (PySparkException, Py4JJavaError) as error:
        raise failure_of(error) from error
    finally:
        session.stop()


def _start(master: str | None, conf: Sequence[str], jars: Sequence[str]) -> SparkSession:
    given = settings_of(conf)
    builder = SparkSession.Builder()
    if master is not None and master.startswith("sc://"):
        if jars:
            raise InvalidInput("--jars: over Spark Connect the server has its jars already; start it with them")
        settings = given
        builder = builder.remote(master)
    else:
        settings = session_settings(
            master, given, jars, is_submitted=SUBMITTED in os.environ, shows_progress=sys.stderr.isatty()
        )
        _prepare_environment(settings)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JJavaError, ImportError) as error:
        raise ConfigurationError(_not_started(error, settings.get("spark.master", master))) from error


def _prepare_environment(settings: Mapping[str, str]) -> None:
    """Set what PySpark reads from the environment alone.

    PySpark does not look at its own setting of the interpreter but where spark-submit runs first.
    """
    if PYTHON in settings:
        os.environ["PYSPARK_PYTHON"] = settings[PYTHON]
    if settings.get("spark.master", "").startswith("local"):
        # Without it tasks run `python3` of PATH, which has none of what this environment has.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # Without it the driver listens on an address that other machines reach.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _not_started(error: Exception, master: str | None) -> str:
    if isinstance(error, ImportError):
        return f"Spark Connect needs more of PySpark: pip install 'pyspark[connect]' ({error})"
    if isinstance(error, PySparkRuntimeError) and error.getCondition() == "JAVA_GATEWAY_EXITED":
        return (
            "Spark's JVM did not start; its words stand above. It needs Java 17 or newer (JAVA_HOME, or java in PATH)"
        )
    return f"Spark did not start with the master {master}: {failure_of(error)}"
