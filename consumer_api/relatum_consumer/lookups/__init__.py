"""Look-ups without a face: what is asked of tables and streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations` and `AsyncRelations` are the faces; look-ups of groups are built on the same.
"""

from relatum_consumer.lookups._answer import (
    Answer,
    Hit,
    MissingKey,
    NewKey,
    Status,
    UnreadableStream,
    remedy,
    to_be_recorded,
)
from relatum_consumer.lookups._answering import Gathered, again_if_replaced
from relatum_consumer.lookups._arguments import Names, is_in_span, names_of, span_of, time_us_of
from relatum_consumer.lookups._by_key import Question, answer, find, related
from relatum_consumer.lookups._by_time import around, beside, window
from relatum_consumer.lookups._catalog import Catalog, PresentStream, Wanted, named, streams_meant
from relatum_consumer.lookups._limits import ANSWER_MESSAGES_MAX, POLL_S_MAX, POLL_S_MIN, POOL_MAX
from relatum_consumer.lookups._probe import Order
from relatum_consumer.lookups._proof import Evidence, Uncovered, evidence
from relatum_consumer.lookups._servers import CLOSED, Health, Servers
from relatum_consumer.lookups._stream_states import (
    all_ends,
    all_names,
    attended,
    check_identity,
    coverage_by_stream,
    ends_of,
    replaced,
)
from relatum_consumer.lookups._telemetry import look_up
from relatum_consumer.lookups._time_index import offsets_within
from relatum_consumer.lookups._values import Times, TimeSpan, times, values
from relatum_consumer.lookups._verified import Lost, Row, first_retained, is_sure, read_rows, seen_over_amqp
from relatum_consumer.lookups._waiting import Rest, Watch, poll, rested, wait_related

__all__ = [
    "ANSWER_MESSAGES_MAX",
    "CLOSED",
    "POLL_S_MAX",
    "POLL_S_MIN",
    "POOL_MAX",
    "Answer",
    "Catalog",
    "Evidence",
    "Gathered",
    "Health",
    "Hit",
    "Lost",
    "MissingKey",
    "Names",
    "NewKey",
    "Order",
    "PresentStream",
    "Question",
    "Rest",
    "Row",
    "Servers",
    "Status",
    "TimeSpan",
    "Times",
    "Uncovered",
    "UnreadableStream",
    "Wanted",
    "Watch",
    "again_if_replaced",
    "all_ends",
    "all_names",
    "answer",
    "around",
    "attended",
    "beside",
    "check_identity",
    "coverage_by_stream",
    "ends_of",
    "evidence",
    "find",
    "first_retained",
    "is_in_span",
    "is_sure",
    "look_up",
    "named",
    "names_of",
    "offsets_within",
    "poll",
    "read_rows",
    "related",
    "remedy",
    "replaced",
    "rested",
    "seen_over_amqp",
    "span_of",
    "streams_meant",
    "time_us_of",
    "times",
    "to_be_recorded",
    "values",
    "wait_related",
    "window",
]
