"""Relatum's schema as a catalog of Spark SQL: counts, aggregates and the first rows are made inside PostgreSQL."""

import re
from typing import Final

from pyspark.sql import SparkSession

from relatum.errors import ConfigurationError, InvalidInput
from relatum_spark._jdbc import jdbc_options, require_driver
from relatum_spark._where import database_url

_CATALOG: Final = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"


def catalog(spark: SparkSession, name: str = "relatum", *, database: str | None = None) -> str:
    """Make the database a catalog of the session: `SELECT key, count(*) FROM relatum.relatum.relations GROUP BY key`.

    Filters, aggregates, sorting with a limit and samples run inside PostgreSQL. A query reads by one task; for all the
    rows of a large table, `relationships` reads by many. Calling it again for the same database changes nothing.

    Args:
        spark: The session; it needs PostgreSQL's JDBC driver (`jdbc_jar`).
        name: The catalog's name in SQL.
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL.

    Returns:
        The full name of the view in SQL, `relatum.relatum.relations`.

    Raises:
        InvalidInput: The name is none for SQL.
        ConfigurationError: The session has no JDBC driver, the database's URL cannot be used by it, or the session has
            a catalog of that name for something else: Spark keeps the one it opened first.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name == "spark_catalog":
        raise InvalidInput(f"a catalog's name is letters, digits and _, not {name!r}")
    options = jdbc_options(database_url(database))
    require_driver(spark)
    prefix = f"spark.sql.catalog.{name}"
    settings = {prefix: _CATALOG} | {f"{prefix}.{option}": value for option, value in options.items()}
    for setting in (prefix, f"{prefix}.url", f"{prefix}.user"):
        if spark.conf.get(setting, None) not in (None, settings[setting]):
            raise ConfigurationError(f"this session has another catalog {name!r}: choose another name")
    for setting, value in settings.items():
        spark.conf.set(setting, value)
    return f"{name}.relatum.relations"
