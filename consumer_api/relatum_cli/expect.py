"""`relatum expect`: what is to follow messages, as the database has it."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from relatum.terminal import JsonOption, ServerOptions, console, option, parse_span, print_json, spread
from relatum_consumer.expectations import (
    GRACE_S,
    Expectation,
    add_expectations,
    defined_expectations,
    remove_expectation,
)

__all__ = ["expect"]

expect = typer.Typer(
    help="Define what is to follow messages, list it and remove it: what `relatum missing` looks for.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

NameArgument = Annotated[str, typer.Argument(help="The expectation's name.", show_default=False)]
VhostOption = Annotated[str | None, option("The streams' virtual host, if not the broker's.")]


@expect.command("add")
@spread
def add(
    name: NameArgument,
    of: Annotated[str, option("The stream or super stream to be followed.", metavar="STREAM")],
    by: Annotated[str, option("The key that both messages share.", metavar="KEY")],
    follows: Annotated[str, option("The stream or super stream that follows.", metavar="STREAM")],
    within: Annotated[
        float,
        typer.Option(
            metavar="SPAN", parser=parse_span, help="In which time: seconds, or 90s, 15m, 6h, 2d.", show_default=False
        ),
    ],
    grace: Annotated[
        str, typer.Option(metavar="SPAN", help="By how much the clocks of publishers may differ, as seconds or 1m.")
    ] = f"{GRACE_S:g}s",
    vhost: VhostOption = None,
    *,
    servers: ServerOptions,
    as_json: JsonOption = False,
) -> None:
    """Say that each message of one stream is followed by one of another with the same key, within a time.

    One that is defined already and says the same is kept. `--json` prints one document: the expectation.
    """
    wanted = Expectation(name, of=of, by=by, follows=follows, within_s=within, grace_s=parse_span(grace))
    add_expectations(servers.database_url, wanted, vhost=_vhost(servers, vhost))
    if as_json:
        print_json(wanted)
    else:
        console.print(f"{name}: {wanted.meaning}")


@expect.command("list")
@spread
def list_expectations(vhost: VhostOption = None, *, servers: ServerOptions, as_json: JsonOption = False) -> None:
    """List the expectations of a virtual host. `--json` prints one document, the list."""
    found = defined_expectations(servers.database_url, vhost=_vhost(servers, vhost))
    if as_json:
        print_json(found)
        return
    if not found:
        console.print("Nothing is expected. `relatum expect add NAME` says what is.")
        return
    table = Table("name", "of", "by", "follows", "within", "clocks")
    for each in found:
        times = f"{each.within_s:g} s", f"± {each.grace_s:g} s"
        table.add_row(*(Text(cell) for cell in (each.name, each.of, each.by, each.follows, *times)))
    console.print(table)


@expect.command("remove")
@spread
def remove(name: NameArgument, vhost: VhostOption = None, *, servers: ServerOptions) -> None:
    """Take an expectation back; code 6 where there is none of that name."""
    remove_expectation(servers.database_url, name, vhost=_vhost(servers, vhost))
    console.print(f"{name} is expected no longer.")


def _vhost(servers: ServerOptions, vhost: str | None) -> str:
    if vhost is not None:
        return vhost
    return servers.address.vhost if servers.broker else "/"
