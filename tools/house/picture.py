"""The picture of the subsystems in docs/architecture.md, compared with the import graph.

The picture is the page's block that begins with the line `subsystems`. A line `one -> other another` lists the imports
of a subsystem, and the line `ground: …` names subsystems that any subsystem may import; imports of these are not drawn.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PAGE: Final = Path("docs/architecture.md")

_BLOCK: Final = re.compile(r"^```text\nsubsystems\n(.*?)^```", re.MULTILINE | re.DOTALL)


def drawn(page: str) -> tuple[dict[str, set[str]], set[str]]:
    """Return the arrows of the page's picture by subsystem, and the ground's subsystems.

    Raises:
        ValueError: the page has no picture.
    """
    block = _BLOCK.search(page)
    if block is None:
        raise ValueError(f"{PAGE} has no block of text that begins with the line 'subsystems'")
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
    """Yield a complaint about each subsystem and arrow that is only in the picture or only in the imports."""
    picture, ground = drawn(page)
    imports = {short(each): {short(other) for other in others} - ground for each, others in graph.items()}
    for each in sorted({*imports, *picture} - ground):
        if each not in picture:
            yield f"{PAGE} does not draw {each}"
        elif each not in imports:
            yield f"{PAGE} draws {each}, which does not exist"
        else:
            yield from (f"{each} imports {other}: not in {PAGE}" for other in sorted(imports[each] - picture[each]))
            yield from (f"{PAGE}: {each} -> {other} is not imported" for other in sorted(picture[each] - imports[each]))
    yield from (
        f"{PAGE}: {each} belongs to the ground and imports {other}, which does not"
        for each in sorted(ground)
        for other in sorted(imports.get(each, set()) - picture.get(each, set()))
    )


def short(name: str) -> str:
    """Return a subsystem's name in the picture: without `relatum.`; `relatum` itself stays."""
    return name.removeprefix("relatum.")
