"""Options that several commands share. URLs may hold passwords: none is ever printed or shown as a default."""

from typing import Annotated, TypeAlias

import typer

from relatum.errors import ConfigurationError

BROKER_VARIABLE = "RELATUM_BROKER_URL"
STREAM_VARIABLE = "RELATUM_STREAM_URL"
DATABASE_VARIABLE = "RELATUM_DATABASE_URL"

BrokerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--broker",
        envvar=BROKER_VARIABLE,
        metavar="URL",
        show_default=False,
        help="RabbitMQ: amqp://user:password@host:5672/vhost, amqps:// or rabbitmq-stream://.",
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
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def require_broker(url: str | None) -> str:
    """The broker's URL.

    Raises:
        ConfigurationError: none was given.
    """
    if not url:
        raise ConfigurationError(f"which RabbitMQ? Give --broker or set {BROKER_VARIABLE}")
    return url


def require_database(url: str | None) -> str:
    """The database's URL.

    Raises:
        ConfigurationError: none was given.
    """
    if not url:
        raise ConfigurationError(f"which PostgreSQL? Give --database or set {DATABASE_VARIABLE}")
    return url
