"""RabbitMQ streams and their relations in PySpark: a source and a sink, the relationship table, back-fill and joins.

Needs the extra `spark`. Without the extra, `import relatum_spark` works, but using a name raises an error.

- `register` registers `format("rabbitmq_streams")` for reading, writing and streaming.
- `relationships` reads the relationship table, `snapshot` holds one state of the database for several reads, `catalog`
  adds the table to Spark SQL, and `jdbc_jar` finds the JDBC driver that `relationships` and `catalog` need.
- `resolve` reads the messages for any DataFrame of streams and offsets; `Enrichment` joins the micro-batches of a
  streaming query to their related messages.
- `backfill` records the retained messages that the table lacks, in parallel.
- `related_pairs`, `as_of`, `unmatched` and `conversations` join messages by their key values; `Where` describes their
  common arguments.
"""

from typing import TYPE_CHECKING, Any, Final

from relatum.common.faces import lazy_attributes
from relatum.errors import ConfigurationError

if TYPE_CHECKING:
    from relatum_spark._backfill import backfill
    from relatum_spark._conversations import conversations
    from relatum_spark._enrich import Enrichment
    from relatum_spark._format import register
    from relatum_spark._joins import as_of, related_pairs, unmatched
    from relatum_spark._resolve import resolve
    from relatum_spark._servers import jdbc_jar
    from relatum_spark._sides import Where
    from relatum_spark._table import Snapshot, catalog, relationships, snapshot

__all__ = [
    "Enrichment",
    "Snapshot",
    "Where",
    "as_of",
    "backfill",
    "catalog",
    "conversations",
    "jdbc_jar",
    "register",
    "related_pairs",
    "relationships",
    "resolve",
    "snapshot",
    "unmatched",
]

_NAMES_BY_MODULE: Final = {
    "_backfill": ("backfill",),
    "_conversations": ("conversations",),
    "_enrich": ("Enrichment",),
    "_format": ("register",),
    "_joins": ("as_of", "related_pairs", "unmatched"),
    "_resolve": ("resolve",),
    "_servers": ("jdbc_jar",),
    "_sides": ("Where",),
    "_table": ("Snapshot", "catalog", "relationships", "snapshot"),
}
"""The public names by module. A module is imported at the first use of one of its names: pyspark takes a second."""


_imported: Final = lazy_attributes(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}
)


def __getattr__(name: str) -> Any:
    try:
        return _imported(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("pyspark", "pyarrow", "pandas", "numpy"):
            raise ConfigurationError(f"{error.name} is not installed: run pip install 'relatum[spark]'") from error
        raise
