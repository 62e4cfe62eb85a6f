"""Reads streams over the stream protocol: one message at an offset, many messages, or all from a position on."""

from relatum.common.ids import BrokerIdentity, Position
from relatum.reading._address import AnyBroker, Broker, BrokerAddress
from relatum.reading._agreement import (
    Agreement,
    agreement,
    agreement_of,
    agreements,
    another_broker,
    bounds_of_known,
    bounds_or_error,
    claimed_identity,
    leaders_bounds,
    position_of,
)
from relatum.reading._amqp import blocking_connection, close_in_time, in_time
from relatum.reading._async_reader import AsyncStreamReader
from relatum.reading._bounds import StreamBounds, concerns_broker, refusal
from relatum.reading._connecting import HEARTBEAT_S
from relatum.reading._connection import STREAM_PORT_ERRORS, SocketConnection, stream_connection
from relatum.reading._login import AuthMechanism, BrokerLogin, HeldPassword, login_of_query
from relatum.reading._many import ChunkCache
from relatum.reading._message import Message, type_and_id_of
from relatum.reading._message_parts import (
    header_value,
    is_header,
    message_time,
    parts_of_delivery,
    pika_long,
    property_text,
    reply_to_text,
)
from relatum.reading._message_values import Properties, TimeSource
from relatum.reading._plan import Result
from relatum.reading._pool import CONNECTIONS_MAX, ReaderStatistics
from relatum.reading._reader import StreamReader
from relatum.reading._scan import RecordBatch
from relatum.wire.chunk import UnreadableRecord
from relatum.wire.frames import NodeAddress, StreamPlaces

__all__ = [
    "CONNECTIONS_MAX",
    "HEARTBEAT_S",
    "STREAM_PORT_ERRORS",
    "Agreement",
    "AnyBroker",
    "AsyncStreamReader",
    "AuthMechanism",
    "Broker",
    "BrokerAddress",
    "BrokerIdentity",
    "BrokerLogin",
    "ChunkCache",
    "HeldPassword",
    "Message",
    "NodeAddress",
    "Position",
    "Properties",
    "ReaderStatistics",
    "RecordBatch",
    "Result",
    "SocketConnection",
    "StreamBounds",
    "StreamPlaces",
    "StreamReader",
    "TimeSource",
    "UnreadableRecord",
    "agreement",
    "agreement_of",
    "agreements",
    "another_broker",
    "blocking_connection",
    "bounds_of_known",
    "bounds_or_error",
    "claimed_identity",
    "close_in_time",
    "concerns_broker",
    "header_value",
    "in_time",
    "is_header",
    "leaders_bounds",
    "login_of_query",
    "message_time",
    "parts_of_delivery",
    "pika_long",
    "position_of",
    "property_text",
    "refusal",
    "reply_to_text",
    "stream_connection",
    "type_and_id_of",
]
