"""Many rows in one statement: arrays of parameters as a table, so that it is compiled and prepared once."""

from typing import Any

import sqlalchemy as sa


def arrays(table: str, **columns: Any) -> Any:
    """Arrays of parameters as a table of that name: a column each, by its type; the parameter's name has an `s` more.

    given = arrays("given", stream_id=sa.Integer, end=sa.BigInteger)  # parameters: stream_ids, ends
    """
    given = [sa.bindparam(f"{name}s", type_=sa.ARRAY(kind)) for name, kind in columns.items()]
    values = [sa.column(name, kind) for name, kind in columns.items()]
    return sa.func.unnest(*given).table_valued(*values).render_derived(table)
