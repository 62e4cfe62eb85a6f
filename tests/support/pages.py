"""Pages of the documentation, run as they stand there."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aio_pika
import pika

import relatum


def section(page: str, heading: str = "") -> str:
    """A page's text below a heading of the second level; all of it without one."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0] if heading else text


def run_blocks(text: str, renamed: Mapping[str, str], **names: Any) -> dict[str, Any]:
    """Run the blocks of Python one after the other; gives their names.

    Args:
        text: The page, or a part of it.
        renamed: What to write instead of what stands there.
        names: What the blocks may use, beside the clients and this package.
    """
    names |= {"relatum": relatum, "pika": pika, "aio_pika": aio_pika, "asyncio": asyncio}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        for before, after in renamed.items():
            block = block.replace(before, after)
        exec(compile(block, "docs", "exec"), names)
    return names
