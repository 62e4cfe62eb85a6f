"""Runs the whole suite in two processes side by side, each with servers of its own: most of it waits most of the time.

Usage: python tools/run_tests.py [PYTEST ARGUMENT...]

Prints each part's lines as they come, and ends with the first exit code that is not 0.
"""

import subprocess
import sys
import threading
from typing import Final

PARTS: Final = (
    ("tests/integration", "--ignore=tests/integration/spark"),
    (
        "tests/unit",
        "tests/contract",
        "tests/cluster",
        "tests/migration",
        "tests/packaging",
        "tests/acceptance",
        "tests/integration/spark",
    ),
)
"""Two parts of about the same length. Tests with a JVM, and those with clusters of brokers, are in one of them."""


def main() -> int:
    """Run the parts; the exit code is theirs."""
    runs = [
        subprocess.Popen(  # noqa: S603 - the interpreter that runs this, and the arguments of who runs it
            [sys.executable, "-m", "pytest", *part, *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for part in PARTS
    ]
    printing = threading.Lock()
    threads = [threading.Thread(target=show, args=(run, printing)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next((code for code in [run.wait() for run in runs] if code), 0)


def show(run: "subprocess.Popen[bytes]", printing: threading.Lock) -> None:
    """Print the lines of a part, each whole."""
    assert run.stdout is not None, "it is a pipe"
    for line in run.stdout:
        with printing:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
