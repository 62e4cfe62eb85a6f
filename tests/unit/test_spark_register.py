"""Making the source known to a session that may know it already."""

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from relatum_spark import register


class _Refusal(AnalysisException):
    """An error of Spark's, with the condition it names."""

    def __init__(self, condition: str) -> None:
        super().__init__(condition)
        self._named = condition

    def getCondition(self) -> str:  # noqa: N802 Spark's name
        return self._named


def _session(condition: str) -> Any:
    """A session that registers nothing, for that reason."""

    def refuse(source: type) -> None:
        raise _Refusal(condition)

    return SimpleNamespace(dataSource=SimpleNamespace(register=refuse))


def test_a_source_spark_has_found_by_itself_is_known_already() -> None:
    """Spark 4.0 refuses to register it anew, which is as good as having it registered."""
    register(_session("DATA_SOURCE_ALREADY_EXISTS"))


def test_any_other_refusal_is_handed_on() -> None:
    """What is refused for another reason is not known to the session."""
    with pytest.raises(AnalysisException, match="UNSUPPORTED"):
        register(_session("UNSUPPORTED"))
