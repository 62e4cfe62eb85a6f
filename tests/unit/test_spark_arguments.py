"""Wrong arguments of Spark's functions: one clear error that names the argument, before a session is asked."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from relatum.errors import InvalidInput

pytest.importorskip("pyspark")

import relatum_spark

DATABASE = "postgresql://127.0.0.1:1/x"
BROKER = "amqp://127.0.0.1:1"
"""Nobody listens there; nothing that is refused gets so far."""


class Session:
    """A session that must not be asked."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was asked of the session")


SIDES = {"spark": Session(), "left": "a", "right": "b", "on": "k", "database": DATABASE, "broker": BROKER}
STREAMS = {"spark": Session(), "streams": "a", "partitions": 1, "database": DATABASE, "broker": BROKER}
TABLE = {"spark": Session(), "database": DATABASE}
NAMES: list[Any] = [True, 1.5, b"x", [], [1], [""], "", object()]
COUNTS: list[Any] = ["1", True, 1.5, math.nan, 0, -1, [], object()]
OTHERS: list[Any] = ["x", True, 1.5, [], object()]

SPANS: list[Any] = [-1, -1e-9, timedelta(microseconds=-1), math.nan, math.inf, True, "1"]
NO_SIDES: list[Any] = ["", [], [""], None, 7, ["orders", None], {"orders": 1}]
NO_KEYS: list[Any] = ["", [], [""], 7, ["a", "a"]]

JOINS = (relatum_spark.related_pairs, relatum_spark.as_of, relatum_spark.unmatched)
CONVERSATIONS = {"spark": Session(), "keys": "k", "database": DATABASE}
ENRICHMENT = {"to": "a", "on": "b", "pending": "c", "broker": BROKER, "database": DATABASE}

CASES: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]] = [
    *((join, SIDES, side, NO_SIDES) for join in JOINS for side in ("left", "right")),
    *((join, SIDES, "on", NO_KEYS) for join in JOINS),
    *((join, SIDES, "partitions", COUNTS) for join in JOINS),
    *((join, SIDES, "snapshot", OTHERS) for join in JOINS),
    *((join, SIDES, span, SPANS) for join in (JOINS[0], JOINS[2]) for span in ("within", "before", "after")),
    (relatum_spark.related_pairs, SIDES | {"before": 1}, "within", [1]),
    (relatum_spark.unmatched, SIDES, "older_than", SPANS),
    (relatum_spark.as_of, SIDES, "tolerance", SPANS),
    (relatum_spark.as_of, SIDES, "direction", ["sideways", None]),
    (relatum_spark.conversations, CONVERSATIONS, "keys", [*NO_KEYS, None]),
    (relatum_spark.conversations, CONVERSATIONS, "streams", ["", [], [1]]),
    (relatum_spark.conversations, CONVERSATIONS, "max_value_size", [0, -1, 1.5, True]),
    (relatum_spark.backfill, STREAMS, "streams", NAMES),
    (relatum_spark.backfill, STREAMS, "keys", [each for each in NAMES if each != []]),
    (relatum_spark.backfill, STREAMS, "partitions", COUNTS),
    (relatum_spark.backfill, STREAMS, "slice_offsets", COUNTS),
    (relatum_spark.backfill, STREAMS, "messages_per_s", [each for each in COUNTS if each != 1.5]),
    (relatum_spark.relationships, TABLE, "streams", NAMES),
    (relatum_spark.relationships, TABLE, "keys", NAMES),
    (relatum_spark.relationships, TABLE, "vhost", [True, 1.5, b"x", "", []]),
    (relatum_spark.relationships, TABLE, "partitions", COUNTS),
    (relatum_spark.relationships, TABLE, "snapshot", OTHERS),
    (relatum_spark.resolve, {"df": None, "broker": BROKER}, "df", [None, *OTHERS]),
    (relatum_spark.Enrichment, ENRICHMENT, "to", [[], [1]]),
    (relatum_spark.Enrichment, ENRICHMENT, "how", ["outer"]),
    (relatum_spark.Enrichment, ENRICHMENT, "retries", [-1, "1"]),
    (relatum_spark.Enrichment, ENRICHMENT, "limit", [0]),
    (relatum_spark.Enrichment, ENRICHMENT, "within", SPANS),
    (relatum_spark.Enrichment, ENRICHMENT, "wait", SPANS),
]


@pytest.mark.parametrize(
    ("function", "given", "argument", "refused"), CASES, ids=lambda each: getattr(each, "__name__", None)
)
def test_wrong_arguments_are_named(function: Any, given: dict[str, Any], argument: str, refused: list[Any]) -> None:
    """Neither Python's own errors, nor a question to a server."""
    for value in refused:
        with pytest.raises(InvalidInput, match=argument):
            function(**(given | {argument: value}))


@pytest.mark.parametrize("join", JOINS)
def test_a_misspelt_argument_of_a_join_is_refused(join: Callable[..., Any]) -> None:
    """What all joins take is checked by name, too."""
    with pytest.raises(TypeError, match="databse"):
        join(**SIDES, databse=DATABASE)
