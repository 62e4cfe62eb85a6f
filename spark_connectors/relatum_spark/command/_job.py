"""One run of a command of `relatum spark`: the session it works in, and where its rows go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import MapType, StructType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from relatum.errors import InvalidInput
from relatum.terminal import console, print_json
from relatum_spark.command._options import RowOptions, SparkOptions
from relatum_spark.command._results import SUFFIXES, batches_of, check_output, documents_of, format_of, is_url, write
from relatum_spark.command._session import spark_session
from relatum_spark.recording._follower import FillProgress

ROWS_SHOWN: Final = 20
CHARACTERS_SHOWN: Final = 80
"""Characters of one cell in a table."""


@contextmanager
def session(options: SparkOptions) -> Iterator[SparkSession]:
    """The session that a command works in."""
    with spark_session(options.master, options.conf or (), options.jars or ()) as spark:
        yield spark


def show(options: RowOptions, rows_of: Callable[[SparkSession], DataFrame], *, with_payloads: bool = False) -> None:
    """Compute rows and print or write them. What can be refused without a session is refused before.

    Args:
        options: Where they go.
        rows_of: What makes them.
        with_payloads: Whether rows have bodies, headers or properties.
    """
    if options.output is not None:
        if options.as_json:
            raise InvalidInput("--json prints and --output writes: give one of them")
        check_output(options.output, overwrite=options.overwrite, with_payloads=with_payloads)
    with session(options) as spark:
        rows = rows_of(spark)
        limited = rows if options.limit is None else rows.limit(options.limit)
        if options.output is not None:
            count = write(limited, options.output, overwrite=options.overwrite)
            written = "written" if count is None else f"{count:,} rows"
            console.print(f"{options.output}: {written}.")
        elif options.as_json:
            for batch in batches_of(limited):
                for document in documents_of(batch):
                    print_json(document, one_line=True)
        else:
            _print(rows, options.limit or ROWS_SHOWN)


def places_of(places: str) -> Callable[[SparkSession], DataFrame]:
    """What makes the rows of a file of places.

    A file of this machine is read here and now and sent along: executors elsewhere need not have it.

    Raises:
        InvalidInput: there is no such file, or it is not of its format.
    """
    suffix = format_of(places)
    if is_url(places):
        options = {"header": "true", "inferSchema": "true"}
        return lambda spark: spark.read.format(SUFFIXES[suffix]).options(**options).load(places)
    path = Path(places)
    if not path.is_file():
        raise InvalidInput(f"there is no file {places}")
    table = _table_of(path, suffix)
    return lambda spark: spark.createDataFrame(table)


def _print(rows: DataFrame, most: int) -> None:
    # Headers and properties take more room than a table has: --json and --output have them.
    columns = [each.name for each in rows.schema.fields if not isinstance(each.dataType, (MapType, StructType))]
    table = Table(*columns)
    # One more tells whether there are more.
    found = [row for batch in batches_of(rows.select(*columns).limit(most + 1)) for row in documents_of(batch)]
    for document in islice(found, most):
        table.add_row(*(_cell(document, name) for name in columns))
    console.print(table)
    if len(found) > most:
        console.print("and more; --limit shows more, --output writes all.")
    elif not found:
        console.print("No rows.")


def _table_of(path: Path, suffix: str) -> Any:
    readers = {".parquet": pyarrow.parquet.read_table, ".csv": pyarrow.csv.read_csv, ".jsonl": pyarrow.json.read_json}
    try:
        return readers[suffix](path)
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"{path} cannot be read as {suffix[1:]}: {error}") from error


class Bars:
    """A bar for each stream that is being filled."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}

    def __call__(self, found: FillProgress) -> None:
        """Show how far one has come."""
        if found.stream not in self._tasks:
            self._tasks[found.stream] = self._progress.add_task(found.stream)
        self._progress.update(self._tasks[found.stream], total=found.total_offsets, completed=found.done_offsets)


def _cell(document: dict[str, Any], name: str) -> Text:
    value = document.get(name, document.get(f"{name}_base64"))
    text = "–" if value is None else str(value)
    text = text if len(text) <= CHARACTERS_SHOWN else text[: CHARACTERS_SHOWN - 1] + "…"
    # As text, never as markup; control characters could move the terminal's cursor.
    return Text("".join(character if character.isprintable() else "·" for character in text))
