"""How the JVMs of the tests are started."""

import sys
from pathlib import Path
from typing import Final

QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for a minute on two cores: compile once, collect with one thread."""

SPARK_CLASSES: Final = Path(sys.prefix) / "spark-classes.jsa"
"""Spark's classes as a JVM has them in memory: `make` writes them once, with `tests.support.spark_classes`."""

SPARK_START: Final = (
    f"{QUICK_START} -XX:SharedArchiveFile={SPARK_CLASSES} -Xlog:disable"
    if SPARK_CLASSES.is_file() and SPARK_CLASSES.stat().st_size
    else QUICK_START
)
"""The same for Spark's JVMs: with its classes they start by half the work. A JVM they do not fit does without them."""

JVM_VARIABLES: Final = {"JDK_JAVA_OPTIONS": SPARK_START}
"""The same for a JVM that a program under test starts: the variable is read by `java` itself."""
