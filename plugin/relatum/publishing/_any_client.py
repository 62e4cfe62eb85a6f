"""What publishers use whose client Relatum does not know: an id with a time, and a recorder in their process."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import time_ns
from typing import Any, Final

from relatum.errors import ConfigurationError
from relatum.keys import KeyDefinition, as_definitions
from relatum.publishing._interception import Interception, Options
from relatum.publishing._stamp import Stamper
from relatum.reading import BrokerAddress
from relatum.store.database import AnyDatabase
from relatum.uuid7 import uuid7

_STAMPER: Final = Stamper(())


def stamped(headers: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Headers and a message id for one message that any client publishes.

    Args:
        headers: The message's headers; not changed. None (default): none.

    Returns:
        A copy of the headers with `relatum_time`, microseconds since 1970, UTC, unless it is among them; and a new id,
        a UUIDv7. Give the id to the client as the property `message_id`.

    Raises:
        InvalidRelationshipKey: `relatum_time` is among the headers and is no such time.
        HeadersRefused: the headers are too many, too deep or too large.
    """
    stamp = _STAMPER.stamp(headers, uuid7(time_ns()), None, None, b"")
    return stamp.headers or {}, stamp.message_id


@contextmanager
def recording_here(
    broker: "str | BrokerAddress",
    database: "AnyDatabase",
    *,
    streams: Iterable[str],
    keys: Iterable["str | KeyDefinition"] = (),
    stream_url: str | None = None,
) -> Iterator[None]:
    """Record streams in a thread of this process until the block ends, whoever publishes to them.

    Where several processes record a stream, one of them does. Leaving the block takes two seconds at most; the next
    recorder of these streams records what is left then, which is logged as a warning. The block may be entered several
    times at once, for the same streams, too. Blocking: in an event loop, enter it before the loop runs.

    Args:
        broker: The broker's AMQP URL; several nodes' URLs are parted by `;`.
        database: PostgreSQL's URL, or a `Database`.
        streams: The streams' names; of a super stream those of its partitions.
        keys: Names of headers, or definitions.
        stream_url: Where the stream protocol is, if not at its usual distance from the AMQP port.

    Raises:
        ConfigurationError: no stream is named, or one of the URLs cannot be read.
        InvalidKeyDefinition: one of `keys` cannot be a key, or there are too many in the database.
        KeyDefinitionConflict: the database defines one of `keys` otherwise, as far as it answers within a second.
    """
    named = (streams,) if isinstance(streams, str) else tuple(streams)
    if not named:
        raise ConfigurationError("streams= names the streams to record: recording_here(…, streams=['orders'])")
    options = Options(database, tuple(as_definitions(keys)), "embedded", "raise", named, None, None, None)
    interception = Interception(options, BrokerAddress.of(broker, stream_url), "any")
    try:
        interception.await_agreement(may_wait=True)
        yield
    finally:
        interception.release()
