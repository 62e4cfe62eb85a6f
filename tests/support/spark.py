"""A Spark session for tests, on this machine."""

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support._jvm import QUICK_START

JDBC_JAR = Path(os.environ.get("RELATUM_JDBC_JAR", "/usr/share/java/postgresql.jar"))


def make_session(directory: Path, master: str = "local[2]", **settings: str) -> SparkSession:
    """Start a session whose files lie in `directory`; underscores in the names of settings stand for dots."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.Builder().master(master).appName("relatum tests")
    fixed = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": QUICK_START,
        "spark.jars": str(JDBC_JAR),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "1g",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    for name, value in (fixed | {name.replace("_", "."): value for name, value in settings.items()}).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
