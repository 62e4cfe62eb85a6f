"""Reading streams: one message at an offset, many, all from a point on; by the stream protocol."""

from relatum.reading._address import BrokerAddress
from relatum.reading._agreement import (
    Agreement,
    agreement,
    agreement_of,
    agreements,
    another_broker,
    ends_of_known,
    position_of,
)
from relatum.reading._async_reader import AsyncStreamReader
from relatum.reading._attach import other_nodes
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._claiming import claimed_identity
from relatum.reading._connecting import (
    GOODBYE_S,
    HEARTBEAT_S,
    NOT_BY_STREAMS,
    SILENCE_HEARTBEATS,
    blocking_connection,
    in_time,
)
from relatum.reading._connection import ATTACHES_MAX, CLOSES_SINCE, RECEIVE_BYTES, SocketConnection
from relatum.reading._kept import KeptChunks
from relatum.reading._leading import OUT_OF_REACH_S
from relatum.reading._login import BrokerLogin, login_of_query
from relatum.reading._message import Message, type_and_id_of
from relatum.reading._message_parts import (
    header_value,
    is_header,
    message_time,
    parts_of_delivery,
    property_text,
    reply_to_text,
)
from relatum.reading._message_values import Properties, TimeSource
from relatum.reading._nodes import StreamNodes
from relatum.reading._password import HeldPassword
from relatum.reading._plan import Result
from relatum.reading._pool import CONNECTIONS_MAX, ReaderStatistics, check_limit
from relatum.reading._questions import PLACES_AT_ONCE
from relatum.reading._reader import StreamReader
from relatum.reading._stream_errors import bounds_or_error, is_of_all, refusal
from relatum.wire import AuthMechanism, Broker, BrokerIdentity, Position, StreamPlaces, UnreadableRecord

__all__ = [
    "ATTACHES_MAX",
    "CLOSES_SINCE",
    "CONNECTIONS_MAX",
    "GOODBYE_S",
    "HEARTBEAT_S",
    "NOT_BY_STREAMS",
    "OUT_OF_REACH_S",
    "PLACES_AT_ONCE",
    "RECEIVE_BYTES",
    "SILENCE_HEARTBEATS",
    "Agreement",
    "AsyncStreamReader",
    "AuthMechanism",
    "Broker",
    "BrokerAddress",
    "BrokerIdentity",
    "BrokerLogin",
    "HeldPassword",
    "KeptChunks",
    "Message",
    "Position",
    "Properties",
    "ReaderStatistics",
    "RecordBatch",
    "Result",
    "SocketConnection",
    "StreamBounds",
    "StreamNodes",
    "StreamPlaces",
    "StreamReader",
    "TimeSource",
    "UnreadableRecord",
    "agreement",
    "agreement_of",
    "agreements",
    "another_broker",
    "blocking_connection",
    "bounds_or_error",
    "check_limit",
    "claimed_identity",
    "ends_of_known",
    "header_value",
    "in_time",
    "is_header",
    "is_of_all",
    "login_of_query",
    "message_time",
    "other_nodes",
    "parts_of_delivery",
    "position_of",
    "property_text",
    "refusal",
    "reply_to_text",
    "type_and_id_of",
]
