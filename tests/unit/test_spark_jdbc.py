"""What Spark's JDBC reads are made of: URLs, jars, cuts."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import ConfigurationError
from relatum_spark import catalog, jdbc_jar
from relatum_spark._cuts import block_ranges, page_cuts, place_cuts, place_ranges, spread


class Session:
    """A session that has the driver, and keeps what is set."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.conf = self
        self.schema = None

    def sql(self, _query: str) -> "Session":
        """Answer whether the driver is there."""
        return self

    def get(self, name: str, default: Any) -> Any:
        """A setting."""
        return self.settings.get(name, default)

    def set(self, name: str, value: str) -> None:
        """Keep a setting."""
        self.settings[name] = value


def jdbc_options(url: str) -> dict[str, str]:
    """The options that Spark's JDBC source gets for a URL."""
    session: Any = Session()
    catalog(session, "c", database=url)
    prefix = "spark.sql.catalog.c."
    return {name.removeprefix(prefix): value for name, value in session.settings.items() if name.startswith(prefix)}


URLS = {
    "postgresql://user:pw@db:5433/name": "jdbc:postgresql://db:5433/name",
    "postgresql+psycopg://user@db/name": "jdbc:postgresql://db:5432/name",
    "postgres://user@db/na%20me": "jdbc:postgresql://db:5432/na%20me",
    "postgresql://user@db": "jdbc:postgresql://db:5432/user",
    "postgresql://user@[::1]:5433/name": "jdbc:postgresql://[::1]:5433/name",
    "postgresql://user:pw@h1:5433,h2/name?sslmode=require": "jdbc:postgresql://h1:5433,h2:5432/name",
    "postgresql://user@h1,[::1]:5433/name": "jdbc:postgresql://h1:5432,[::1]:5433/name",
    "postgresql://user@/name?host=h1:5433&host=h2": "jdbc:postgresql://h1:5433,h2:5432/name",
    "postgresql://user@/name?host=h1,h2&port=1,2": "jdbc:postgresql://h1:1,h2:2/name",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_becomes_the_drivers(url: str) -> None:
    """Hosts, ports and the database's name go into the JDBC URL; no credentials do."""
    options = jdbc_options(url)
    assert options["url"] == URLS[url]
    assert options["user"] == "user"
    assert options["driver"] == "org.postgresql.Driver"
    assert int(options["fetchsize"]) > 0


def test_credentials_are_decoded_and_kept_out_of_the_url() -> None:
    """A password with any character in it reaches the driver as it is, as a property."""
    options = jdbc_options("postgresql://us%40er:p%2Fw%3F%20@db/name")
    assert (options["user"], options["password"]) == ("us@er", "p/w? ")
    assert options["url"] == "jdbc:postgresql://db:5432/name"


def test_user_and_password_come_from_the_environment_where_the_url_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGUSER and PGPASSWORD count, as for every client of PostgreSQL."""
    monkeypatch.setenv("PGUSER", "someone")
    monkeypatch.setenv("PGPASSWORD", "secret")
    options = jdbc_options("postgresql://db/name")
    assert (options["user"], options["password"]) == ("someone", "secret")


def test_options_of_tls_are_translated() -> None:
    """What libpq calls by one name the driver may call by another."""
    options = jdbc_options(
        "postgresql://u@db/n?sslmode=verify-full&sslrootcert=/ca.pem&sslcert=/c.pem&sslkey=/k.pk8"
        "&connect_timeout=3&target_session_attrs=read-write&keepalives_idle=5"
    )
    assert options["sslmode"] == "verify-full"
    assert (options["sslrootcert"], options["sslcert"], options["sslkey"]) == ("/ca.pem", "/c.pem", "/k.pk8")
    assert (options["connectTimeout"], options["targetServerType"]) == ("3", "primary")
    assert "keepalives_idle" not in options


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql:///name", "Unix socket"),
        ("postgresql://user:secret@/name?host=/run/postgresql", "Unix socket"),
        ("mysql://user:secret@db/name", "PostgreSQL, not in 'mysql'"),
        ("postgresql://user:secret@db:port/name", "must be a URL"),
        ("postgresql://user:secret@/name?host=h1,h2,h3&port=1,2", "do not go together"),
        ("no url, secret", "must be a URL"),
        ("postgresql://user:secret@db/name?krbsrvname=x", "krbsrvname"),
        ("postgresql://user:secret@db/name?target_session_attrs=x", "target_session_attrs"),
    ],
)
def test_what_the_driver_cannot_use_is_refused(url: str, said: str) -> None:
    """One clear error, without the URL."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        jdbc_options(url)
    assert "secret" not in str(refused.value)


def test_the_jar_is_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """RELATUM_JDBC_JAR goes before the system's package, and is never passed over in silence."""
    jar = tmp_path / "driver.jar"
    monkeypatch.setenv("RELATUM_JDBC_JAR", str(jar))
    with pytest.raises(ConfigurationError, match=r"driver\.jar"):
        jdbc_jar()
    jar.touch()
    assert jdbc_jar() == str(jar)


samples = st.lists(st.integers(0, 200), min_size=1, max_size=60)


@given(rows=samples, parts=st.integers(1, 20), pages_each=st.integers(1, 50))
def test_cuts_of_pages_are_in_order_and_inside(rows: list[int], parts: int, pages_each: int) -> None:
    """Whatever the sample shows, even nothing, there are at most as many parts as asked for, and none is empty."""
    pages = len(rows) * pages_each
    sample = [(at * pages_each, count) for at, count in enumerate(rows)]
    cuts = page_cuts(pages, sample, parts)
    assert len(cuts) < parts
    assert all(low < high for low, high in pairwise([0, *cuts, pages]))


def test_cuts_of_pages_follow_the_rows() -> None:
    """An empty half of the table is no part's whole work."""
    sample = [(page, 0) for page in range(0, 500, 10)] + [(page, 100) for page in range(500, 1000, 10)]
    assert page_cuts(1000, sample, 4) == [625, 750, 875]


@given(
    places=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50)), max_size=60),
    looked_for=st.tuples(st.integers(1, 5), st.integers(0, 60)),
    parts=st.integers(1, 8),
)
def test_each_place_is_in_exactly_one_range(
    places: list[tuple[int, int]], looked_for: tuple[int, int], parts: int
) -> None:
    """Also places that nobody saw when the cuts were made."""
    conditions = place_ranges(place_cuts(sorted(places), parts))
    stream_id, stream_offset = looked_for
    names = {"stream_id": stream_id, "stream_offset": stream_offset, "true": True}
    met = [eval(text.replace(" = ", " == ").replace("AND", "and").replace("OR", "or"), names) for text in conditions]
    assert sum(met) == 1
    assert len(conditions) <= parts


