"""Statements written as SQL: each parameter has a type, since PostgreSQL makes a plan for each type that it is told."""

import pytest

from relatum.store.database import sql
from tests.support.plans import text_of


def test_a_parameter_is_cast_and_nothing_else_is() -> None:
    """What is cast in the statement itself stays as it is."""
    text = "SELECT :many::bigint[], :at::timestamptz, :s::double precision, a::int[], 'now'::date WHERE b % 5 = :n::int"
    expected = (
        "SELECT CAST(%(many)s AS bigint[]), CAST(%(at)s AS timestamptz), CAST(%(s)s AS double precision), a::int[], "
        "'now'::date WHERE b %% 5 = CAST(%(n)s AS int)"
    )
    assert text_of(sql(text)) == expected


def test_a_parameter_without_a_type_is_refused() -> None:
    """As the statement is written, and not when it first runs."""
    with pytest.raises(ValueError, match="parameters without a type: name, number"):
        sql("SELECT :name, :id::int, :number + 1")
