"""One JVM for many programs that use Spark one after the other, each with a context of its own.

A JVM's first rows cost ten seconds of a processor: it loads classes and compiles them. Programs that were told of one
that runs, as `spark-submit` tells its own, have one that did so already.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from tests.support.spark import fixed_settings


@contextmanager
def spark_gateway(directory: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a JVM, and give the variables by which a program uses it.

    Args:
        directory: Where its files lie.
        environment: Its environment, and of the Python processes it starts; what a program has besides stays unknown
            to it.
    """
    settings = SparkConf(loadDefaults=False).setAll(list(fixed_settings(directory).items()))
    with mock.patch.dict(os.environ, environment, clear=True):
        gateway = launch_gateway(settings)
    try:
        yield {
            "PYSPARK_GATEWAY_PORT": str(gateway.gateway_parameters.port),
            "PYSPARK_GATEWAY_SECRET": str(gateway.gateway_parameters.auth_token),
        }
    finally:
        process = gateway.proc
        gateway.shutdown()
        process.stdin.close()
        process.wait(90)
