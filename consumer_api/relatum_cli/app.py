"""The Typer application: commands found through entry points, imported when they are run; errors as exit codes."""

from functools import cache
from importlib.metadata import entry_points, version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from relatum import limits
from relatum.command._command_list import HELP
from relatum.errors import RelatumError
from relatum.terminal import EPILOG, ExitCode, ending_with_output, exit_code_of, print_error

ENTRY_POINT_GROUP: Final = "relatum.commands"
"""Where rooms and packages register their commands: NAME = "module:function", or a `typer.Typer` of several."""


class _Group(TyperGroup):
    """Commands that are imported when they are run, and Relatum's errors as one line and an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
        for name in [*(name for name in HELP if name in self._points), *sorted(self._points.keys() - HELP.keys())]:
            found = TyperCommand(name, help=HELP[name]) if name in HELP else self._imported(name)
            if found is not None:
                self.add_command(found, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer's, with the command itself, not what the list shows of it."""
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None:
            found = self._imported(name)
            if found is None:
                raise typer.Exit(ExitCode.CONFIGURATION)
        if ctx.obj is not None:
            ctx.obj()
        return name, found, rest

    def _imported(self, name: str) -> Any:
        """A command; None where it cannot be imported, which is said."""
        try:
            command = self._points[name].load()
        except ImportError as error:
            print_error(f"the command {name!r} cannot be loaded: {error}")
            return None
        # Typer makes commands of functions, and groups of its applications, as parts of an application only.
        around = typer.Typer(rich_markup_mode="markdown")
        if isinstance(command, typer.Typer):
            around.add_typer(command, name=name)
        else:
            # A command's own settings of Click are an attribute of its function.
            around.command(name, context_settings=getattr(command, "context_settings", None))(command)
        return typer.main.get_group(around).get_command(None, name)  # type: ignore[arg-type]

    def invoke(self, ctx: Any) -> Any:
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


def _print_version(wanted: bool) -> None:
    if wanted:
        is_pure = str(limits.__file__).endswith(".py")
        typer.echo(f"{version('relatum')} ({'pure Python' if is_pure else 'compiled'})")
        raise typer.Exit


@cache
def complete_app() -> typer.Typer:
    """The application with all commands that are installed.

    What is given to it as `obj` is called as soon as a command is imported, before that is run.
    """
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
    app.callback()(_root)
    return app


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version, and whether it runs compiled."
        ),
    ] = False,
) -> None:
    """Find the messages that belong together, across RabbitMQ streams, without scanning them."""


def main() -> None:
    """Run the command on the process's arguments and end the process."""
    complete_app()(prog_name="relatum")
