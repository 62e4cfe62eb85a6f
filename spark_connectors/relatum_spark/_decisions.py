"""What an enrichment decided in each micro-batch: a directory of Parquet files each, complete once it is marked."""

import re
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from relatum.errors import ConfigurationError

BATCHES_KEPT: Final = 10
"""Batches whose decisions are kept: the last one is needed, the others serve a query that is wound back by hand."""

_MARK: Final = "_DECIDED"
"""The file that says a directory is complete. Spark reads no file whose name begins with an underscore."""

_QUERY_ID: Final = "sql.streaming.queryId"
"""The local property in which Spark gives the query's id, which its checkpoint keeps over restarts."""

_NAME: Final = re.compile(r"batch-([0-9]+)\Z", re.ASCII)


class Decisions:
    """The decisions of one streaming query.

    Any file system that Spark writes to will do. It is asked through the JVM: Spark Connect cannot do that.

    Args:
        session: The session of the batch.
        directory: A URI; each query has a directory of its own in there.

    Raises:
        ConfigurationError: the session is one of Spark Connect.
    """

    def __init__(self, session: SparkSession, directory: str) -> None:
        jvm: Any = getattr(session, "_jvm", None)
        if jvm is None:
            raise ConfigurationError("an enrichment keeps files through the JVM, which Spark Connect does not offer")
        self._session = session
        query = session.sparkContext.getLocalProperty(_QUERY_ID) or "no-query"
        self._root = f"{directory.rstrip('/')}/{query}"
        self._path = jvm.org.apache.hadoop.fs.Path
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._path(self._root).getFileSystem(configuration)

    def path(self, batch: int) -> str:
        """Where a batch's decisions lie."""
        return f"{self._root}/batch-{batch}"

    def is_decided(self, batch: int) -> bool:
        """Whether a batch's decisions are complete."""
        return bool(self._files.exists(self._path(f"{self.path(batch)}/{_MARK}")))

    def last_before(self, batch: int) -> int | None:
        """The last batch before one that was decided; None for none."""
        return max((each for each in self._batches() if each < batch and self.is_decided(each)), default=None)

    def write(self, batch: int, rows: DataFrame) -> None:
        """Write a batch's decisions. What an attempt that was killed left there is overwritten."""
        rows.write.mode("overwrite").parquet(self.path(batch))
        self._files.create(self._path(f"{self.path(batch)}/{_MARK}"), True).close()

    def read(self, batch: int, columns: StructType) -> DataFrame:
        """A batch's decisions. A column that was not there yet when they were written is null."""
        return self._session.read.schema(columns).parquet(self.path(batch))

    def forget(self, batch: int) -> None:
        """Delete the decisions that no replay of this batch or of one of the last before it can need."""
        for each in self._batches():
            if each <= batch - BATCHES_KEPT:
                self._files.delete(self._path(self.path(each)), True)

    def _batches(self) -> list[int]:
        root = self._path(self._root)
        if not self._files.exists(root):
            return []
        names = [str(each.getPath().getName()) for each in self._files.listStatus(root)]
        return [int(found[1]) for found in map(_NAME.match, names) if found]
