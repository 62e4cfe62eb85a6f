"""What came from what, as a tree in lines: each message once, behind and below what it came from. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """A message's line: how deep it is, what it stands below (None at the top), and what it came from besides that."""

    message: int
    depth: int
    cause: int | None
    others: tuple[int, ...]


def branches(count: int, edges: Sequence[tuple[int, int]]) -> tuple[Branch, ...]:
    """The lines, from the top.

    Args:
        count: How many messages there are; they are known by their numbers from 0 on, in the order of time.
        edges: Pairs of a cause and what came from it.
    """
    causes: list[dict[int, None]] = [{} for _ in range(count)]
    effects: list[dict[int, None]] = [{} for _ in range(count)]
    for source, target in edges:
        causes[target][source] = None
        effects[source][target] = None
    found: dict[int, Branch] = {}
    # Those that came from none first; then of a circle, in which each came from another, whichever was first.
    for top in sorted(range(count), key=lambda number: (bool(causes[number]), number)):
        stack: list[tuple[int, int, int | None]] = [(top, 0, None)]
        while stack:
            number, depth, cause = stack.pop()
            if number in found:
                continue
            others = tuple(each for each in causes[number] if each != cause)
            found[number] = Branch(number, depth, cause, others)
            stack += [(each, depth + 1, number) for each in sorted(effects[number], reverse=True)]
    return tuple(found.values())
