"""Writing to streams from Spark: `df.write.format("rabbitmq_streams")` and `df.writeStream`.

What one run of a task does: make all its rows into messages, which checks them; connect; ask how far an earlier run
of the task came; publish what follows; wait for every confirm. `_sequence` says why nothing is published twice.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from relatum.errors import ConfigurationError, Conflict, InvalidInput, StreamNotFound
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum.store import as_engine, key_definitions, translated_errors
from relatum.wire import publishing as wire
from relatum_spark._encode import is_new_layout
from relatum_spark._outgoing import Columns, Outgoing, Shape, columns_of
from relatum_spark._publisher import PUBLISHERS_MAX, Publisher, connect
from relatum_spark._sequence import Numbering, other_rows, reference_of
from relatum_spark._sink_options import SinkOptions, check_columns, parse_sink_options
from relatum_spark._spool import Spool
from relatum_spark._tails import Tails

logger = logging.getLogger("relatum.spark")

QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
"""Spark's local properties a task of a streaming query sees: the id its checkpoint keeps, the micro-batch's number."""


@dataclass(frozen=True)
class Published(WriterCommitMessage):
    """What a task of a write did.

    Attributes:
        sent: Messages it published, all confirmed.
        found: Messages an earlier run of it had published.
    """

    sent: int
    found: int


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of a batch, made on the driver.

    Args:
        options: As Spark gives them.
        schema: The columns of what is written.
        overwrite: Whether what is there is to be replaced: a stream cannot.

    Raises:
        InvalidInput, ConfigurationError: options or columns are wrong.
        StreamNotFound: there is no such stream or super stream.
        Transient: the broker, or the database where one is named, does not answer.
    """
    return BatchWriter(*_prepare(options, schema, overwrite, streaming=False))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of a streaming query. Arguments and errors as of `make_writer`.

    While the broker is away it is asked again for `pollTimeoutMs`, as the source does.
    """
    return StreamWriter(*_prepare(options, schema, overwrite, streaming=True))


def _prepare(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool
) -> tuple[SinkOptions, Shape]:
    if overwrite:
        raise InvalidInput('a stream can only be appended to: write with mode("append")')
    parsed = parse_sink_options(options, streaming=streaming)
    check_columns(schema, parsed)
    shape = _shape(parsed, patience_s=parsed.poll_timeout_s if streaming else 0)
    return parsed, shape


def _shape(options: SinkOptions, *, patience_s: float = 0) -> Shape:
    """How rows become messages, asked of broker and database once for the whole write.

    Args:
        options: The write's options.
        patience_s: Seconds for which the broker is asked again while it is away.
    """
    definitions, keys = _keys(options)
    with closing(Tails(options.broker, patience_s=patience_s)) as tails:
        streams, version, frame_bytes_max = tails.ask(lambda reader: _asked(reader, options))
    if not streams:
        raise StreamNotFound(f"There is no super stream {options.super_stream!r}.", stream=options.super_stream)
    if len(streams) > PUBLISHERS_MAX:
        raise InvalidInput(f"the super stream has {len(streams)} streams; at most {PUBLISHERS_MAX} can be written to")
    return Shape(
        streams=tuple(streams),
        routing_key=options.routing_key,
        keys=keys,
        definitions=definitions,
        new_layout=is_new_layout(version),
        message_bytes_max=max(1, frame_bytes_max - wire.PUBLISH_BYTES - wire.ENTRY_BYTES) if frame_bytes_max else 0,
    )


def _asked(reader: StreamReader, options: SinkOptions) -> tuple[list[str], str, int]:
    """What the broker says: the streams to write to, its version, and how many bytes a frame may have."""
    if options.stream is not None:
        reader.bounds(options.stream)
        streams = [options.stream]
    else:
        streams = reader.partitions(options.super_stream or "")
    with closing(connect(options.broker, options.broker.timeout_s)) as connection:
        session = connection.session
        return streams, session.server_properties.get("version", ""), session.send_bytes_max


def _keys(options: SinkOptions) -> tuple[tuple[KeyDefinition, ...], tuple[tuple[str, str], ...]]:
    """The keys to check, and the header each key's column is lifted into."""
    known: dict[str, KeyDefinition] = {}
    if options.database is not None:
        with as_engine(options.database) as engine, translated_errors(), engine.connect() as connection:
            known = {definition.name: definition for definition in key_definitions(connection)}
    headers = []
    for name in options.key_columns:
        definition = known.setdefault(name, KeyDefinition(name))
        place = definition.components[0].lone
        if definition.is_composite or place is None or place.kind != "header":
            raise InvalidInput(
                f"option keyColumns: the key {name!r} is taken from {' and '.join(definition.sources)}, not from one"
                " header: fill the columns headers and properties instead"
            )
        headers.append((name, place.name))
    return tuple(known.values()), tuple(headers)


