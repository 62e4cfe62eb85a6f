"""The list of commands: what it says of each is what the command says of itself, and it imports none of them."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from relatum.command import complete_app
from relatum.command._command_list import HELP
from relatum.terminal import ExitCode

POINTS = {point.name: point for point in entry_points(group="relatum.commands")}


def test_the_list_says_what_the_commands_say() -> None:
    """Each command that is installed is in it, with the first paragraph of its own help, and nothing else is."""
    said = {}
    for name, point in POINTS.items():
        command = point.load()
        help_ = command.info.help if isinstance(command, typer.Typer) else command.__doc__
        said[name] = " ".join(help_.strip().split("\n\n")[0].split())
    assert said == HELP


NEEDLESS = "sqlalchemy,pyspark,pandas,aio_pika,alembic"
NAMED = "print(*(needless & set(sys.modules)), file=sys.stderr)"
RUN = f"from relatum.command import main\ntry:\n    main()\nfinally:\n    {NAMED}"
LOAD = (
    "from importlib.metadata import entry_points\nfor point in entry_points(group='relatum.commands'):\n"
    "    if point.name in ('backfill', 'forget', 'keys', 'record', 'verify'):\n        point.load()\n"
    f"{NAMED}"
)


@pytest.mark.parametrize(
    ("program", "arguments", "needless"),
    [
        (RUN, ["--help"], f"{NEEDLESS},pika,relatum.reading"),
        (RUN, ["--version"], f"{NEEDLESS},pika,relatum.reading"),
        (RUN, ["read", "--help"], NEEDLESS),
        (LOAD, [], "sqlalchemy,psycopg,pika,relatum.reading,relatum.store"),
    ],
    ids=["help", "version", "read", "commands of recording"],
)
def test_a_command_imports_what_it_needs_and_no_more(program: str, arguments: list[str], needless: str) -> None:
    """Lists and helps start without a client of either server; what a command is made of is imported as it runs."""
    words = [sys.executable, "-c", f"import sys\nneedless = set(sys.argv.pop().split(','))\n{program}"]
    ended = subprocess.run([*words, *arguments, needless], capture_output=True, text=True, timeout=90, check=True)
    assert ended.stderr.strip() == ""


def test_a_name_that_is_misspelt_is_an_error_of_use() -> None:
    """What is no command ends with the code of wrong usage, and names what is alike."""
    ended = CliRunner().invoke(complete_app(), ["super-streams"])
    assert ended.exit_code == ExitCode.USAGE
    assert "super-stream" in ended.output


def test_a_command_that_cannot_be_imported_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of another package that lacks something is named, and the list goes on."""
    package = tmp_path / "elsewhere-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[relatum.commands]\nbroken = elsewhere.command:broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    listed = CliRunner().invoke(complete_app(), ["--help"])
    assert listed.exit_code == ExitCode.OK
    assert "record" in listed.stdout
    assert "the command 'broken' cannot be loaded: No module named 'elsewhere'" in capfd.readouterr().err
