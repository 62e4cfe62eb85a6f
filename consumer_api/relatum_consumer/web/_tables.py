"""Tables as files. What a spreadsheet would take for a formula is text in them."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Final

_FORMULA: Final = re.compile(r"""(^|[;,\t\r\n])([\s"\ufeff\u200b]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])""")
"""Where a cell may begin for a spreadsheet with another separator, which drops quotes, and how a formula begins."""


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV of RFC 4180: numbers as they are, text of which none begins as a formula does."""
    out = io.StringIO()
    writer = csv.writer(out)
    for row in (head, *rows):
        writer.writerow([each if isinstance(each, int) else _harmless(str(each)) for each in row])
    return out.getvalue()


def _harmless(text: str) -> str:
    """Text with an apostrophe before each formula: spreadsheets show it then, and carry out nothing."""
    return _FORMULA.sub(r"\1\2'", text)
