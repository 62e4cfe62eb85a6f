"""A Spark session for tests, on this machine."""

import os
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support._jvm import SPARK_START
from tests.support.spark_python import spark_python

JDBC_JAR = Path(os.environ.get("RELATUM_JDBC_JAR", "/usr/share/java/postgresql.jar"))


def fixed_settings(directory: Path) -> dict[str, str]:
    """What is set for any session of the tests, whose files lie in `directory`."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": SPARK_START,
        "spark.jars": str(JDBC_JAR),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        # To compile a plan costs more than to run it over a few hundred rows. Clusters and commands compile theirs.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }


def make_session(directory: Path, master: str = "local[2]", **settings: str) -> SparkSession:
    """Start a session whose files lie in `directory`; underscores in the names of settings stand for dots."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(spark_python())
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.Builder().master(master).appName("relatum tests")
    own = {name.replace("_", "."): value for name, value in settings.items()}
    for name, value in (fixed_settings(directory) | own).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
