"""Functions that keep the plans of look-ups for sessions in which nothing is prepared, as behind a pooler.

Locks: none; it creates functions. Who may read the tables may call them: they have the rights of who calls.
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(_whole(_ROWS_OF))
    op.execute(_whole(_STREAM_OF))
    # Where a database's default is that nobody may.
    op.execute(f"GRANT EXECUTE ON FUNCTION {_CALLED} TO PUBLIC")


def downgrade() -> None:
    op.execute(f"DROP FUNCTION {_CALLED}")


_CALLED = (
    "relatum.rows_of(smallint, text, integer, bigint, bigint, bigint, bigint, text), "
    "relatum.stream_of(smallint, text, integer)"
)

# A plan for the values of a call would take as long as without a function.
_ROWS_OF = """
CREATE FUNCTION relatum.rows_of(of_key smallint, of_value text, of_stream integer, first_offset bigint, since bigint,
                                until bigint, most bigint, ordering text)
RETURNS TABLE (stream_offset bigint, time_us bigint) LANGUAGE plpgsql STABLE ROWS 10
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
DECLARE
  asked text := ordering || CASE WHEN since IS NULL THEN '' ELSE ', in a span' END;
BEGIN
  CASE asked
  WHEN 'oldest' THEN <rows> ORDER BY r.time_us, r.stream_offset LIMIT most;
  WHEN 'newest' THEN <rows> ORDER BY r.time_us DESC, r.stream_offset DESC LIMIT most;
  WHEN 'offset' THEN <rows> ORDER BY r.stream_offset LIMIT most;
  WHEN 'oldest, in a span' THEN <rows> AND <span> ORDER BY r.time_us, r.stream_offset LIMIT most;
  WHEN 'newest, in a span' THEN <rows> AND <span> ORDER BY r.time_us DESC, r.stream_offset DESC LIMIT most;
  WHEN 'offset, in a span' THEN <rows> AND <span> ORDER BY r.stream_offset LIMIT most;
  END CASE;
END $$
"""

_STREAM_OF = """
CREATE FUNCTION relatum.stream_of(of_key smallint, of_value text, behind integer)
RETURNS integer LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  RETURN (SELECT r.stream_id FROM relatum.relationships r
          WHERE r.key_id = of_key AND r.value = of_value AND r.stream_id > behind AND <holds>
          ORDER BY r.stream_id LIMIT 1);
END $$
"""

_PIECES = {
    "<rows>": "RETURN QUERY SELECT r.stream_offset, r.time_us FROM relatum.relationships r "
    "WHERE r.key_id = of_key AND r.value = of_value AND r.stream_id = of_stream AND r.stream_offset >= first_offset "
    "AND <holds>",
    "<span>": "r.time_us >= since AND r.time_us < until",
    # The parts that may hold the value: see docs/adr/0023.
    "<holds>": """(
    r.part = 0
    OR r.part >= (SELECT min(p.part) FROM relatum.table_parts p WHERE p.part > 0 AND p.closed_at IS NULL)
    OR r.part >= (SELECT min(k.part) FROM relatum.part_keys k
                  WHERE k.key_id = of_key AND k.low <= of_value AND k.high >= of_value)
    AND r.part <= (SELECT max(k.part) FROM relatum.part_keys k
                   WHERE k.key_id = of_key AND k.low <= of_value AND k.high >= of_value))""",
}


def _whole(function: str) -> str:
    for name, piece in _PIECES.items():
        function = function.replace(name, piece)
    return function
