"""What goes to the terminal: names of others as they are, on a terminal and in a pipe, and never as commands to it."""

import io

import pytest
from rich.text import Text

from relatum.terminal import console as data_console
from relatum.terminal import errors, table_of

HOSTILE = "[bold]a[/bold] :warning: b"
"""Nothing of it is markup."""

ESCAPES = "\x1b[2Jred\x9b"
SHOWN = "·[2Jred·"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_of_others_are_shown_as_they_are(is_terminal: bool) -> None:
    """In lines and in tables, as text or as rich's: no markup, no emoji, no control characters."""
    file = io.StringIO()
    console = type(data_console)(file=file, force_terminal=is_terminal, color_system=None, width=100)
    console.print(HOSTILE, ESCAPES)
    table = table_of("name")
    for cell in (HOSTILE, ESCAPES, Text(HOSTILE), Text(ESCAPES)):
        table.add_row(cell)
    console.print(table)
    shown = file.getvalue()
    assert shown.count(HOSTILE) == shown.count(SHOWN) == 3
    assert not {"\x1b", "\x9b"} & set(shown)


def test_errors_show_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, too."""
    errors.print(f"{HOSTILE} {ESCAPES}", soft_wrap=True)
    assert capsys.readouterr().err == f"{HOSTILE} {SHOWN}\n"
