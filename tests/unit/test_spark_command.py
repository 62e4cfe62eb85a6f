"""The parts of `relatum spark` that need no session: what is given, what is written, what errors become."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
import typer
from pyspark.errors import PySparkException

from relatum import errors
from relatum.errors import InvalidInput
from relatum_spark.command._failures import failure_of
from relatum_spark.command._options import parse_names
from relatum_spark.command._results import PIECE_BYTES, check_output, document_of, documents_of, encoded
from relatum_spark.command._session import session_settings, settings_of


def test_names_are_separated_by_commas() -> None:
    """Blanks around a name are not of it; an empty one is refused."""
    assert parse_names("orders") == ["orders"]
    assert parse_names("orders, payments") == ["orders", "payments"]
    with pytest.raises(typer.BadParameter):
        parse_names("orders,")


def test_settings_are_names_with_values() -> None:
    """The last of a name holds, a value may have `=` in it; what is refused is named without its value."""
    assert settings_of(["spark.a=1", "spark.b=x=y", "spark.a=2"]) == {"spark.a": "2", "spark.b": "x=y"}
    for wrong in ("spark.a", "a.secret=hidden"):
        with pytest.raises(InvalidInput) as refused:
            settings_of([wrong])
        assert "hidden" not in str(refused.value)


def settings(master: str | None = None, *, is_submitted: bool = False, **given: str) -> dict[str, str]:
    """The session's settings, for settings given with underscores for dots."""
    dotted = {name.replace("_", "."): value for name, value in given.items()}
    return session_settings(master, dotted, [], is_submitted=is_submitted, shows_progress=False)


def test_the_master_is_the_option_else_the_setting_else_local() -> None:
    """Under spark-submit nothing is set but what was given: its settings hold."""
    assert settings()["spark.master"] == "local[*,4]"
    assert settings(spark_master="yarn")["spark.master"] == "yarn"
    assert settings("local[2]", spark_master="yarn")["spark.master"] == "local[2]"
    assert settings(is_submitted=True) == {}
    assert settings("yarn", is_submitted=True, spark_a="1") == {"spark.a": "1", "spark.master": "yarn"}


def test_jars_given_stand_beside_those_of_the_settings(tmp_path: Path) -> None:
    """A jar that is no file is refused; the driver's own is only looked for where no jar is named."""
    jar = tmp_path / "a.jar"
    with pytest.raises(InvalidInput, match=r"a\.jar"):
        session_settings(None, {}, [str(jar)], is_submitted=False, shows_progress=False)
    jar.touch()
    found = session_settings(None, {"spark.jars": "b.jar"}, [str(jar)], is_submitted=False, shows_progress=False)
    assert found["spark.jars"] == f"b.jar,{jar}"
    assert "spark.jars" not in settings(spark_jars_packages="org:jar:1")


def test_outputs_that_cannot_be_written_are_refused_first(tmp_path: Path) -> None:
    """An unknown format, no directory, a file that is there: all before Spark starts. URLs are the executors' own."""
    there = tmp_path / "there.csv"
    there.touch()
    for wrong in ("rows.txt", "rows", str(tmp_path / "no" / "rows.csv"), str(there)):
        with pytest.raises(InvalidInput):
            check_output(wrong, overwrite=False)
    check_output(str(there), overwrite=True)
    check_output(str(tmp_path / "new.parquet"), overwrite=False)
    check_output("s3a://bucket/rows.jsonl", overwrite=False)


@pytest.mark.parametrize("output", ["rows.csv", "s3a://bucket/rows.csv"])
def test_csv_for_payloads_is_refused_first(output: str) -> None:
    """It cannot hold headers and properties, which is known before Spark starts."""
    with pytest.raises(InvalidInput, match="CSV"):
        check_output(output, overwrite=False, with_payloads=True)
    check_output(output, overwrite=False)
    check_output(output.replace("csv", "parquet"), overwrite=False, with_payloads=True)


def test_rows_become_documents() -> None:
    """Bytes are text, or base64 under another name; moments are ISO 8601, maps objects, unset properties left out."""
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    row = {"a": b"text", "b": b"\xff", "at": moment, "none": None, "properties": {"type": "t", "app_id": None}}
    assert document_of(row) == {
        "a": "text",
        "b_base64": "/w==",
        "at": "2026-01-02T03:04:05+00:00",
        "none": None,
        "properties": {"type": "t"},
    }
    headers = pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string()))
    batch = pa.record_batch([headers], names=["headers"])
    assert list(documents_of(batch)) == [{"headers": {"k": "v"}}, {"headers": None}]


@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_batches_travel_in_pieces_and_come_back_equal(rows: int) -> None:
    """No piece is much larger than it should be, and nothing is lost on the way."""
    batch = pa.record_batch([pa.array([b"x" * (PIECE_BYTES // 50)] * rows, pa.binary())], names=["value"])
    pieces = [piece for each in encoded(iter([batch])) for piece in each.column(0).to_pylist()]
    assert all(len(piece) < 1.1 * PIECE_BYTES for piece in pieces)
    back = [found for piece in pieces for found in pa.ipc.open_stream(piece)]
    assert sum(found.num_rows for found in back) == rows
    if rows:
        assert pa.Table.from_batches(back).combine_chunks().to_batches() == [batch]


TRACEBACK = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "x.py", line 1, in run
relatum.errors.StreamNotFound: there is no stream 'orders'
"""


def test_errors_that_come_back_as_text_are_ours_again() -> None:
    """A task's error of Relatum is raised as its own class; any other keeps the line that says most."""
    found = failure_of(PySparkException(TRACEBACK))
    assert type(found) is errors.StreamNotFound
    assert str(found) == "there is no stream 'orders'"
    other = failure_of(PySparkException("first\nsecond"))
    assert type(other) is errors.RelatumError
    assert str(other) == "Spark failed: first"
    foreign = PySparkException(TRACEBACK.replace("relatum.errors.StreamNotFound", "ModuleNotFoundError"))
    assert str(failure_of(foreign)) == "Spark failed: ModuleNotFoundError: there is no stream 'orders'"
