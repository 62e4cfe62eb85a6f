"""Helpers of the tests: waiting on a condition, streams to publish to, processes, and how JVMs start."""

from tests.support._jvm import JVM_VARIABLES, QUICK_START, SPARK_START
from tests.support._processes import processes_naming
from tests.support._recording import READERS, reading, record, recorded_to, recording, rows_of, wait_recorded
from tests.support._streams import (
    all_plain,
    broker_connection,
    declare_stream,
    delete_stream,
    make_streams_survive,
    new_streams,
    publish_plain,
    read_plain,
    server_version,
    stream_available,
    unique_name,
)
from tests.support._waiting import LIMIT_S, START_S, in_a_loop, in_a_try, until_answered, wait_until

__all__ = [
    "JVM_VARIABLES",
    "LIMIT_S",
    "QUICK_START",
    "READERS",
    "SPARK_START",
    "START_S",
    "all_plain",
    "broker_connection",
    "declare_stream",
    "delete_stream",
    "in_a_loop",
    "in_a_try",
    "make_streams_survive",
    "new_streams",
    "processes_naming",
    "publish_plain",
    "read_plain",
    "reading",
    "record",
    "recorded_to",
    "recording",
    "rows_of",
    "server_version",
    "stream_available",
    "unique_name",
    "until_answered",
    "wait_recorded",
    "wait_until",
]
