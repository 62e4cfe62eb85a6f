"""Reading streams: one message at an offset, many, all from a point on; over the stream protocol or AMQP 0.9.1."""

from relatum.reading._address import BrokerAddress
from relatum.reading._agreement import Agreement, agreement, agreement_of, async_agreement
from relatum.reading._async_reader import AsyncStreamReader
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._login import AuthMechanism, BrokerLogin
from relatum.reading._message import Message, Properties, TimeSource
from relatum.reading._reader import StreamReader
from relatum.reading._turns import ReaderStatistics
from relatum.wire._chunk import UnreadableRecord
from relatum.wire._identity import Position

__all__ = [
    "Agreement",
    "AsyncStreamReader",
    "AuthMechanism",
    "BrokerAddress",
    "BrokerLogin",
    "Message",
    "Position",
    "Properties",
    "ReaderStatistics",
    "RecordBatch",
    "StreamBounds",
    "StreamReader",
    "TimeSource",
    "UnreadableRecord",
    "agreement",
    "agreement_of",
    "async_agreement",
]
