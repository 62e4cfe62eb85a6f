"""The schema: made step by step, and equal to the models."""

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

import relatum_migrations
from relatum.errors import ConfigurationError, DatabaseUnavailable, SchemaMissing
from relatum.keys import KeyDefinition
from relatum.store import add_keys, key_definitions, make_engine, metadata


def test_migrations_make_what_the_models_say(empty_database_url: str) -> None:
    """Models and migrations are two descriptions of one schema."""
    relatum_migrations.upgrade(empty_database_url)
    # A user named like the schema has it as its default one, which reflection then shows without its name.
    engine = make_engine(f"{empty_database_url}?options=-csearch_path%3Dpublic")
    options = {
        "include_schemas": True,
        "version_table_schema": "relatum",
        # The parts of `relationships` are made by the database.
        "include_name": lambda name, kind, parents: (
            name == "relatum" if kind == "schema" else kind != "table" or not name.startswith("relationships_")
        ),
        "compare_type": True,
        "compare_server_default": True,
    }
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
    engine.dispose()


def test_a_second_upgrade_changes_nothing(empty_database_url: str) -> None:
    """Whoever starts may call it."""
    assert relatum_migrations.current(empty_database_url) is None
    relatum_migrations.upgrade(empty_database_url)
    relatum_migrations.upgrade(empty_database_url)
    assert relatum_migrations.current(empty_database_url) == relatum_migrations.head()


BEGINNINGS = {
    "0001": "relationships",
    "0002": "group_states",
    "0003": "collected_messages",
    "0004": "placements",
    "0006": "settlements",
    "0009": "recorder_members",
    "0011": "table_parts",
    "0012": "publisher_sessions",
    "0015": "expectations",
    "0016": "masking",
    "0018": "taps",
}
"""A table of each revision."""


@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_each_step_and_on_from_there(empty_database_url: str, revision: str) -> None:
    """Each release's tables come alone, without those of later ones."""
    relatum_migrations.upgrade(empty_database_url, revision)
    assert relatum_migrations.current(empty_database_url) == revision
    engine = make_engine(empty_database_url)
    tables = sa.inspect(engine).get_table_names("relatum")
    assert {each: table in tables for each, table in BEGINNINGS.items()} == {
        each: each <= revision for each in BEGINNINGS
    }
    assert not sa.inspect(engine).has_sequence("placement_epochs", "relatum")
    engine.dispose()
    relatum_migrations.upgrade(empty_database_url)
    assert relatum_migrations.current(empty_database_url) == relatum_migrations.head()


def test_keys_of_the_release_before_name_none(empty_database_url: str) -> None:
    """What it defines goes on to be in force, with a direction from then on."""
    relatum_migrations.upgrade(empty_database_url, "0012")
    engine = make_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(
            sa.text("INSERT INTO relatum.keys (name, sources, type) VALUES ('id', '{header:id}', 'text')")
        )
    relatum_migrations.upgrade(empty_database_url)
    add_keys(engine, [KeyDefinition("cause", names="id")])
    with engine.connect() as connection:
        assert {key.name: key.names for key in key_definitions(connection)} == {"id": None, "cause": "id"}
    engine.dispose()


