"""Records of a chunk without sub-entry batches, cut out of it: what every reader does for each message.

Source: as of `relatum.wire._chunk`.
"""


def plain_records(
    data: bytes, position: int, count: int, places: list[int] | None = None
) -> tuple[list[bytes], int] | None:
    """So many records from a position on, and where they end; None where an entry is a batch.

    A slice that was cut short leaves the end past that of the data: the caller compares it.

    - `places`: Cut only the records at these places, ascending from 0 on, and stop behind the last of them.

    Raises:
        IndexError: the data ends before the last entry begins.
    """
    records: list[bytes] = []
    place = taken = 0
    if places is not None:
        if not places:
            return records, position
        place, count = places[0], places[-1] + 1
    for at in range(count):
        # Byte by byte: compiled, that takes a tenth of what `struct` does.
        if data[position] & 0x80:
            return None
        length = data[position] << 24 | data[position + 1] << 16 | data[position + 2] << 8 | data[position + 3]
        position += 4
        end = position + length
        if places is None:
            records.append(data[position:end])
        elif at == place:
            records.append(data[position:end])
            taken += 1
            if taken < len(places):
                place = places[taken]
        position = end
    return records, position
