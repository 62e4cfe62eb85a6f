"""Options that several commands share. URLs may hold passwords: none is ever printed or shown as a default."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, get_type_hints

import typer

from relatum.errors import ConfigurationError

if TYPE_CHECKING:
    from relatum.reading import BrokerAddress

BROKER_VARIABLE = "RELATUM_BROKER_URL"
STREAM_VARIABLE = "RELATUM_STREAM_URL"
DATABASE_VARIABLE = "RELATUM_DATABASE_URL"

_TO_TRY: Final = "; to try it, `relatum up` runs both and prints their URLs"

_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""How spans of time are written: the seconds of each unit."""

BrokerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--broker",
        envvar=BROKER_VARIABLE,
        metavar="URL",
        show_default=False,
        help="RabbitMQ: amqp://user:password@host:5672/vhost, amqps:// or rabbitmq-stream://; several nodes by ;",
    ),
]
StreamUrlOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--stream-url",
        envvar=STREAM_VARIABLE,
        metavar="URL",
        show_default=False,
        help="Where the stream protocol answers, if not 120 ports below AMQP's: rabbitmq-stream://host:5552.",
    ),
]
DatabaseOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar=DATABASE_VARIABLE,
        metavar="URL",
        show_default=False,
        help="PostgreSQL: postgresql://user:password@host:5432/name.",
    ),
]
SuperStreamArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="SUPER_STREAM", help="The super stream's name.", show_default=False)
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def argument(metavar: str, help: str) -> Any:  # noqa: A002 - as Typer names it
    """An argument of a command, without a default to be shown."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(help: str, *names: str, metavar: str | None = None) -> Any:  # noqa: A002 - as Typer names it
    """An option of a command, without a default to be shown."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)


def require_broker(url: str | None) -> str:
    """The broker's URL."""
    if not url:
        raise ConfigurationError(
            f"which RabbitMQ? Give --broker or set {BROKER_VARIABLE} to amqp://user:password@host:5672/{_TO_TRY}"
        )
    return url


def require_database(url: str | None) -> str:
    """The database's URL."""
    if not url:
        raise ConfigurationError(
            f"which PostgreSQL? Give --database or set {DATABASE_VARIABLE} to postgresql://user:password@host:5432/name{_TO_TRY}"
        )
    return url


def print_exports(broker_url: str, stream_url: str | None, database_url: str) -> None:
    """Print servers' URLs as lines for a shell: pasted into another terminal, every command there uses them."""
    urls = {BROKER_VARIABLE: broker_url, STREAM_VARIABLE: stream_url, DATABASE_VARIABLE: database_url}
    for variable, url in urls.items():
        if url is not None:
            typer.echo(f"export {variable}={shlex.quote(url)}")


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What a command line, or the environment, says of the broker; see `spread`."""

    broker: BrokerOption = None
    stream_url: StreamUrlOption = None

    @property
    def broker_url(self) -> str:
        """The broker's URL; `ConfigurationError` where none was given."""
        return require_broker(self.broker)

    @property
    def address(self) -> "BrokerAddress":
        """The broker's address; `ConfigurationError` where none was given, or it cannot be one."""
        # Not with the application: `relatum --help` reads nothing.
        from relatum.reading import BrokerAddress

        return BrokerAddress.parse(self.broker_url, self.stream_url)


@dataclass(frozen=True, slots=True)
class ServerOptions(BrokerOptions):
    """What a command line, or the environment, says of broker and database; see `spread`."""

    database: DatabaseOption = None

    @property
    def database_url(self) -> str:
        """The database's URL; `ConfigurationError` where none was given."""
        return require_database(self.database)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a dataclass of options; on its command line, each field is an option by itself."""
    hints = get_type_hints(command, include_extras=True)
    taken: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in taken:
            kinds = get_type_hints(taken[name], include_extras=True)
            for field in fields(taken[name]):
                kind = Parameter.KEYWORD_ONLY
                parameters.append(Parameter(field.name, kind, default=field.default, annotation=kinds[field.name]))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in taken.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parse_span(text: str) -> float:
    """Seconds from text: a number, or one with s, m, h or d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is no span of time: give seconds, or 90s, 15m, 6h, 2d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > timedelta.max.total_seconds():
        raise typer.BadParameter(f"{text!r} is longer than time can be")
    return seconds
