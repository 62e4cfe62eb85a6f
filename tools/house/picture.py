"""The picture of the rooms in docs/architecture.md, compared with the import graph.

The picture is the page's block that begins with the line `rooms`. A line `room -> other another` has a room's arrows,
and the line `ground: …` names the rooms that any room may import; arrows to these are not drawn.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PAGE: Final = Path("docs/architecture.md")

_BLOCK: Final = re.compile(r"^```text\nrooms\n(.*?)^```", re.MULTILINE | re.DOTALL)


def drawn(page: str) -> tuple[dict[str, set[str]], set[str]]:
    """Return the arrows of the page's picture by room, and the ground's rooms.

    Raises:
        ValueError: the page has no picture.
    """
    block = _BLOCK.search(page)
    if block is None:
        raise ValueError(f"{PAGE} has no block of text that begins with the line 'rooms'")
    graph: dict[str, set[str]] = {}
    ground: set[str] = set()
    for line in block[1].splitlines():
        name, arrow, others = line.partition("->")
        if arrow:
            graph[name.strip()] = set(others.split())
        elif line.startswith("ground:"):
            ground |= set(line.removeprefix("ground:").split())
    return graph, ground


def differences(page: str, graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield a complaint about each room and arrow that is only in the picture or only in the imports."""
    picture, ground = drawn(page)
    imports = {short(room): {short(other) for other in others} - ground for room, others in graph.items()}
    for room in sorted({*imports, *picture} - ground):
        if room not in picture:
            yield f"{PAGE} does not draw {room}"
        elif room not in imports:
            yield f"{PAGE} draws {room}, which does not exist"
        else:
            yield from (f"{room} imports {other}: not in {PAGE}" for other in sorted(imports[room] - picture[room]))
            yield from (f"{PAGE}: {room} -> {other} is not imported" for other in sorted(picture[room] - imports[room]))
    yield from (
        f"{PAGE}: {room} belongs to the ground and imports {other}, which does not"
        for room in sorted(ground)
        for other in sorted(imports.get(room, set()) - picture.get(room, set()))
    )


def short(room: str) -> str:
    """Return a room's name in the picture: without `relatum.`; `relatum` itself stays."""
    return room.removeprefix("relatum.")
