"""`python -m benchmarks`: measure, print a table, write a JSON file."""

import sys
from pathlib import Path
from typing import Final

from benchmarks import (
    affinity,
    bloom,
    collecting,
    contexts,
    copying,
    group_reading,
    growth,
    lag,
    lookups,
    many,
    moving,
    publishing,
    recorders,
    recording,
    serial,
    service,
    sizes,
    tapping,
    tracing,
)
from benchmarks._command import run

# The recorder first: later groups look up the messages that it records last.
GROUPS: Final = {
    group.GROUP: group
    for group in (
        recording,
        lookups,
        service,
        copying,
        bloom,
        many,
        group_reading,
        tracing,
        publishing,
        tapping,
        affinity,
        contexts,
        serial,
        moving,
        collecting,
        lag,
        recorders,
        sizes,
        growth,
    )
}

RESULTS: Final = Path(__file__).with_name("results.json")

SHORT: Final = ("publishing", "lookups", "recording", "many")
"""The groups of the short form, the quickest first: a busy machine may not reach the last ones."""

if __name__ == "__main__":
    sys.exit(run("python -m benchmarks", GROUPS, RESULTS, SHORT))
