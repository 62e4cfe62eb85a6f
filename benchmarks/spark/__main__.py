"""`python -m benchmarks.spark`: measure, print a table, write a JSON file."""

import sys
from pathlib import Path
from typing import Final

from benchmarks._command import run
from benchmarks.spark import batches, filling, reading, resolving, table

# The back-fill before the groups that look up its rows.
GROUPS: Final = {group.GROUP: group for group in (reading, filling, resolving, table, batches)}

RESULTS: Final = Path(__file__).with_name("results.json")

if __name__ == "__main__":
    sys.exit(run("python -m benchmarks.spark", GROUPS, RESULTS))