# --- tasks ------------------------------------------------------------------------------------------------


def write_task(
    options: SinkOptions, shape: Shape, batches: Iterator[tuple[Columns, int]], *, write_id: str, epoch: int, task: int
) -> Published:
    """Publish the rows of one task, those that an earlier run of it has not published.

    Args:
        options: The write's options.
        shape: How rows become messages.
        batches: The rows, by column, and how many.
        write_id: The write's name: the streaming query's id, or the batch's.
        epoch: The micro-batch's number, or the batch's.
        task: The number of the partition.

    Raises:
        InvalidInput: a row cannot be a message; this run has sent nothing.
        Conflict: the rows are others than those of an earlier run, or in another order: this run has sent nothing. Or
            another run published beside this one, which the message says.
        PublishError, Transient: not everything was confirmed; running the task again publishes nothing twice.
    """
    reference = reference_of(options.producer_name, write_id, task, epoch)
    numberings = [Numbering(reference, epoch, stream) for stream in shape.streams]
    with closing(Spool()) as spool:
        outgoing = Outgoing(shape, numberings, spool)
        for columns, rows in batches:
            outgoing.add(columns, rows)
        with Publisher.open(
            options.broker,
            reference,
            shape.streams,
            confirm_timeout_s=options.confirm_timeout_s,
            in_flight_max=options.in_flight_max,
        ) as publisher:
            found = _resume(publisher, numberings, spool)
            sent = _publish(publisher, spool, found)
    return Published(sent, outgoing.rows - sent)


def _resume(publisher: Publisher, numberings: Sequence[Numbering], spool: Spool) -> list[int]:
    """The publishing id after which to go on in each stream, where it is one of this run's own."""
    after = [numbering.resume_after(last) for numbering, last in zip(numberings, publisher.last_ids(), strict=True)]
    missing = {(target, last) for target, last in enumerate(after) if last}
    if missing:
        missing.difference_update(spool.ids())
    for target, _ in missing:
        raise other_rows(numberings[target].stream)
    return after


def _publish(publisher: Publisher, spool: Spool, after: Sequence[int]) -> int:
    """Publish what follows those ids; how many messages that were."""
    sent, last = 0, list(after)
    for target, publishing_id, entry in spool.entries():
        if publishing_id > after[target]:
            publisher.publish(target, publishing_id, entry)
            last[target] = publishing_id
            sent += 1
    publisher.finish()
    if sent and any(mine and mine != theirs for mine, theirs in zip(last, publisher.last_ids(), strict=True)):
        raise Conflict(
            "another run of this task published beside this one, other rows or in another order: some may be there"
            " twice or not at all. Switch speculation off (spark.speculation), or sort the rows within partitions"
        )
    return sent


class BatchWriter(DataSourceArrowWriter):
    """Writes a batch."""

    def __init__(self, options: SinkOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish a task's rows. Runs in a task, and again where that is retried. Errors as of `write_task`."""
        options = self._options
        return write_task(
            options,
            self._shape,
            ((columns_of(batch), batch.num_rows) for batch in iterator),
            write_id=options.write_id,
            epoch=options.batch_id,
            task=_task().partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say what was written. Runs on the driver, when all tasks have ended well."""
        _log(messages, f"batch {self._options.write_id}")


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a streaming query's micro-batches."""

    def __init__(self, options: SinkOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish a task's rows. Runs in a task, and again where that is retried. Errors as of `write_task`."""
        context = _task()
        query, batch = context.getLocalProperty(QUERY_PROPERTY), context.getLocalProperty(BATCH_PROPERTY)
        if query is None or batch is None:
            raise ConfigurationError("this task is of no streaming query: Spark gave it no query and batch id")
        return write_task(
            self._options,
            self._shape,
            ((columns_of(batch), batch.num_rows) for batch in iterator),
            write_id=query,
            epoch=int(batch),
            task=context.partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Say what was written. Runs on the driver, when all tasks have ended well."""
        _log(messages, f"micro-batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 Spark's name
        """Do nothing: what is published stays, and a retry goes on after it."""


def _task() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise ConfigurationError("the sink writes in Spark's tasks only")
    return context


def _log(messages: Sequence[WriterCommitMessage | None], what: str) -> None:
    done = [message for message in messages if isinstance(message, Published)]
    sent, found = sum(each.sent for each in done), sum(each.found for each in done)
    logger.info("%s: %d messages published, %d found published before", what, sent, found)
