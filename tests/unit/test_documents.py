"""What README and docs show in Python can be run unchanged, and the page and the board show all metrics."""

import builtins
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from symtable import Symbol, SymbolTable, symtable
from typing import Any

import pytest

import relatum
import relatum_consumer
from relatum.metrics import Counter, Distribution, Metric, declared
from relatum.wire.frames import Command

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
    "docs/expectations.md": "integration/test_pages.py",
    "docs/groups.md": "integration/test_pages.py",
    "docs/metrics.md": "integration/test_metrics_told.py",
    "docs/opentelemetry.md": "integration/test_pages.py",
    "docs/spark.md": "integration/spark/test_page.py",
    "docs/sql.md": "integration/spark/test_relationships.py",
    "docs/super-streams.md": "integration/test_pages.py",
    "docs/tap.md": "integration/test_pages.py",
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


def test_each_command_of_the_stream_protocol_is_on_the_page() -> None:
    """The page of questions names each command of the stream protocol."""
    page = (ROOT / "docs" / "questions.md").read_text()
    assert [command.name for command in Command if f"`{command.name}`" not in page] == []


PAGE = (ROOT / "docs" / "metrics.md").read_text()
BOARD = json.loads((ROOT / "docker" / "grafana" / "relatum.json").read_text())
NAME = re.compile(r"\brelatum_\w+")
GROUPED = re.compile(r"by \(([^)]*)\) \((?:rate\()?(relatum_\w+)")
OF_PROMETHEUS = {"le", "instance", "job"}


@pytest.fixture(scope="module")
def metrics() -> list[Metric]:
    for package in (relatum, relatum_consumer):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            if "\n@reported(" in path.read_text():
                import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
    return [metric for metric in declared() if not metric.name.startswith("relatum_tried")]


def unit_of(metric: Metric) -> str:
    found = re.search(r"_(seconds|bytes)(_total)?$", metric.name)
    return found[1] if found else ""


def type_of(metric: Metric) -> str:
    return {Counter: "counter", Distribution: "histogram"}.get(type(metric), "gauge")


def series_of(metric: Metric) -> list[str]:
    parts = ("_bucket", "_sum", "_count") if isinstance(metric, Distribution) else ("",)
    return [metric.name + part for part in parts]


def test_names_follow_the_rules(metrics: list[Metric]) -> None:
    """One meaning for a name; the unit is last, but for the `_total` of counters."""
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    for metric in metrics:
        assert re.fullmatch(r"relatum(_[a-z]+)+", metric.name), metric
        assert metric.name.endswith("_total") == isinstance(metric, Counter), metric
        assert not isinstance(metric, Distribution) or unit_of(metric) == "seconds", metric


def test_the_page_has_each_metric_as_it_is(metrics: list[Metric]) -> None:
    """Name, type, labels, unit and meaning; no metric is missing, and none is made up."""
    rows = {
        f"| `{metric.name}` | {type_of(metric)} | {', '.join(f'`{label}`' for label in metric.labels) or '–'} "
        f"| {unit_of(metric) or '–'} | {metric.meaning} |"
        for metric in metrics
    }
    assert {line for line in PAGE.splitlines() if line.startswith("| `relatum_")} == rows


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from expressions(panel.get("panels", []))


def test_the_board_shows_what_there_is(metrics: list[Metric]) -> None:
    """Each name it asks for exists, with the labels it groups by; and each metric is somewhere on it."""
    by_series = {series: metric for metric in metrics for series in series_of(metric)}
    asked = list(expressions(BOARD["panels"]))
    shown = {by_series[name].name for expression in asked for name in NAME.findall(expression)}
    assert shown == {metric.name for metric in metrics}
    for expression in asked:
        for labels, name in GROUPED.findall(expression):
            known = OF_PROMETHEUS.union(by_series[name].labels)
            assert known.issuperset(labels.replace(" ", "").split(",")), expression
