"""Giving a virtual host the id by which its broker is known: the first message of a stream. See docs/adr/0043.

Any number of recorders may do it at once: whose message is the first one wins, and all read that one.
"""

import contextlib
import time
import uuid
from typing import Final

from relatum.errors import AccessRefused, NotFound, OffsetNotFound, StreamUnavailable
from relatum.reading._connection import SocketConnection
from relatum.reading._reader import StreamReader
from relatum.waiting import left_s
from relatum.wire import (
    IDENTITY_STREAM,
    BrokerIdentity,
    Code,
    Confirmed,
    Refused,
    amqp10,
    broker_id_of,
    frames,
)

CLAIM_S: Final = 5.0
"""Seconds for all of it: a stream that was just declared, by somebody else, takes some hundredths of one."""

_PAUSE_S: Final = 0.05


def claimed_identity(reader: StreamReader) -> BrokerIdentity:
    """Which broker this is. Where it has no id yet, it is given one.

    The id is None where this user may not read or declare the stream of it, or something else has its name.

    Raises:
        StreamUnavailable, ReadTimeout: That cannot be told now.
        Transient: As of `StreamReader.read`.
    """
    known = reader.identity()
    if known.broker_id is not None:
        return known
    with contextlib.closing(reader.link(None)) as link:
        return BrokerIdentity(_claimed(reader, link), known.cluster_name)


def _claimed(reader: StreamReader, link: SocketConnection) -> uuid.UUID | None:
    until = link.deadline = time.monotonic() + left_s(CLAIM_S)
    # Else whoever declared it is about to publish. An empty stream of several nodes does not prove that it is.
    publishes_at = until - CLAIM_S / 2
    if IDENTITY_STREAM in reader.missing([IDENTITY_STREAM]):
        declared = link.answer(frames.create, IDENTITY_STREAM, {}).code
        if declared == Code.OK:
            publishes_at = 0.0
        elif declared != Code.STREAM_EXISTS:
            return None
    while True:
        try:
            return broker_id_of(reader.read(IDENTITY_STREAM, 0).body)
        except OffsetNotFound:
            is_empty = True
        except (NotFound, AccessRefused):
            return None
        except StreamUnavailable:
            is_empty = False
        try:
            if is_empty and time.monotonic() >= publishes_at:
                # It is read anew then: somebody else may have been faster.
                publishes_at = until if _publish(link, str(uuid.uuid4())) else publishes_at
        except AccessRefused:
            return None
        if time.monotonic() >= until:
            message = f"the stream {IDENTITY_STREAM!r} does not answer: which broker this is cannot be told"
            raise StreamUnavailable(message, stream=IDENTITY_STREAM)
        time.sleep(_PAUSE_S)


def _publish(link: SocketConnection, text: str) -> bool:
    """Publish a message, and wait for what became of it; False where the stream cannot take one yet.

    Raises:
        AccessRefused: This user may not.
    """
    code = link.answer(frames.declare_publisher, 0, "", IDENTITY_STREAM).code
    if code == Code.ACCESS_REFUSED:
        raise AccessRefused(f"this user may not write to {IDENTITY_STREAM!r}")
    if code != Code.OK:
        return False
    message = amqp10.data_section(text.encode())
    link.session.send(frames.publish(0, [frames.entry(0, message)]))
    while True:
        for event in link.exchange():
            if isinstance(event, Confirmed | Refused):
                return isinstance(event, Confirmed)
