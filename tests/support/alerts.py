"""The alerts that we ship for Prometheus, evaluated as it would against a page of metrics."""

import operator
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

RULES = Path(__file__).parents[2] / "docker" / "prometheus" / "alerts.yaml"
_RULE = re.compile(r"- alert: (\w+)\n\s+expr: (.+)\n")
_ABSENT = re.compile(r"absent\((\w+)\)")
_COMPARED = re.compile(r"(?:max by \((\w+)\) \((\w+)\)|(\w+)) (==|>|<) ([\d.]+)")
_OPERATORS = {"==": operator.eq, ">": operator.gt, "<": operator.lt}


def documented_alerts() -> dict[str, str]:
    return dict(_RULE.findall(RULES.read_text()))


def fires(expression: str, metrics: str) -> bool:
    """Whether an alert fires on a page of metrics, once it has lasted; fails for an expression it does not know."""
    absent = _ABSENT.fullmatch(expression)
    if absent:
        return not list(_values(metrics, absent[1], None))
    compared = _COMPARED.fullmatch(expression)
    assert compared, f"no such expression is evaluated here: {expression}"
    label, grouped, plain, comparison, number = compared.groups()
    greatest: dict[str, float] = {}
    for group, value in _values(metrics, grouped or plain, label):
        greatest[group] = max(value, greatest.get(group, value))
    return any(_OPERATORS[comparison](value, float(number)) for value in greatest.values())


def _values(metrics: str, name: str, label: str | None) -> Iterator[tuple[str, float]]:
    """A metric's values, each with the value of a label, or with all labels."""
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels[label] if label else str(sample.labels), sample.value
