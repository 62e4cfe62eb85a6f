"""A process that decodes records for a test, and says what became of each: run as `python -m tests.support.decoding`.

Says first whether it runs compiled; then reads lists of records from its input, pickled, and answers each by a list of
texts.
"""

import pickle
import sys
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from relatum.common import limits
from relatum.keys import KeyDefinition
from relatum.reading import Message, RecordBatch, type_and_id_of
from relatum.reading.extractor import Extractor
from relatum.wire import amqp10
from relatum.wire.amqp10 import find_head
from relatum_spark._columns import ColumnBuilder
from tests.support._recording import Batch, time_blocks

CHUNK_MS: Final = 1_700_000_000_000

KEYS: Final = [
    KeyDefinition("order_id", key_id=1),
    KeyDefinition("n", type="integer", key_id=2),
    KeyDefinition("both", source=["a", "n"], key_id=3),
    KeyDefinition("id", source="property:message_id", key_id=4),
    KeyDefinition("kind", source="property:type", key_id=5),
]
EXTRACTOR: Final = Extractor(KEYS)


def _message(raw: bytes) -> Any:
    message = Message.from_record("s", 7, raw, CHUNK_MS)
    before = message.body, type_and_id_of(message)
    return before, dict(message.headers), message.properties, message.is_amqp, message.time_us, message.time_source


def _rows(raw: bytes) -> Any:
    batch = Batch(1, EXTRACTOR, with_time=True)
    batch.add(RecordBatch("s", 7, range(7, 9), [raw, raw], CHUNK_MS, 1))
    blocks = time_blocks(batch.time_offsets, batch.times, None)
    return batch.lines, blocks, batch.skips, batch.receipts, batch.line_bytes


def _columns(raw: bytes) -> Any:
    builder = ColumnBuilder(value=True, headers=True)
    builder.add_batch(RecordBatch("s", 7, range(7, 8), [raw], CHUNK_MS, 1))
    taken: pa.RecordBatch = builder.take()
    return taken.to_pylist()


WAYS: Final[list[Callable[[bytes], Any]]] = [
    amqp10.find_sections,
    find_head,
    lambda raw: amqp10.decode_map(raw, 3),
    lambda raw: amqp10.decode_list(raw, 3, 13),
    lambda raw: amqp10.decode_value(raw, 3),
    lambda raw: EXTRACTOR.from_record(raw, CHUNK_MS),
    _message,
    _rows,
    _columns,
]


def became(raw: bytes) -> str:
    """What each way makes of a record: its value, or its error."""
    told = []
    for way in WAYS:
        try:
            told.append(repr(way(raw)))
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return "\n".join(told)


def main() -> None:
    _tell(not str(limits.__file__).endswith(".py"))
    while True:
        try:
            records = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _tell([became(raw) for raw in records])


def _tell(what: Any) -> None:
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
