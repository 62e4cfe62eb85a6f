"""Where a private server keeps everything, and files there that hold a password."""

import os
from pathlib import Path
from typing import Any

from relatum.checks import checked_name


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user can read, from its first byte on; a kill leaves the whole file, or none."""
    unfinished = file.with_name(f"{file.name}.new")
    descriptor = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    unfinished.replace(file)


def checked_directory(directory: Any) -> Path:
    """A directory that may be there or not, absolute.

    Raises:
        InvalidInput: it is no path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    return Path(checked_name("directory", path)).absolute()
