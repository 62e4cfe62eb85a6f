"""What `relatum demo --contexts` prints for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from relatum.terminal import console
from relatum_consumer.demo._contexts import Result
from relatum_consumer.demo._show import DIFFERENCES_SHOWN


def print_result(result: Result) -> None:
    """What came of the demo, for people."""
    table = Table("partition", "planes at the end", "messages in it")
    for stream, planes in result.planes_in.items():
        first, end = result.report.partitions.get(stream, (0, 0))
        table.add_row(Text(stream), f"{planes:,}", f"{end - first:,}")
    console.print(table)
    how = "in order, none twice" if result.ok else "NOT as they were published"
    console.print(
        f"   {result.flights:,} flights of {result.planes:,} planes were published and consumed {how}: compared, plane "
        f"by plane,\n   with the data frame, and with a full reading of all partitions.",
    )
    for each in result.differences[:DIFFERENCES_SHOWN]:
        console.print(f"   {each.plane}: {len(each.expected)} flights published, consumed {each.consumed}")
    for finding in result.report.findings[:DIFFERENCES_SHOWN]:
        console.print(f"   {finding.kind}: {finding.stream}@{finding.offset}: {finding.text}")


def document(result: Result) -> dict[str, Any]:
    """What came of the demo, for programs."""
    return {
        "ok": result.ok,
        "flights": result.flights,
        "planes": result.planes,
        "consumed_s": result.seconds,
        "partitions": result.planes_in,
        "moves": [
            {"source": move.source, "target": move.target, "contexts": move.contexts, "pause_s": move.pause_s}
            for move in result.moves
        ],
        "strays": result.report.strays,
        "missing": result.missing,
        "doubled": result.doubled,
        "differences": [asdict(each) for each in result.differences],
        "findings": [asdict(each) for each in result.report.findings],
    }
