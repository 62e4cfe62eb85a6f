"""The application: the list of commands, each imported when it runs. Prints an error as one line, with an exit code."""

import sys
from importlib import import_module
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from relatum.common import limits
from relatum.errors import RelatumError
from relatum_cli.exits import EPILOG, exit_code_of
from relatum_cli.options import Commands
from relatum_cli.show import guard_stdout, print_error

LOOK_UP: Final = "Look up"
RECORD: Final = "Record"
ORDER: Final = "Order and groups"
OPERATE: Final = "Operate"

COMMANDS: Final = {
    "find": ("find", LOOK_UP, "Find the messages whose KEY has this VALUE."),
    "related": ("find", LOOK_UP, "Find the messages that share a key with a message, or are next to it in time."),
    "around": ("find", LOOK_UP, "Show the messages around a MOMENT in all recorded streams, by time."),
    "trace": ("find", LOOK_UP, "Show all messages connected with a message or a value, and what caused what."),
    "read": ("streams", LOOK_UP, "Read messages at offsets, without the database."),
    "expect": ("missing", LOOK_UP, "Define which messages must be followed by others: see `relatum missing`."),
    "missing": ("missing", LOOK_UP, "List the messages that should have been followed in time, and were not."),
    "web": ("servers", LOOK_UP, "Serve a page and a JSON API for lookups, until SIGTERM or Ctrl-C."),
    "mcp": ("servers", LOOK_UP, "Serve lookups to an agent over stdin and stdout (Model Context Protocol)."),
    "keys": ("keys", RECORD, "Define, list and remove relationship keys."),
    "tap": ("streams", RECORD, "Copy each message of exchanges into a stream, without changing publishers."),
    "untap": ("streams", RECORD, "Stop copying messages of exchanges. Streams and recorded rows stay."),
    "record": ("record", RECORD, "Record streams: catch up, then follow new messages, until SIGTERM or Ctrl-C."),
    "backfill": ("record", RECORD, "Record messages that are not recorded yet; a stopped run can be resumed."),
    "verify": ("record", RECORD, "Compare streams with the recorded rows, in both directions."),
    "prune": ("record", RECORD, "Delete rows of messages that retention has dropped, and of removed keys."),
    "forget": ("record", RECORD, "Delete everything recorded for streams; the streams themselves stay."),
    "status": ("status", RECORD, "Show how far each stream is recorded, and its latest events."),
    "groups": ("groups", ORDER, "List incomplete groups; show one group, or a group consumer."),
    "outcome": ("status", ORDER, "Show the outcomes of messages that collectors process."),
    "contexts": ("contexts", ORDER, "Place serialization contexts, move them between partitions, verify order."),
    "affinity": ("affinity", ORDER, "List, show, close and move affinity sets."),
    "super-stream": ("streams", ORDER, "Declare, describe and delete super streams; show where keys go."),
    "up": ("servers", OPERATE, "Run a private RabbitMQ and PostgreSQL, and print their URLs, until Ctrl-C."),
    "demo": ("demo", OPERATE, "Publish, record and find real messages: flights, planes and weather."),
    "migrate": ("servers", OPERATE, "Create the schema `relatum`, or bring it up to date. Safe to run again."),
}
"""All commands in the order of the help: module, heading, and the help's first line, which the docstring continues."""


def load(name: str) -> Any:
    """Import a command, and return it as a Click command."""
    module, _, text = COMMANDS[name]
    found = getattr(import_module(f"relatum_cli.{module}"), name.replace("-", "_"))
    # Typer converts only functions and applications that are part of an application.
    parent = Commands(rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name, help=text, no_args_is_help=True)
    else:
        # The MOMENT of `around` may be -5m, which is not an option.
        settings = {"ignore_unknown_options": name == "around"}
        parent.command(name, help=f"{text}\n\n{getdoc(found)}", context_settings=settings)(found)
    return typer.main.get_group(parent).get_command(None, name)  # type: ignore[arg-type]


class _LazyGroup(TyperGroup):
    """Imports a command when it runs, and prints a `RelatumError` as one line, with an exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (_, panel, text) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=text, rich_help_panel=panel), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as Typer does, and import it: the list has only placeholders."""
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None:
            found = load(name)
        if ctx.obj is not None:
            ctx.obj()
        return name, found, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RelatumError as error:
            print_error(str(error))
            raise typer.Exit(exit_code_of(error)) from error


app = typer.Typer(
    name="relatum",
    cls=_LazyGroup,
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # Local variables may contain URLs with passwords.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
"""The application. It calls its `obj` after importing a command, and before running it."""


def _print_version(wanted: bool) -> None:
    if wanted:
        is_pure = str(limits.__file__).endswith(".py")
        typer.echo(f"{version('relatum')} ({'pure Python' if is_pure else 'compiled'})")
        raise typer.Exit


VERSION: Final = "Print the version, and whether the code is compiled."


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION)] = False,
) -> None:
    """Find the messages that belong together, across RabbitMQ streams, without scanning them."""


def main(obj: Any = None) -> None:
    guard_stdout()
    try:
        app(prog_name="relatum", obj=obj)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()
