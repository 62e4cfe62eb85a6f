"""Deadlines of calls, retries after failures, logs of outages, and the threads and loops that wait for servers.

All code that waits for a server or retries uses this package: one deadline for a whole call, one list of retryable
errors, one back-off, and one log line each when a server becomes unavailable and when it is back.
"""

from relatum.common.waiting._component_loop import ComponentLoop, LoopThread, RepeatedTask
from relatum.common.waiting._deadline import (
    LEAST_S,
    LOOK_S,
    AfterStop,
    Deadline,
    current,
    has_passed,
    left_s,
    within,
)
from relatum.common.waiting._failures import (
    ANSWER_S,
    BACKOFF_S,
    QUESTION_S,
    Outages,
    Pauses,
    Server,
    backoff,
    ended,
    log_failure,
    may_repeat,
    needs_operator,
)
from relatum.common.waiting._shared_wait import SharedWait
from relatum.common.waiting._threads import NoThreadInTime, Parts, Threads, call_in_time, in_thread, pause

__all__ = [
    "ANSWER_S",
    "BACKOFF_S",
    "LEAST_S",
    "LOOK_S",
    "QUESTION_S",
    "AfterStop",
    "ComponentLoop",
    "Deadline",
    "LoopThread",
    "NoThreadInTime",
    "Outages",
    "Parts",
    "Pauses",
    "RepeatedTask",
    "Server",
    "SharedWait",
    "Threads",
    "backoff",
    "call_in_time",
    "current",
    "ended",
    "has_passed",
    "in_thread",
    "left_s",
    "log_failure",
    "may_repeat",
    "needs_operator",
    "pause",
    "within",
]
