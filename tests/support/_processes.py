"""Processes: run to their ends, and looked at from outside."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_python(*arguments: str, timeout_s: float = 300, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter to its end, which must be in order."""
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, **options)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return ended


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
