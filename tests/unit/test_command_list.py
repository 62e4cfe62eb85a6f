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


def test_the_list_names_all_commands() -> None:
    """Each command that is installed with Relatum is in the list, and nothing else."""
    assert set(HELP) == set(POINTS)


@pytest.mark.parametrize("name", HELP)
def test_the_list_says_what_the_command_says(name: str) -> None:
    """The line of a command in the list is the first paragraph of its own help."""
    command = POINTS[name].load()
    said = command.info.help if isinstance(command, typer.Typer) else command.__doc__
    assert " ".join(said.strip().split("\n\n")[0].split()) == HELP[name]


def test_a_command_imports_what_it_needs_and_no_more() -> None:
    """The list, the version and `relatum read` start without SQLAlchemy or PySpark, the list even without a client."""
    program = (
        "import sys\nneedless = set(sys.argv.pop().split(','))\n"
        "from relatum.command import main\ntry:\n    main()\nfinally:\n"
        "    print(*(needless & set(sys.modules)), file=sys.stderr)"
    )
    needless = "sqlalchemy,pyspark,pandas,aio_pika,alembic"
    for arguments in (
        ("--help", f"{needless},pika,relatum.reading"),
        ("--version", f"{needless},pika,relatum.reading"),
        ("read", "--help", needless),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=90, check=True
        )
        assert ended.stderr.strip() == "", arguments


def test_commands_of_recording_show_their_help_without_a_driver() -> None:
    """What they are made of is imported as they run."""
    program = (
        "import sys\nfrom importlib.metadata import entry_points\n"
        "for point in entry_points(group='relatum.commands'):\n"
        "    if point.name in ('backfill', 'forget', 'keys', 'record', 'verify'):\n        point.load()\n"
        "print(*({'sqlalchemy', 'psycopg', 'pika', 'relatum.reading', 'relatum.store'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True)
    assert ended.stdout.strip() == ""


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
