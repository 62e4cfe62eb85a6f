"""One module a page: what is asked, what is answered, and the function between. Each is a page and a part of `/api`."""

from relatum_consumer.web._api._collectors import COLLECTOR, COLLECTORS, OUTCOME
from relatum_consumer.web._api._contexts import CONTEXTS, SUPER_STREAM
from relatum_consumer.web._api._group import GROUP
from relatum_consumer.web._api._groups import GROUPS
from relatum_consumer.web._api._health import HEALTH
from relatum_consumer.web._api._keys import KEYS
from relatum_consumer.web._api._latest import LATEST
from relatum_consumer.web._api._live import LIVE
from relatum_consumer.web._api._message import MESSAGE, MESSAGE_BY_QUERY
from relatum_consumer.web._api._missing import EXPECTATION, MISSING
from relatum_consumer.web._api._stream import STREAM, STREAM_BY_QUERY
from relatum_consumer.web._api._streams import STREAMS
from relatum_consumer.web._api._times import SEARCH_WITH_TIMES, TIMES
from relatum_consumer.web._api._trace import TRACE
from relatum_consumer.web._api._values import VALUES

__all__ = ["ENDPOINTS", "MESSAGE", "MESSAGE_BY_QUERY"]

ENDPOINTS = (
    SEARCH_WITH_TIMES,
    TIMES,
    TRACE,
    MESSAGE,
    MESSAGE_BY_QUERY,
    STREAMS,
    STREAM,
    STREAM_BY_QUERY,
    MISSING,
    EXPECTATION,
    GROUPS,
    GROUP,
    COLLECTORS,
    COLLECTOR,
    OUTCOME,
    CONTEXTS,
    SUPER_STREAM,
    LIVE,
    KEYS,
    VALUES,
    LATEST,
    HEALTH,
)
