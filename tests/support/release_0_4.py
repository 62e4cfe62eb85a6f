"""A database as release 0.4.0 left it."""

from pathlib import Path
from typing import Final

import psycopg

REVISION: Final = "0004"
"""The newest revision of release 0.4.0."""


def make_release_0_4(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(Path(__file__).with_suffix(".sql").read_bytes())
