"""RabbitMQ's own files, with only those of its plugins that are needed: it starts by half the work.

Erlang looks for each of a thousand modules in one plugin's directory after the other, of which there are seventy.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_APPLICATIONS = re.compile(r"\{\s*applications\s*,\s*\[([^]]*)\]")


def needed_home(script: Path, home: Path, plugins: Sequence[str]) -> Path | None:
    """Make a RabbitMQ's home that refers to another one's files.

    Args:
        script: The server script of the other one.
        home: The directory to be made; one that is there is replaced.
        plugins: Names of those that are enabled; what they and the server need comes with them.

    Returns:
        The directory of its scripts; None where the other one does not lie as RabbitMQ's packages and archives do,
        or lacks one of the plugins: whoever put it so has it as it is.
    """
    if home.exists():
        shutil.rmtree(home)
    theirs = script.resolve().parent.parent
    found = {each.name.rpartition("-")[0]: each for each in theirs.glob("plugins/*-*") if each.is_dir()}
    needed = ["rabbit", *plugins]
    if not found.keys() >= set(needed):
        return None
    for name in needed:  # grows while it is walked
        described = found[name] / "ebin" / f"{name}.app"
        applications = _APPLICATIONS.search(described.read_text("utf-8")) if described.is_file() else None
        if applications is None:
            return None
        of = re.findall(r"\w+", applications[1])
        needed += [each for each in dict.fromkeys(of) if each in found and each not in needed]
    for folder in ("plugins", "sbin"):
        (home / folder).mkdir(mode=0o700, parents=True)
    (home / "escript").symlink_to(theirs / "escript")  # of RabbitMQ's tools
    for target in script.resolve().parent.iterdir():
        (home / "sbin" / target.name).symlink_to(target)
    for name in needed:
        (home / "plugins" / found[name].name).symlink_to(found[name])
    return home / "sbin"
