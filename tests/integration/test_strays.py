"""Rows of no stream are deleted while recorders take up new streams."""

from typing import Any

import sqlalchemy as sa

from relatum.recording._strays import delete_strays
from relatum.store.catalog import ensure_stream
from relatum.store.tables import receipts


def test_rows_of_a_stream_that_is_new_meanwhile_stay(engine: sa.Engine) -> None:
    """What is recorded of a stream that was taken up after the known ones were read is not taken for a stray."""
    with engine.begin() as connection:
        ensure_stream(connection, "/", "old")
        connection.execute(sa.insert(receipts), [{"message_id": "of no stream", "stream_id": 90, "stream_offset": 1}])
    recorder = sa.create_engine(engine.url)
    news: list[int] = []

    def take_up(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM relatum.receipts") and not news:
            with recorder.begin() as connection:
                news.append(ensure_stream(connection, "/", "new").stream_id)
                row = {"message_id": "new", "stream_id": news[0], "stream_offset": 0}
                connection.execute(sa.insert(receipts), [row])

    sa.event.listen(engine, "before_cursor_execute", take_up)
    try:
        delete_strays(engine)
    finally:
        recorder.dispose()
    with engine.connect() as connection:
        assert list(connection.execute(sa.select(receipts.c.message_id)).scalars()) == ["new"]
