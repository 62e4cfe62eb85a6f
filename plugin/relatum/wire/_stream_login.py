"""Who logs in by the stream protocol, where to, and what is in the way of it."""

from dataclasses import dataclass, field
from enum import Enum

from relatum.errors import BrokerUnavailable, ConfigurationError


class AnotherCluster(BrokerUnavailable):
    """Somebody answers who is not the cluster that is meant, or does not say so; nothing of a login was sent."""


class AnotherProtocol(ConfigurationError):
    """Somebody answers who does not speak the stream protocol (field `service`); nothing of a login was sent."""

    service: str


class MechanismNotTaken(ConfigurationError):
    """The server does not take that mechanism by the stream protocol."""


class Mechanism(Enum):
    """How to log in: with a password, or with the certificate of the TLS connection."""

    PLAIN = "PLAIN"
    EXTERNAL = "EXTERNAL"


@dataclass(frozen=True, slots=True)
class Login:
    """Who logs in, where to, and what is asked for.

    Attributes:
        user: User name.
        password: Password; never shown.
        vhost: Virtual host.
        mechanism: `PLAIN`, or `EXTERNAL` for a client certificate.
        heartbeat_s: Seconds asked for; the smaller of this and the server's is used. 0 switches heartbeats off.
        cluster_name: The cluster that is meant. Who does not say to be it, in what servers say before a login, is told
            neither user nor password. None: whoever answers is meant.
    """

    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    mechanism: Mechanism = Mechanism.PLAIN
    heartbeat_s: int = 60
    cluster_name: str | None = None

    def sasl_response(self) -> bytes:
        """What SaslAuthenticate carries."""
        if self.mechanism is Mechanism.EXTERNAL:
            return b""
        return f"\0{self.user}\0{self.password}".encode()
