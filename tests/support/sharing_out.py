"""Which tests one process of pytest-xdist runs after the other, and in which order processes begin with them."""

from pathlib import PurePosixPath
from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

SPARK: Final = PurePosixPath("tests/integration/spark")
OWN_JVM: Final = ("test_page",)
"""Files that start what they need by themselves."""


def scope_of(node_id: str) -> str:
    """What a test runs together with: its file, or those that share Spark's JVM, the three nodes or the page."""
    path = PurePosixPath(node_id.partition("::")[0])
    if path.parent.name == "cluster":
        return "cluster"
    if path.parent.name == "web" and path.stem != "test_browser":
        return "web"
    if path.parent != SPARK or path.stem in OWN_JVM:
        return str(path)
    return "spark"


def longest_first(items: list[pytest.Item]) -> None:
    """Begin with what takes longest and end with what takes least, else by name: so no process is idle at the end."""

    def turn(item: pytest.Item) -> tuple[bool, bool]:
        is_long = scope_of(item.nodeid).startswith(("spark", "cluster", "web", "tests/web/", "tests/packaging/"))
        return not is_long, item.nodeid.startswith("tests/unit/")

    items.sort(key=turn)


class BySharedFixtures(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole scopes to processes, as they become free."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
