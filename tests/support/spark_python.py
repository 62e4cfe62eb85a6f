"""The interpreter of Spark's Python processes: forked of one with all imports, which cost a second each time."""

import os
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.zygote import forking

IMPORTED: Final = (
    "pyspark.worker",
    "pyspark.sql.worker.*",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pandas",
    "pyarrow.parquet",
    "relatum.*",
    "relatum_consumer.*",
    "relatum_spark.*",
)

ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""What is forked must not have threads; hashes are as Spark sets them."""


@cache
def spark_python() -> Path:
    """The program to name in PYSPARK_PYTHON, until this process ends."""
    return forking(f"{__name__}:run", *IMPORTED, **ONE_THREAD)


def run() -> None:
    """Do what the interpreter does with `-c PROGRAM`, or with `-m MODULE`: then it, and its forks, have that name."""
    option, what, *arguments = sys.argv
    sys.argv = [option, *arguments]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if option == "-c":
        exec(what, {"__name__": "__main__"})
        return
    assert option == "-m", option
    Path("/proc/self/comm").write_text(what)
    runpy.run_module(what, run_name="__main__", alter_sys=True)
