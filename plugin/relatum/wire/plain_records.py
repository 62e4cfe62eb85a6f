"""Splits a chunk without sub-entry batches into records. This is every reader's work for each message.

Source: see `relatum.wire.chunk`.
"""


def plain_records(
    data: bytes, position: int, count: int, indexes: list[int] | None = None
) -> tuple[list[bytes], int] | None:
    """Return `count` records from a position on, and their end position. None if an entry is a sub-entry batch.

    `indexes`: Return only the records at these indexes, ascending from 0. Raises `IndexError` if the data ends before
    the last entry begins. If the last record is truncated, the end position is beyond the data; the caller checks this.
    """
    records: list[bytes] = []
    wanted = copied = 0
    if indexes is not None:
        if not indexes:
            return records, position
        wanted, count = indexes[0], indexes[-1] + 1
    for index in range(count):
        # Compiled, reading byte by byte takes a tenth of the time of `struct`.
        if data[position] & 0x80:
            return None
        length = data[position] << 24 | data[position + 1] << 16 | data[position + 2] << 8 | data[position + 3]
        position += 4
        end = position + length
        if indexes is None:
            records.append(data[position:end])
        elif index == wanted:
            records.append(data[position:end])
            copied += 1
            if copied < len(indexes):
                wanted = indexes[copied]
        position = end
    return records, position