def test_ranges_of_blocks_are_of_one_part_where_they_can_be() -> None:
    """Pages that are added to a part while tasks run belong to its last range."""
    assert block_ranges([], []) == ["true"]
    assert block_ranges([(3, 10)], [7, 9]) == [
        "part = 3 AND place < '(7,0)'::tid",
        "part = 3 AND place >= '(7,0)'::tid AND place < '(9,0)'::tid",
        "part = 3 AND place >= '(9,0)'::tid",
    ]
    assert block_ranges([(0, 4), (1, 4), (5, 4)], [2, 8, 10]) == [
        "part = 0 AND place < '(2,0)'::tid",
        "part = 0 AND place >= '(2,0)'::tid OR part = 1",
        "part = 5 AND place < '(2,0)'::tid",
        "part = 5 AND place >= '(2,0)'::tid",
    ]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    numbers=st.sets(st.integers(0, 40), max_size=8),
    looked_for=st.tuples(st.integers(0, 4), st.integers(0, 20)),
)
def test_each_page_is_in_exactly_one_range(sizes: list[int], numbers: set[int], looked_for: tuple[int, int]) -> None:
    """Also those behind the last one that a part had when the cuts were made."""
    extents = [(2 * at, size) for at, size in enumerate(sizes)]
    conditions = block_ranges(extents, sorted(number for number in numbers if 0 < number < sum(sizes)))
    part, page = 2 * (looked_for[0] % len(sizes)), looked_for[1]
    texts = [re.sub(r"'\((\d+),0\)'::tid", r"\1", text).replace(" = ", " == ") for text in conditions]
    names = {"part": part, "place": page, "true": True}
    assert sum(eval(text.replace("AND", "and").replace("OR", "or"), names) for text in texts) == 1


def test_places_are_spread_over_what_is_recorded() -> None:
    """A hot stream gets the most of them, and a hole none."""
    places = spread([(1, 1, 0, 900), (2, 1, 5000, 5100)], 10)
    assert places == [(1, offset) for offset in range(0, 900, 100)] + [(2, 5000)]
    assert spread([], 10) == []
