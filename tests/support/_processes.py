"""Looking at processes from outside."""

import os
from pathlib import Path


def processes_naming(text: str) -> list[int]:
    """Return the ids of the processes, this one excepted, with `text` in their command, environment or directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            seen += os.fsencode((entry / "cwd").readlink())
        except OSError:
            continue  # has ended, or belongs to another user
        if os.fsencode(text) in seen:
            found.append(int(entry.name))
    return found
