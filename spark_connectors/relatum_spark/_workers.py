"""What Spark's Python workers, which do one task after another, need not do again for each."""

import gc
import os
from functools import cache
from typing import Final

USED_AGAIN: Final = "SPARK_REUSE_WORKER"
"""Spark sets this variable in workers that get more than one task."""


@cache
def spare_collections() -> None:
    """Leave what a worker holds by now out of garbage collections: once in a worker, elsewhere never.

    Spark has all garbage collected after each task, before the next one may begin (`pyspark/daemon.py`). With pandas,
    SQLAlchemy and this package that looks at 140,000 objects for 60 ms, nearly all of them modules and functions.
    """
    if os.environ.get(USED_AGAIN):
        gc.collect()
        gc.freeze()
