"""What a DataFrame holds, brought to the terminal or into a file: computed once, in parallel, and fetched bit by bit.

Rows travel as Arrow, which keeps moments and bytes as they are; Spark's own rows would shift moments by the driver's
time zone.
"""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, MapType, StructType

from relatum.errors import InvalidInput

PIECE_BYTES: Final = 4 << 20
"""Bytes of Arrow data in one of the rows that carry them."""

SUFFIXES: Final = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json"}
"""How a file's name says its format, and Spark's name of that."""

_PIECE: Final = "piece binary"


def format_of(output: str) -> str:
    """The suffix that says the format.

    Raises:
        InvalidInput: it is none of those.
    """
    suffix = Path(output.rstrip("/")).suffix
    if suffix not in SUFFIXES:
        raise InvalidInput(f"{output!r} ends in none of {', '.join(SUFFIXES)}")
    return suffix


def is_url(output: str) -> bool:
    """Whether the executors write it: `s3a://…`, `hdfs://…`, `file:///…`."""
    return "://" in output


def check_output(output: str, *, overwrite: bool, with_payloads: bool = False) -> None:
    """Refuse an output that could not be written, before any job runs.

    Args:
        output: A file or a URL.
        overwrite: Whether what is there may be replaced.
        with_payloads: Whether the rows will have bodies, headers or properties.

    Raises:
        InvalidInput: its format is unknown or cannot hold the rows, its directory is missing, or it is there already.
    """
    if format_of(output) == ".csv" and with_payloads:
        raise InvalidInput("--output: CSV cannot hold bodies, headers and properties; take .parquet or .jsonl")
    if is_url(output):
        return
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"--output: there is no directory {path.parent}")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InvalidInput(f"--output: {output} is there already; --overwrite replaces a file")


def encoded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in tasks: Arrow batches as rows of bytes, each small enough to travel."""
    for batch in batches:
        rows = max(1, min(batch.num_rows, PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1)))
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, part.schema) as stream:
                stream.write_batch(part)
            yield pa.record_batch([[sink.getvalue().to_pybytes()]], names=["piece"])


def batches_of(df: DataFrame) -> Iterator[pa.RecordBatch]:
    """The rows, in no order, a few at a time on the driver; all tasks run in parallel before the first."""
    kept = df.mapInArrow(encoded, _PIECE).persist()
    try:
        kept.count()
        for row in kept.toLocalIterator():
            with pa.ipc.open_stream(row.piece) as stream:
                yield from stream
    finally:
        kept.unpersist()


def document_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row for JSON: maps as objects, moments as ISO 8601, bytes as text, or as `<name>_base64` if they are none."""
    document: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            try:
                document[name] = value.decode()
            except UnicodeDecodeError:
                document[f"{name}_base64"] = base64.b64encode(value).decode()
        else:
            document[name] = _plain(value)
    return document


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return value


def documents_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a batch for JSON."""
    maps = [field.name for field in batch.schema if pa.types.is_map(field.type)]
    for row in batch.to_pylist():
        # Arrow gives a map as a list of pairs.
        yield document_of(row | {name: dict(row[name]) for name in maps if row[name] is not None})


def write(df: DataFrame, output: str, *, overwrite: bool) -> int | None:
    """Write the rows; return how many, or None where the executors wrote them.

    Args:
        df: The rows.
        output: A file on this machine, written whole or not at all; or a URL of a directory that Spark's executors
            write their files into.
        overwrite: Whether what is there may be replaced.

    Raises:
        InvalidInput: as of `check_output`.
    """
    check_output(output, overwrite=overwrite)
    if not is_url(output):
        return _write_file(df, Path(output))
    if format_of(output) == ".csv":
        df = _flat(df)
    df.write.format(SUFFIXES[format_of(output)]).mode("overwrite" if overwrite else "error").save(output)
    return None


def _flat(df: DataFrame) -> DataFrame:
    """The rows as CSV can hold them.

    Raises:
        InvalidInput: it cannot.
    """
    for field in df.schema.fields:
        if isinstance(field.dataType, (MapType, StructType, BinaryType)):
            raise InvalidInput(f"--output: CSV cannot hold the column {field.name}; take .parquet or .jsonl")
    return df


def _write_file(df: DataFrame, path: Path) -> int:
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with _WRITERS[path.suffix](df, part) as write_batch:
            for batch in batches_of(df):
                write_batch(batch)
                count += batch.num_rows
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


_Write = Callable[[pa.RecordBatch], None]


@contextmanager
def _parquet(df: DataFrame, part: Path) -> Iterator[_Write]:
    schema = _arrow_schema(df)
    with pyarrow.parquet.ParquetWriter(part, schema) as writer:
        yield lambda batch: writer.write_batch(batch.cast(schema))


@contextmanager
def _csv(df: DataFrame, part: Path) -> Iterator[_Write]:
    schema = _arrow_schema(_flat(df))
    # A list, such as the values of several keys, has no place in CSV but as text.
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    for name in lists:
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    with pyarrow.csv.CSVWriter(part, schema) as writer:

        def write_batch(batch: pa.RecordBatch) -> None:
            for name in lists:
                at = batch.schema.get_field_index(name)
                texts = [json.dumps(value, ensure_ascii=False) for value in batch.column(at).to_pylist()]
                batch = batch.set_column(at, name, pa.array(texts, pa.string()))
            writer.write_batch(batch.cast(schema))

        yield write_batch


@contextmanager
def _jsonl(_: DataFrame, part: Path) -> Iterator[_Write]:
    with part.open("w", encoding="utf-8") as file:

        def write_batch(batch: pa.RecordBatch) -> None:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in documents_of(batch))

        yield write_batch


_WRITERS: Final = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}


def _arrow_schema(df: DataFrame) -> pa.Schema:
    """The columns as Arrow has them."""
    return df.limit(0).toArrow().schema
