"""Which streams' times are recorded."""

from relatum.checks import checked_name
from relatum.errors import StreamNotFound
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.catalog import ensure_stream
from relatum.store.catalog import set_record_time as switch
from relatum.store.database import AnyDatabase, as_engine
from relatum.store.translation import translated_errors


def set_record_time(
    broker: str | BrokerAddress, database: AnyDatabase, name: str, *, on: bool, stream_url: str | None = None
) -> None:
    """Switch the recording of a stream's times on or off, from now on; recorders take it up within two seconds.

    The broker is only asked where nothing of the stream is recorded yet: a name that is spelled wrong is not written.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or a `Database`.
        name: The stream, or one partition.
        on: Whether the times of its messages are recorded.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: the broker has no such stream, or does not let this user read it;
            nothing was written.
        BrokerUnavailable, DatabaseUnavailable: nothing was written; safe to repeat.
    """
    checked_name("name", name)
    address = broker if isinstance(broker, BrokerAddress) else BrokerAddress.parse(broker, stream_url)
    with as_engine(database) as engine:
        try:
            switch(engine, address.vhost, name, on=on)
        except StreamNotFound:
            with StreamReader.open(address) as reader:
                reader.bounds(name)
            with translated_errors(), engine.begin() as connection:
                ensure_stream(connection, address.vhost, name)
            switch(engine, address.vhost, name, on=on)
