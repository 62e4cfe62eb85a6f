"""The Typer application: the kernel's commands, those found through entry points, and errors made exit codes."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from relatum.command._affinity import affinity
from relatum.command._backfill import backfill
from relatum.command._contexts import contexts
from relatum.command._exits import EPILOG, exit_code_of
from relatum.command._forget import forget
from relatum.command._keys import keys
from relatum.command._outcome import outcome
from relatum.command._output import ending_with_output, print_error
from relatum.command._prune import prune
from relatum.command._read import read
from relatum.command._record import record
from relatum.command._status import status
from relatum.command._super_stream import super_stream
from relatum.command._up import up
from relatum.command._verify import verify
from relatum.errors import RelatumError

ENTRY_POINT_GROUP: Final = "relatum.commands"
"""Where packages above the kernel register their commands: NAME = "module:function", or a `typer.Typer` of several."""

_ORDER: Final = (
    "up", "demo", "migrate", "keys", "record", "find", "related", "groups", "read", "status", "outcome", "backfill",
    "verify", "prune", "forget", "super-stream", "affinity", "contexts", "spark",
)  # fmt: skip


class _Group(TyperGroup):
    """Commands in the order in which they are met, and Relatum's errors as one line and an exit code."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        known = super().list_commands(ctx)
        return sorted(known, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        # Here and around all of it: Typer ends with 1 by itself where a pipe is closed.
        with ending_with_output():
            try:
                return super().invoke(ctx)
            except RelatumError as error:
                print_error(str(error))
                raise typer.Exit(exit_code_of(error)) from error

    def main(self, *arguments: Any, **options: Any) -> Any:
        """As Typer's; its help and its own errors are output like any other."""
        with ending_with_output():
            return super().main(*arguments, **options)


app = typer.Typer(
    name="relatum",
    cls=_Group,
    help="Find the messages that belong together, across RabbitMQ streams, without scanning them.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # Local variables hold URLs, and URLs hold passwords.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys, name="keys")
app.add_typer(super_stream, name="super-stream")
app.add_typer(affinity, name="affinity")
app.add_typer(contexts, name="contexts")
for _command in (up, record, read, status, outcome, backfill, verify, prune, forget):
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("relatum"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Find the messages that belong together, across RabbitMQ streams, without scanning them."""


def _add(found: EntryPoint) -> None:
    """Add a command of another package; one that cannot be imported is named and left out."""
    try:
        command = found.load()
    except ImportError as error:
        print_error(f"the command {found.name!r} cannot be loaded: {error}")
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=found.name)
    else:
        app.command(found.name)(command)


@cache
def complete_app() -> typer.Typer:
    """The application with the commands of the packages above the kernel.

    Not when this module is imported: those packages import it.
    """
    for found in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        _add(found)
    return app


def main() -> None:
    """Run the command on the process's arguments and end the process."""
    complete_app()(prog_name="relatum")
