"""Which broker and which database a Spark job talks to: from arguments, else from the environment."""

import os
import ssl
from dataclasses import dataclass
from typing import Final

from relatum.errors import ConfigurationError
from relatum.reading import BrokerAddress, StreamReader

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker as a Spark job knows it: its address, and the files of its TLS. Can be pickled: tasks open their own.

    Neither `repr` nor errors show the password.

    Attributes:
        address: Where it is, and who asks.
        tls_ca_file: The certificate authorities trusted, PEM; None for the system's. A path on every node.
        tls_certificate_file: The client's certificate, PEM; None for none.
        tls_key_file: Its key, PEM; None where the certificate's file holds it.
        timeout_s: Seconds until a call without an answer ends as `ReadTimeout`.
    """

    address: BrokerAddress
    tls_ca_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    timeout_s: float = 10.0

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
        """A reader that is connected. Errors as of `StreamReader.open`."""
        return StreamReader.open(self.address, timeout_s=self.timeout_s, ssl_context=self.tls_context())

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of the files; None where none is named.

        Raises:
            ConfigurationError: A file is missing or is no certificate.
        """
        if self.tls_ca_file is None and self.tls_certificate_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
            if self.tls_certificate_file is not None:
                context.load_cert_chain(self.tls_certificate_file, self.tls_key_file)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(name for name in (self.tls_ca_file, self.tls_certificate_file, self.tls_key_file) if name)
            raise ConfigurationError(f"the TLS files {files} cannot be used: {error}") from error
        return context


def database_url(database: str | None) -> str:
    """PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL.

    Raises:
        ConfigurationError: neither names one.
    """
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"which PostgreSQL? Give the database's URL or set {DATABASE_VARIABLE}")
    return found
