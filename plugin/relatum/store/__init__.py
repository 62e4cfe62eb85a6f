"""Accesses PostgreSQL: key definitions, streams and coverage in the schema `relatum`, and fast writing of rows.

The names here are for programs that define keys. Other packages of Relatum import names from the defining module.
"""

from relatum.store.catalog import add_keys
from relatum.store.database import Database, as_engine

__all__ = ["Database", "add_keys", "as_engine"]
