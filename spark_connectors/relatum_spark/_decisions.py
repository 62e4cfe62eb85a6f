"""The decisions of an enriched query's micro-batches, in files that a repeated batch reads instead of deciding anew."""

from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from relatum.errors import ConfigurationError

_MARKER: Final = "_DECIDED"
"""The file that marks a directory as complete. Spark does not read files whose name begins with an underscore."""


class Decisions:
    """The decisions of a query's micro-batches: a directory of Parquet files for each batch, marked when complete.

    The file system can be any that Spark writes to. This class uses the JVM, which Spark Connect does not offer.
    """

    def __init__(self, session: SparkSession, directory: str) -> None:
        jvm: Any = getattr(session, "_jvm", None)
        if jvm is None:
            raise ConfigurationError("Enrichment needs the JVM: use a session without Spark Connect")
        self._session = session
        # The checkpoint keeps a query's id across restarts.
        query = session.sparkContext.getLocalProperty("sql.streaming.queryId") or "no-query"
        self._root = f"{directory.rstrip('/')}/{query}"
        self._path = jvm.org.apache.hadoop.fs.Path
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._path(self._root).getFileSystem(configuration)
        self._files.mkdirs(self._path(self._root))

    def path(self, batch: int) -> str:
        return f"{self._root}/batch-{batch}"

    def decided(self) -> list[int]:
        """Return the batches whose decisions are complete."""
        files = self._files.listStatus(self._path(self._root))
        numbers = [str(file.getPath().getName()).removeprefix("batch-") for file in files]
        batches = [int(number) for number in numbers if number.isdecimal()]
        return [batch for batch in batches if self._files.exists(self._path(f"{self.path(batch)}/{_MARKER}"))]

    def write(self, batch: int, rows: DataFrame) -> None:
        """Write a batch's decisions, replacing the files of a killed attempt."""
        rows.write.mode("overwrite").parquet(self.path(batch))

    def mark(self, batch: int) -> None:
        """Mark a batch's decisions as complete."""
        self._files.create(self._path(f"{self.path(batch)}/{_MARKER}"), True).close()

    def read(self, batch: int, columns: StructType) -> DataFrame:
        """Read a batch's decisions. A column that was added since they were written is null."""
        return self._session.read.schema(columns).parquet(self.path(batch))

    def delete(self, batch: int) -> None:
        self._files.delete(self._path(self.path(batch)), True)
