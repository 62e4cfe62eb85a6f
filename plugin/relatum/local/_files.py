"""Files that hold a password."""

import os
from pathlib import Path


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read, from its first byte on."""
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
