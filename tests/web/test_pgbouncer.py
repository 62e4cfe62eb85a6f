"""The page behind a pgbouncer that hands out sessions by transaction, as its own user."""

from pathlib import Path

import pytest

from tests.support.pgbouncer import holds_statements, pgbouncer
from tests.support.web import asking
from tests.web.conftest import World
from tests.web.test_api import examples

SESSIONS = 3
"""Sessions that all of the page's connections share."""

MORE = ["", "max_prepared_statements = 0"] if holds_statements() else [""]


@pytest.mark.parametrize("more", MORE)
def test_all_answers_are_those_of_without_it(world: World, reader_url: str, tmp_path: Path, more: str) -> None:
    """One by one and many at once: the same status and the same messages, whatever session each statement gets."""
    paths = [f"/api{path}" for each in examples(world).values() for path in each]
    searches = ["/api/search?key=host&value=busy&limit=50", f"/api/message?stream={world.orders}&offset=1"] * 25
    settings = f"ignore_startup_parameters = options\n{more}"
    with (
        pgbouncer(reader_url, tmp_path, pool_size=SESSIONS, more=settings) as pooled,
        asking(world.page()) as direct,
        asking(world.page(database=pooled)) as page,
    ):
        for path in paths:
            given = page.get(path)
            assert given.status_code == direct.get(path).status_code, (path, given.text)
        expected = {path: direct.get(path).json() for path in set(searches)}
        for path, given in zip(searches, page.together(searches), strict=True):
            assert given.status_code == 200, given.text
            for part in ("results", "keys", "headers"):
                assert given.json().get(part) == expected[path].get(part)


def test_a_pooler_that_refuses_its_sessions_is_told_of(world: World, reader_url: str, tmp_path: Path) -> None:
    """Without `ignore_startup_parameters` there is no answer, and the error says which setting is missing."""
    with pgbouncer(reader_url, tmp_path) as pooled, asking(world.page(database=pooled)) as page:
        given = page.get("/api/search?key=host&value=busy")
        assert given.status_code == 503
        assert "ignore_startup_parameters" in given.text
