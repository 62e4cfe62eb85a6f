"""Options that several commands share, and the forms of times and spans on the command line.

URLs may contain passwords, so the help never shows one as a default.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, time, timedelta
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.models import ArgumentInfo

from relatum.errors import ConfigurationError
from relatum_cli.logs import LogLevel, set_up_logging
from relatum_cli.show import note

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from relatum.reading import Broker
    from relatum_consumer import Relations

F = TypeVar("F", bound=Callable[..., None])

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"

_BROKER: Final = "RabbitMQ: amqp://user:password@host:5672/vhost, amqps:// or rabbitmq-stream://; separate nodes by ;"
_STREAM: Final = "The stream protocol's URL, if its port is not AMQP's minus 120: rabbitmq-stream://host:5552."
_DATABASE: Final = "PostgreSQL: postgresql://user:password@host:5432/name."
_MISSING: Final = (
    "no URL of {}: give {} or set {} to {}; to try Relatum, `relatum up` runs both servers and prints their URLs"
)
ALL_STREAMS: Final = "Streams and super streams; by default all recorded streams."
NOTHING_RECORDED: Final = "No stream is recorded yet. `relatum record STREAM` records one."
LOOK_IN: Final = "Search this stream or super stream; repeatable. By default all recorded streams."

FORMS: Final = "2026-11-22T12:03, 2026-11-22, 12:03, -5m or now; in UTC, or with a zone such as +01:00 at the end"

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
"""The length of each unit, in seconds."""


def parse_span(text: str) -> float:
    """Return a time span in seconds. The text is a number, or a number with s, m, h or d."""
    found = _SPAN.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a time span: give seconds, or 90s, 15m, 6h, 2d")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > timedelta.max.total_seconds():
        raise typer.BadParameter(f"{text!r} is too long: a time span has at most {timedelta.max.days:,} days")
    return seconds


def parse_moment(text: str, now: datetime | None = None) -> datetime:
    """Return the moment that a text in one of `FORMS` means. Without a zone it is UTC, and a note on stderr says so.

    A time without a day means its latest occurrence.
    """
    now = datetime.now(UTC) if now is None else now
    text = text.strip()
    if text.lower() == "now":
        return now
    try:
        if text.startswith("-"):
            return now - timedelta(seconds=parse_span(text[1:]))
        if text[2:3] == ":":
            clock = time.fromisoformat(text)
            moment = datetime.combine(now.astimezone(clock.tzinfo or UTC), clock)
            moment -= timedelta(moment.replace(tzinfo=clock.tzinfo or UTC) > now)
        else:
            moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a time: give {FORMS}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
        note(f"{text!r} is read as {moment.isoformat()} (UTC, since no zone was given)")
    return moment


def argument(help: str, metavar: str | None = None, *, default: Any = ..., **more: Any) -> Any:  # noqa: A002
    """Return a command's argument, to be a parameter's default or annotation; the help does not show its default."""
    return typer.Argument(default, metavar=metavar, help=help, show_default=False, **more)


def option(default: Any, help: str, *names: str, **more: Any) -> Any:  # noqa: A002 - as Typer names it
    """Return a command's option, to be a parameter's default; the help shows its default value, if any."""
    return typer.Option(default, *names, help=help, show_default=default not in (None, False, "", ...), **more)


def span(default: Any, help: str, *names: str) -> Any:  # noqa: A002 - as Typer names it
    """Return a command's option for a time span in seconds, to be a parameter's default; see `parse_span`."""
    return option(default, help, *names, metavar="SPAN", parser=parse_span)


def shared(help: str, *names: str, shown: bool = False, **more: Any) -> Any:  # noqa: A002 - as Typer names it
    """Return an option of several commands, to be a parameter's annotation; `shown`: The help shows its default."""
    return typer.Option(*names, help=help, show_default=shown, **more)


