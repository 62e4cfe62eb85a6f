"""Errors of who calls: what is set up, what is asked for, what is not allowed. See `relatum.errors`."""

from relatum.errors._root import RelatumError


class ConfigurationError(RelatumError):
    """A URL, an option or an installation is not as it must be; nothing was sent or written."""


class UsedAfterFork(ConfigurationError):
    """An object that works in one process was made before a fork and used in the child; nothing was sent or written.

    Make one in each process: behind the fork, in a pre-fork server's hook for new workers.
    """


class UsedAfterClose(ConfigurationError):
    """An object was used after it was closed; nothing was sent or written. Make another one, or close it later."""


class SchemaMissing(ConfigurationError):
    """The database has no schema `relatum`, or an older one: run `relatum migrate`."""


class NothingRecorded(ConfigurationError):
    """A look-up among all recorded streams of a virtual host (field `vhost`) that has none: nothing can be known."""

    vhost: str


class AnotherBroker(ConfigurationError):
    """A stream of that name was recorded from another broker (field `stream`); nothing was written.

    Fields `recorded` and `connected`: the two brokers, in words.
    """

    stream: str
    recorded: str
    connected: str


class TlsRefused(ConfigurationError):
    """TLS with a broker cannot be: a certificate is refused, by either side, or one of them does not speak TLS."""


class ServerStartFailed(ConfigurationError):
    """A private server did not start; the message ends with the server's own last lines."""


class TimeNotRecorded(ConfigurationError):
    """A look-up by time asked for a stream whose times are switched off (field `stream`)."""

    stream: str


class InvalidInput(RelatumError, ValueError):
    """The call is wrong; nothing was sent or written."""


class InvalidRelationshipKey(InvalidInput):
    """A key's value cannot be recorded (fields `key`, `reason`); nothing was sent."""

    key: str
    reason: str


class InvalidKeyDefinition(InvalidInput):
    """A key definition cannot be one (field `key`); nothing was written."""

    key: str


class InvalidGroup(InvalidInput):
    """Headers or a call that cannot make a message one of a group, or an id or a number no group has (field `reason`).

    Where it was about a message to be published, nothing was sent.

    The reasons are those of `relatum.membership.GroupFault`.
    """

    reason: str


class HeadersRefused(InvalidInput):
    """Headers that cannot be sent safely: too deep, many or large, or for no stream (field `reason`); not sent."""

    reason: str


class AccessRefused(RelatumError):
    """The broker or the database refuses this user."""
