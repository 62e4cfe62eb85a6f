"""What README and docs show in Python can be run as it stands there: it compiles, and every name is introduced."""

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from symtable import Symbol, SymbolTable, symtable

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)
"""`py` marks what a page's examples begin with: URLs and connections, which tests of the page have of their own."""

NOT_RUN = re.compile(r"<!-- not run: [^>]+ -->\n```python\n")

RUN = {
    "README.md": "acceptance/test_examples.py",
    "docs/affinity.md": "integration/test_pages.py",
    "docs/collector.md": "integration/test_pages.py",
    "docs/contexts.md": "integration/test_contexts_pages.py",
    "docs/existing-service.md": "acceptance/test_examples.py",
    "docs/groups.md": "integration/test_pages.py",
    "docs/metrics.md": "integration/test_metrics_told.py",
    "docs/opentelemetry.md": "integration/test_pages.py",
    "docs/spark.md": "integration/spark/test_page.py",
    "docs/sql.md": "integration/spark/test_relationships.py",
    "docs/super-streams.md": "integration/test_pages.py",
    "docs/traces.md": "integration/test_traces.py",
}


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    text = page.read_text()
    for found in BLOCK.finditer(text):
        yield text.count("\n", 0, found.start()) + 2, found[1]


def symbols(table: SymbolTable) -> Iterator[Symbol]:
    yield from table.get_symbols()
    for inner in table.get_children():
        yield from symbols(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_can_be_run(page: Path) -> None:
    """They compile and use no name that is not on the page before; a test runs them, or each says why none does."""
    known = set(dir(builtins))
    for line, block in blocks(page):
        compile(block, f"{page}:{line}", "exec")
        found = list(symbols(symtable(block, f"{page}:{line}", "exec")))
        known |= {each.get_name() for each in found if each.is_assigned() or each.is_imported() or each.is_parameter()}
        used = {each.get_name() for each in found if each.is_referenced()}
        assert used <= known, f"{page.name}, line {line}: {sorted(used - known)}"
    test, text = RUN.get(str(page.relative_to(ROOT))), page.read_text()
    assert test is None or page.name in (ROOT / "tests" / test).read_text(), f"{test} does not read {page.name}"
    unmarked = len(re.findall(r"```python\n", text)) - len(NOT_RUN.findall(text))
    assert bool(unmarked) == bool(test), f"{page.name}: {unmarked} blocks to be run, by {test}"