BrokerUrl = Annotated[str | None, shared(_BROKER, "--broker", envvar=BROKER_VARIABLE, metavar="URL")]
StreamUrl = Annotated[str | None, shared(_STREAM, "--stream-url", envvar=STREAM_VARIABLE, metavar="URL")]
DatabaseUrl = Annotated[str | None, shared(_DATABASE, "--database", envvar=DATABASE_VARIABLE, metavar="URL")]
Json = Annotated[bool, shared("Print JSON for programs.", "--json")]
Yes = Annotated[bool, shared("Do not ask for confirmation.", "--yes")]
StreamNames = Annotated[list[str] | None, argument(ALL_STREAMS, "[STREAM…]")]
LookIn = Annotated[list[str] | None, shared(LOOK_IN, "--streams", "-s", metavar="STREAM")]
Level = Annotated[
    LogLevel | None, shared("The lowest level to log on stderr; debug includes the requests to servers.", "--log-level")
]
Moment = Annotated[datetime, argument(f"{FORMS}.", parser=parse_moment)]
Since = Annotated[
    datetime | None, shared(f"Only messages from this time on: {FORMS}.", parser=parse_moment, metavar="MOMENT")
]
Until = Annotated[datetime | None, shared("Only messages before this time.", parser=parse_moment, metavar="MOMENT")]
KeyNames = Annotated[
    list[str] | None, shared("Search by this key; repeatable. By default all keys.", "--by", "-b", metavar="KEY")
]
BatchRows = Annotated[int, shared("Maximum rows deleted per transaction.", min=1, max=1_000_000, shown=True)]
Port = Annotated[int, shared("The page's port; 0: a free port.", min=0, max=65_535, shown=True)]


@dataclass(frozen=True)
class BrokerOptions:
    """The options for the broker; see `Commands`."""

    broker_url: BrokerUrl = None
    stream_url: StreamUrl = None

    @property
    def broker(self) -> "Broker":
        """The broker; `ConfigurationError` if its URL is missing or invalid."""
        # Imported here, so that `relatum --help` is fast.
        from relatum.reading import Broker

        if not self.broker_url:
            given = "RabbitMQ", "--broker", BROKER_VARIABLE, "amqp://user:password@host:5672/"
            raise ConfigurationError(_MISSING.format(*given))
        return Broker(self.broker_url, stream_url=self.stream_url)

    @property
    def vhost(self) -> str:
        """The virtual host in the broker's URL; / if no URL is given."""
        return self.broker.vhost if self.broker_url else "/"


@dataclass(frozen=True)
class DatabaseOptions:
    """The option for the database; see `Commands`."""

    database: DatabaseUrl = None

    @property
    def database_url(self) -> str:
        """The database's URL; `ConfigurationError` if it is missing."""
        if not self.database:
            given = "PostgreSQL", "--database", DATABASE_VARIABLE, "postgresql://user:password@host:5432/name"
            raise ConfigurationError(_MISSING.format(*given))
        return self.database

    def engine(self) -> "AbstractContextManager[Engine]":
        # Imported here, so that a command's help is fast.
        from relatum.store.database import IDLE_S, as_engine

        return as_engine(self.database_url, idle_s=IDLE_S)


@dataclass(frozen=True)
class ServerOptions(DatabaseOptions, BrokerOptions):
    """The options for broker and database; see `Commands`."""

    def relations(self, log_level: LogLevel | None = None, **options: Any) -> "Relations":
        """Return an open `Relations`. Also sets up logging at a level; None leaves Python's default."""
        from relatum_consumer import Relations

        if log_level is not None:
            set_up_logging("text", log_level)
        return Relations(self.broker, self.database_url, **options)


@dataclass(frozen=True)
class CommandOptions(ServerOptions):
    """The options for broker and database, and `--json`; see `Commands`."""

    as_json: Json = False


@dataclass(frozen=True)
class LookupOptions(CommandOptions):
    """The options of lookups: servers, output, completeness and log level; see `Commands`."""

    complete: bool = option(False, "Also read messages that are not recorded yet, from the streams.", "--complete")
    log_level: Level = None


def print_exports(broker: "Broker", database_url: str) -> None:
    """Print the servers' URLs as `export` lines for another shell, where all commands then use these servers."""
    urls = {BROKER_VARIABLE: broker.url, STREAM_VARIABLE: broker.stream_url, DATABASE_VARIABLE: database_url}
    for variable, url in urls.items():
        if url is not None:
            typer.echo(f"export {variable}={shlex.quote(url)}")


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter by its fields: options, or arguments before the command's other arguments."""
    classes: dict[str, Any] = {}
    arguments: list[Parameter] = []
    others: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if not is_dataclass(parameter.annotation):
            others.append(parameter)
            continue
        classes[name] = parameter.annotation
        for each in signature(classes[name]).parameters.values():
            found = each.replace(kind=Parameter.KEYWORD_ONLY)
            (arguments if isinstance(each.default, ArgumentInfo) else others).append(found)
    parameters = [*arguments, *others]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, dataclass_type in classes.items():
            values[name] = dataclass_type(**{field.name: values.pop(field.name) for field in fields(dataclass_type)})
        command(**values)

    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class Commands(typer.Typer):
    """A group of commands. A command may take dataclasses of options as parameters."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            super(Commands, self).command(name, **options)(_with_fields(function))
            return function

        return register
