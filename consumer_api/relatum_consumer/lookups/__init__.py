"""Look-ups without a face: what is asked of tables and streams, the proof of an answer, and the answer itself.

`relatum_consumer.Relations` and `AsyncRelations` are the faces; look-ups of groups are built on the same.
"""

from relatum_consumer.lookups._answer import (
    Answer,
    Hit,
    Lacking,
    LeftOut,
    NewKey,
    Status,
    remedy,
    to_be_recorded,
)
from relatum_consumer.lookups._answering import Gathered, again_if_replaced
from relatum_consumer.lookups._by_time import offsets_within
from relatum_consumer.lookups._catalog import Catalog, PresentStream, Wanted, named, streams_meant
from relatum_consumer.lookups._health import Health, health, reached
from relatum_consumer.lookups._limits import ANSWER_MESSAGES_MAX, POLL_S_MAX, POLL_S_MIN, POOL_MAX
from relatum_consumer.lookups._lookups import Lookups, Names, names_of, span_of, time_us_of
from relatum_consumer.lookups._probe import Order
from relatum_consumer.lookups._proof import Evidence, Uncovered, evidence, evidence_of
from relatum_consumer.lookups._related import (
    Question,
    Row,
    answer,
    first_retained,
    is_in_span,
    read_rows,
    seen_over_amqp,
)
from relatum_consumer.lookups._servers import CLOSED, Servers
from relatum_consumer.lookups._stream_states import (
    all_ends,
    all_names,
    attended,
    check_identity,
    coverage_by_stream,
    ends_of,
    replaced,
    stream_states,
)
from relatum_consumer.lookups._telemetry import look_up
from relatum_consumer.lookups._values import Times, TimeSpan
from relatum_consumer.lookups._waiting import Rest, Waiting, Watch, poll, rested

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
    "Lacking",
    "LeftOut",
    "Lookups",
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
    "Waiting",
    "Wanted",
    "Watch",
    "again_if_replaced",
    "all_ends",
    "all_names",
    "answer",
    "attended",
    "check_identity",
    "coverage_by_stream",
    "ends_of",
    "evidence",
    "evidence_of",
    "first_retained",
    "health",
    "is_in_span",
    "look_up",
    "named",
    "names_of",
    "offsets_within",
    "poll",
    "reached",
    "read_rows",
    "remedy",
    "replaced",
    "rested",
    "seen_over_amqp",
    "span_of",
    "stream_states",
    "streams_meant",
    "time_us_of",
    "to_be_recorded",
]
