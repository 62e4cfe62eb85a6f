"""Which broker and which database a Spark job talks to: from arguments, else from the environment."""

import os
from dataclasses import dataclass, field
from typing import Any, Final

from relatum.errors import ConfigurationError
from relatum.reading import BrokerAddress, StreamReader
from relatum_spark._workers import spare_collections

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker as a Spark job knows it: its address, and the files of its TLS. Can be pickled: tasks open their own.

    Neither `repr` nor errors show the password.

    Attributes:
        address: Where it is, and who asks.
        tls_ca_file: The certificate authorities trusted: a file on every node, or PEM text; None: what the URL says,
            or the system's.
        tls_certificate_file: The client's certificate, a file or PEM text; None for none, or the URL's.
        tls_key_file: Its key, a file or PEM text; None where it is in the certificate's.
        tls_key_password: The key's password.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            URL says, or PLAIN.
        timeout_s: Seconds until a call without an answer ends as `ReadTimeout`.
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
        """The broker named by an argument, else by RELATUM_BROKER_URL (and RELATUM_STREAM_URL).

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
        """A reader that is connected, mostly a task's. Errors as of `StreamReader.open`."""
        spare_collections()
        return StreamReader.open(self.logged_in(), timeout_s=self.timeout_s)

    def logged_in(self) -> BrokerAddress:
        """The address, with what these options say of logging in to it.

        Raises:
            ConfigurationError: they cannot be together, or the URL has no TLS.
        """
        given = {
            "ca": self.tls_ca_file,
            "certificate": self.tls_certificate_file,
            "key": self.tls_key_file,
            "key_password": self.tls_key_password,
            "mechanism": self.auth_mechanism and self.auth_mechanism.upper(),
        }
        asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return self.address.logging_in(**asked)


def database_url(database: str | None) -> str:
    """PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL.

    Raises:
        ConfigurationError: neither names one.
    """
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"which PostgreSQL? Give the database's URL or set {DATABASE_VARIABLE}")
    return found