def test_the_sql_for_review_makes_the_same_schema(empty_database_url: str) -> None:
    """What a DBA runs by hand is what the command runs."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(relatum_migrations.sql())
    assert relatum_migrations.current(empty_database_url) == relatum_migrations.head()


def test_the_roles_may_just_what_they_need(database_url: str) -> None:
    """A consumer reads, a recorder writes rows, neither changes the schema."""
    engine = make_engine(database_url)
    with engine.connect() as connection:

        def may(role: str, table: str, what: str) -> bool:
            query = sa.text("SELECT has_table_privilege(:role, :table, :what)")
            return bool(
                connection.execute(query, {"role": role, "table": f"relatum.{table}", "what": what}).scalar_one()
            )

        assert may("relatum_consumer", "relationships", "SELECT")
        assert not may("relatum_consumer", "relationships", "INSERT")
        assert may("relatum_recorder", "relationships", "INSERT")
        assert not may("relatum_recorder", "relationships", "TRUNCATE")
        assert may("relatum_recorder", "recorder_members", "INSERT")
        assert may("relatum_consumer", "recorder_members", "SELECT")
        assert not may("relatum_consumer", "recorder_members", "INSERT, UPDATE, DELETE")
        assert not may("relatum_recorder", "alembic_version", "UPDATE")
        for table in ("collectors", "collector_members", "collector_sources", "collected_messages"):
            assert may("relatum_collector", table, "UPDATE")
            assert may("relatum_consumer", table, "SELECT")
            assert not may("relatum_consumer", table, "DELETE")
            assert may("relatum_recorder", table, "DELETE")
            assert not may("relatum_recorder", table, "UPDATE")
        assert not may("relatum_collector", "relationships", "SELECT")
        for table in ("super_streams", "super_stream_partitions", "placements", "context_moves", "moved_contexts"):
            assert may("relatum_router", table, "UPDATE")
            assert may("relatum_consumer", table, "SELECT")
            assert not may("relatum_consumer", table, "INSERT, UPDATE, DELETE")
            assert not may("relatum_recorder", table, "INSERT, UPDATE")
        for table in ("serial_consumers", "serial_members", "serial_positions", "serial_holds"):
            for role in ("relatum_router", "relatum_consumer"):
                assert may(role, table, "DELETE"), (role, table)
            assert not may("relatum_recorder", table, "INSERT, UPDATE, DELETE")
        assert not may("relatum_router", "relationships", "SELECT")
        for role in ("relatum_router", "relatum_consumer", "relatum_recorder", "relatum_collector"):
            assert may(role, "settlements", "INSERT"), role
            assert may(role, "settlements", "UPDATE"), role
            assert may(role, "settlements", "DELETE"), role
        for table in ("group_consumers", "group_scans", "group_states"):
            for role in ("relatum_consumer", "relatum_recorder"):
                assert may(role, table, "SELECT, INSERT, UPDATE, DELETE"), (role, table)
    engine.dispose()


@pytest.mark.parametrize(
    ("state", "reason"),
    [("failed", "NULL"), ("dead", "NULL"), ("succeeded", "'late'")],
)
def test_of_finished_messages_just_the_unsuccessful_have_a_reason(database_url: str, state: str, reason: str) -> None:
    """Those that failed are found by an index of reasons: nothing writes what it would not find, or find too much."""
    statement = (
        "INSERT INTO relatum.collected_messages (source_id, stream_offset, size, message_id, type, state, finished_at, "
        f"reason) VALUES (1, 1, 1, 'm', 't', '{state}', now(), {reason})"
    )
    with psycopg.connect(database_url) as connection, pytest.raises(psycopg.errors.CheckViolation, match="_reason"):
        connection.execute(statement)


def test_epochs_are_kept_back_for_nobody(database_url: str) -> None:
    """What one session takes later is higher than what another took before, which a cache would not keep."""
    first, second = psycopg.connect(database_url, autocommit=True), psycopg.connect(database_url, autocommit=True)
    with first, second:
        taken = []
        for connection in (first, second, first):
            (epoch,) = connection.execute("SELECT nextval('relatum.placement_epochs')").fetchone() or (0,)
            taken.append(epoch)
    assert taken == sorted(set(taken))


def test_removing_a_super_stream_removes_what_is_known_of_its_consumers(database_url: str) -> None:
    """What belongs to a row that goes, goes with it; who is placed where is deleted by name."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO relatum.super_streams (name, header) VALUES ('orders', 'h')")
        connection.execute(
            "INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place) "
            "VALUES (1, 'orders-0', '0', 0)"
        )
        connection.execute("INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (1, 'billing')")
        connection.execute(
            "INSERT INTO relatum.serial_positions (consumer_id, partition_id, position) VALUES (1, 1, 0)"
        )
        connection.execute("DELETE FROM relatum.super_streams")
        assert connection.execute("SELECT count(*) FROM relatum.serial_positions").fetchone() == (0,)


def test_a_database_without_the_schema_is_named(empty_database_url: str) -> None:
    """The error says which command to run."""
    engine = make_engine(empty_database_url)
    with pytest.raises(SchemaMissing, match="relatum migrate"):
        add_keys(engine, ["order_id"])
    engine.dispose()


def test_what_is_no_database_is_a_clear_error() -> None:
    """Neither a bad URL nor an absent server shows a password."""
    with pytest.raises(ConfigurationError) as caught:
        make_engine("mysql://user:secret@host/name")
    assert "secret" not in str(caught.value)
    with pytest.raises(DatabaseUnavailable) as absent:
        relatum_migrations.upgrade("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in str(absent.value)


def test_coverage_that_was_written_over_amqp_is_known_to_be_so(empty_database_url: str) -> None:
    """Ranges recorded over AMQP 0.9.1 before the column was there are marked, and no others."""
    relatum_migrations.upgrade(empty_database_url, "0004")
    engine = make_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO relatum.streams (name) VALUES ('s')"))
        connection.execute(
            sa.text(
                "INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, last_offset,"
                " last_fingerprint, last_chunk_ms) SELECT stream_id, 0, 1, '{}', false, c.* FROM relatum.streams,"
                " (VALUES (0, 7, NULL), (0, 7, 1000), (NULL, NULL, NULL)) AS c (a, b, c)"
            )
        )
    relatum_migrations.upgrade(empty_database_url)
    with engine.connect() as connection:
        marks = connection.execute(sa.text("SELECT over_amqp FROM relatum.coverage ORDER BY coverage_id")).scalars()
        assert list(marks) == [True, False, False]
    engine.dispose()
