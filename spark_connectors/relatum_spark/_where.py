"""Which broker and which database a Spark job uses: from arguments, else from the environment."""

import gc
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypedDict

import sqlalchemy as sa

from relatum.errors import ConfigurationError, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.catalog import key_definitions
from relatum.store.database import as_engine
from relatum.store.translation import translated_errors

if TYPE_CHECKING:
    from relatum_spark._table import Snapshot

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"

WORKER_REUSED: Final = "SPARK_REUSE_WORKER"
"""Spark sets this variable in Python workers that run more than one task."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker's address, login and TLS files. Can be pickled: each task opens its own connection.

    Neither `repr` nor errors show the password.

    Attributes:
        address: The broker's addresses, user and password.
        tls_ca_file: The certificate authorities to trust: a file that exists on every node, or PEM text; None for those
            of the URL, else the system's.
        tls_certificate_file: The client's certificate, a file or PEM text; None for the URL's, if any.
        tls_key_file: Its key, a file or PEM text; None where it is in the certificate's file.
        timeout_s: Seconds without an answer after which a call raises `ReadTimeout`.
        tls_key_password: The key's password.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None for the
            URL's, else PLAIN.
    """

    address: BrokerAddress
    tls_ca_file: str | None = field(default=None, repr=False)
    tls_certificate_file: str | None = field(default=None, repr=False)
    tls_key_file: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    tls_key_password: str | None = field(default=None, repr=False)
    auth_mechanism: str | None = None

    @classmethod
    def of(cls, broker: "str | BrokerAddress | Broker | None", stream_url: str | None = None) -> "Broker":
        """Return the broker that an argument names, else the one of RELATUM_BROKER_URL (and RELATUM_STREAM_URL).

        Raises:
            ConfigurationError: neither names one, or the URL cannot be read.
        """
        if isinstance(broker, Broker):
            return broker
        if isinstance(broker, BrokerAddress):
            return cls(broker)
        if broker is None:
            broker = os.environ.get(BROKER_VARIABLE)
            stream_url = stream_url or os.environ.get(STREAM_VARIABLE)
        if not broker:
            raise ConfigurationError(f"which RabbitMQ? Give the broker's URL or set {BROKER_VARIABLE}")
        return cls(BrokerAddress.parse(broker, stream_url))

    def open(self) -> StreamReader:
        """Open a connected reader. Errors as of `StreamReader.open`."""
        spare_collections()
        return StreamReader.open(self.logged_in(), timeout_s=self.timeout_s)

    def logged_in(self) -> BrokerAddress:
        """Return the address with these options of logging in.

        Raises:
            ConfigurationError: the options contradict each other, or the URL has no TLS.
        """
        given: dict[str, Any] = {
            "ca": self.tls_ca_file,
            "certificate": self.tls_certificate_file,
            "key": self.tls_key_file,
            "key_password": self.tls_key_password,
            "mechanism": self.auth_mechanism and self.auth_mechanism.upper(),
        }
        return self.address.logging_in(**{name: value for name, value in given.items() if value is not None})


class Where(TypedDict, total=False):
    """The arguments that every join takes: which servers, and how to read the relationship table.

    Attributes:
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's database.
        broker: The broker, whose virtual host the streams belong to; None for RELATUM_BROKER_URL. A join reads it only
            for payloads, for times without a key, and for the ends of streams; without one the virtual host is `/`.
        stream_url: The stream protocol's URL, where it does not follow from the broker's URL.
        partitions: Tasks that read the table or the streams at once, 1 to 10,000; None for 8.
        snapshot: The state of the table to read; the action must run inside its block.
    """

    database: str | None
    broker: str | BrokerAddress | Broker | None
    stream_url: str | None
    partitions: int | None
    snapshot: "Snapshot | None"


def database_url(database: str | None) -> str:
    """Return PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL, else raise `ConfigurationError`."""
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"which PostgreSQL? Give the database's URL or set {DATABASE_VARIABLE}")
    return found


def definitions_of(database: str, names: Collection[str]) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of their names; the database is asked only for some."""
    if not names:
        return []
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return definitions_in(connection, names)


def definitions_in(connection: sa.Connection, names: Collection[str] | None) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of their names, all in force for None; raises `KeyNotDefined`."""
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for name in names or ():
        if name not in in_force:
            raise KeyNotDefined(f"no key {name!r} is defined; see `relatum keys list`", key=name)
    return list(in_force.values()) if names is None else [in_force[name] for name in names]


@cache
def spare_collections() -> None:
    """Keep the objects a Spark worker has loaded out of garbage collections; does nothing in other processes.

    Spark collects all garbage after each task, before the next one may begin (`pyspark/daemon.py`). With pandas,
    SQLAlchemy and this package that looks at 140,000 objects for 60 ms, nearly all of them modules and functions.
    """
    if os.environ.get(WORKER_REUSED):
        gc.collect()
        gc.freeze()
