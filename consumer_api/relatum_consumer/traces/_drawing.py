"""A trace as a graph for Mermaid. What messages and keys say is text there, and never markup."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from relatum.ids import MessageId
from relatum_consumer.traces._trace import Trace

_LABEL_MAX: Final = 60
"""Characters of a value in a graph; the rest is cut."""


class _Node(NamedTuple):
    name: str
    lines: tuple[str, ...]
    is_value: bool


class _Line(NamedTuple):
    source: str
    target: str
    label: str
    is_directed: bool


def mermaid(trace: Trace) -> str:
    """The graph."""
    names = _names(trace)
    lines = ["flowchart LR"]
    for node in _nodes(trace, names):
        label = f'"{"<br/>".join(map(_entities, node.lines))}"'
        lines.append(f"  {node.name}({label})" if node.is_value else f"  {node.name}[{label}]")
    for line in _lines(trace, names):
        arrow = f'-- "{_entities(line.label)}" -->' if line.is_directed else "-.-"
        lines.append(f"  {line.source} {arrow} {line.target}")
    return "\n".join([*lines, ""])


def _names(trace: Trace) -> dict[MessageId, str]:
    return {message.id: f"m{n}" for n, message in enumerate(trace)}


def _nodes(trace: Trace, names: dict[MessageId, str]) -> Iterator[_Node]:
    for message in trace:
        time = "no time" if message.time is None else message.time.isoformat(sep=" ", timespec="milliseconds")
        yield _Node(names[message.id], (_cut(str(message.id)), time), is_value=False)
    for n, shared in enumerate(trace.shared):
        yield _Node(f"v{n}", (_cut(f"{shared.key} = {shared.value}"),), is_value=True)
    for n, edge in enumerate(trace.edges):
        if edge.cause is None:
            yield _Node(f"u{n}", (_cut(f"{edge.key} = {edge.value}"), "not found"), is_value=True)


def _lines(trace: Trace, names: dict[MessageId, str]) -> Iterator[_Line]:
    for n, edge in enumerate(trace.edges):
        cause = f"u{n}" if edge.cause is None else names[edge.cause]
        yield _Line(cause, names[edge.effect], _cut(edge.key), is_directed=True)
    for n, shared in enumerate(trace.shared):
        for where in shared.ids:
            yield _Line(f"v{n}", names[where], "", is_directed=False)


def _cut(text: str) -> str:
    return text if len(text) <= _LABEL_MAX else text[: _LABEL_MAX - 1] + "…"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "�" for each in text)


def _entities(text: str) -> str:
    """Text as Mermaid has it in quotes: whatever could be markup there is given by its number."""
    return "".join(each if each.isalnum() or each in " =@.:-_+,…" else f"#{ord(each)};" for each in _printable(text))
