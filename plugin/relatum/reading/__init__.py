"""Reading streams: one message at an offset, many, all from a point on; over the stream protocol or AMQP 0.9.1."""

from relatum.reading._address import BrokerAddress
from relatum.reading._agreement import Agreement, agreement, agreement_of, async_agreement, position_of
from relatum.reading._amqp_blocking import connection_error, pika_parameters
from relatum.reading._amqp_operations import QUIET_S, cancelled, offset_of, refused
from relatum.reading._async_reader import AsyncStreamReader
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._leading import OUT_OF_REACH_S
from relatum.reading._login import AuthMechanism, BrokerLogin
from relatum.reading._message import Message, Properties, TimeSource
from relatum.reading._operations import ATTACHES_MAX, CLOSES_SINCE, PLACES_AT_ONCE, other_nodes, refusal
from relatum.reading._reader import StreamReader
from relatum.reading._socket import RECEIVE_BYTES, SILENCE_HEARTBEATS, SocketConnection
from relatum.reading._turns import ReaderStatistics
from relatum.wire._chunk import UnreadableRecord
from relatum.wire._frames import Broker, StreamPlaces
from relatum.wire._identity import Position

__all__ = [
    "ATTACHES_MAX",
    "CLOSES_SINCE",
    "OUT_OF_REACH_S",
    "PLACES_AT_ONCE",
    "QUIET_S",
    "RECEIVE_BYTES",
    "SILENCE_HEARTBEATS",
    "Agreement",
    "AsyncStreamReader",
    "AuthMechanism",
    "Broker",
    "BrokerAddress",
    "BrokerLogin",
    "Message",
    "Position",
    "Properties",
    "ReaderStatistics",
    "RecordBatch",
    "SocketConnection",
    "StreamBounds",
    "StreamPlaces",
    "StreamReader",
    "TimeSource",
    "UnreadableRecord",
    "agreement",
    "agreement_of",
    "async_agreement",
    "cancelled",
    "connection_error",
    "offset_of",
    "other_nodes",
    "pika_parameters",
    "position_of",
    "refusal",
    "refused",
]
