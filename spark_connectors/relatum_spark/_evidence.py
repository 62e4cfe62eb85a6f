"""Whether everything in some streams is recorded for some keys: the proof of look-ups, asked from Spark's driver."""

from collections.abc import Sequence

import sqlalchemy as sa

from relatum.reading import StreamReader
from relatum.store.coverage import TIME
from relatum_consumer import Status
from relatum_consumer.lookups import Catalog, Servers, evidence


def status_of_missing(
    reader: StreamReader,
    connection: sa.Connection,
    vhost: str,
    names: Sequence[str],
    keys: Sequence[str],
    *,
    with_time: bool,
) -> Status:
    """What may be said of a row without relata in these streams. To be asked before the table is read.

    Args:
        reader: Where the streams end.
        connection: What is recorded; in a snapshot, what was recorded then.
        vhost: The virtual host of the streams.
        names: Streams and super streams.
        keys: Names of keys.
        with_time: Whether times must be recorded as well.

    Returns:
        `ABSENT` where it is proven that all they retain is recorded for each of the keys; else `NOT_RECORDED_YET` or
        `UNPROVEN`: there may be one.

    Raises:
        KeyNotDefined: a key is not in force.
        StreamNotFound: a stream is unknown to the database and to the broker, or was deleted.
        StreamReplaced: what lies at a stream's last recorded offset is not what was recorded there.
    """
    servers = Servers(lambda text, given: list(connection.execute(text, given)), lambda: reader)
    catalog = Catalog(servers, vhost)
    catalog.check_names(names)
    key_ids = {catalog.definition(key).key_id for key in keys} | ({TIME} if with_time else set())
    known = evidence(catalog, names, key_ids)
    return known.status(is_found=False, was_read=False, is_whole=True)
