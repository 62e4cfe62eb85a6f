"""Tables on the terminal, where it is narrow."""

import io

from rich.console import Console

from relatum.command._output import table_of


def test_names_are_never_cut_off() -> None:
    """A long name goes on in the next line; what is short stays whole."""
    table = table_of("from", "to", "state", whole=("state",))
    table.add_row("orders-of-last-year-0", "orders-of-last-year-1", "switched")
    out = io.StringIO()
    Console(file=out, width=36).print(table)
    shown = out.getvalue()
    assert "…" not in shown
    assert "switched" in shown
    rows = [line.split("│")[1:4] for line in shown.splitlines() if line.startswith("│")]
    assert ["".join(row[column].strip() for row in rows) for column in (0, 1)] == [
        "orders-of-last-year-0",
        "orders-of-last-year-1",
    ]
