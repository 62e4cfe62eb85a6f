"""PostgreSQL: the schema `relatum`, its key definitions and streams, its coverage, and the way rows get in.

Names for programs that define keys are here; rooms import a name from the module that defines it.
"""

from relatum.store.catalog import add_keys
from relatum.store.database import Database, as_engine

__all__ = ["Database", "add_keys", "as_engine"]
