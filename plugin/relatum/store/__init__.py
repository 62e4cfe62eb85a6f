"""PostgreSQL: the schema `relatum` with key definitions, streams and coverage, and how rows are written.

The names here are for programs that define keys; other packages of Relatum import from the defining module.
"""

from relatum.store.catalog import add_keys
from relatum.store.database import Database, as_engine

__all__ = ["Database", "add_keys", "as_engine"]
