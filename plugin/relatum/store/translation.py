"""The one boundary where errors of psycopg and SQLAlchemy become Relatum's.

Errors before there is a session come from libpq as text, without a SQLSTATE: `_SAID` lists these texts. Errors of a
server whose messages are not in English (`lc_messages`) are treated as unavailability, with the server's text.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from psycopg import errors

from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    DatabaseUnavailable,
    RelatumError,
    RowRefused,
    SchemaMissing,
)
from relatum.store.connection import NoAnswerInTime

REFUSALS: Final = (psycopg.DataError, psycopg.IntegrityError, errors.ProgramLimitExceeded)
"""Errors that a retry does not cure: SQLSTATE classes 22 and 23, and 54000, an OperationalError in psycopg.

Source: PostgreSQL, appendix A, "PostgreSQL Error Codes".
"""

_ABSENT: Final = (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName)

_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # Sessions that the server ended after a time-out: a new connection may succeed.
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
)

_MEANT: Final[tuple[tuple[tuple[type[psycopg.Error], ...], type[RelatumError], str, str], ...]] = (
    # By SQLSTATE: our error, its reason if it is transient, and its text; {} is the first line of PostgreSQL's.
    (
        _ABSENT, SchemaMissing, "", "the database has no schema `relatum`, or an older one: run `relatum migrate`",
    ),
    (
        (errors.ReadOnlySqlTransaction,), DatabaseUnavailable, "read_only",
        "PostgreSQL is read-only here (a standby, or default_transaction_read_only): give the primary's URL, or all "
        "hosts and target_session_attrs=read-write; nothing was written",
    ),
    (
        (errors.DuplicatePreparedStatement, errors.InvalidSqlStatementName), ConfigurationError, "",
        "a prepared statement belongs to another session: a pooler assigns sessions by transaction. Add "
        "?pgbouncer=true to the database's URL ({})",
    ),
    (
        (errors.InsufficientPrivilege, errors.InvalidPassword), AccessRefused, "",
        "PostgreSQL refuses this user: {}",
    ),
    ((errors.InvalidCatalogName,), ConfigurationError, "", "there is no such database: {}"),
    (
        (errors.LockNotAvailable,), DatabaseUnavailable, "timeout",
        "another session holds a lock for too long (pg_stat_activity and pg_blocking_pids show which); nothing was "
        "changed, and it is safe to repeat: {}",
    ),
    ((errors.DiskFull,), DatabaseUnavailable, "disk_full", "PostgreSQL's disk is full: {}; nothing was written"),
    ((NoAnswerInTime,), DatabaseUnavailable, "timeout", "PostgreSQL: {}"),
)  # fmt: skip

_TLS_HINT: Final = " (set TLS with sslmode, sslrootcert, sslcert and sslkey in the database's URL)"

_SAID: Final[tuple[tuple[str, type[RelatumError], str, str], ...]] = (
    # By text of libpq or the server: our error, its reason if it is transient, and what to add to the message.
    (r"session is read-only|is in hot standby mode", DatabaseUnavailable, "read_only", ""),
    (r"is not in hot standby mode|session is not read-only", DatabaseUnavailable, "target", ""),
    (r"too many (clients|connections)|connection slots are reserved|no more connections allowed"
     r"|max_client_conn|max_db_connections", DatabaseUnavailable, "connections",
     "; wait, close other connections, or raise the limit"),
    (r"the database system is starting up|not yet accepting connections|is in recovery mode",
     DatabaseUnavailable, "starting", ""),
    (r"the database system is shutting down", DatabaseUnavailable, "stopping", ""),
    (r"failed to resolve host|could not translate host name", DatabaseUnavailable, "name",
     ": the name does not resolve"),
    (r'unsupported startup parameter', ConfigurationError, "",
     "; leave `options` out of the database's URL, or let the pooler ignore it (ignore_startup_parameters)"),
    (r'database ".*" does not exist|no such database', ConfigurationError, "", "; create it, or correct its name"),
    (r"authentication failed|no password supplied|is not permitted to log in|permission denied for database"
     r"|no such user|role \".*\" does not exist|not allowed to connect|auth(entication)? query", AccessRefused, "", ""),
    (r"no pg_hba\.conf entry", AccessRefused, "",
     ": pg_hba.conf has no entry for this host, user, database and TLS mode (see sslmode)"),
    (r"requires a valid client certificate", AccessRefused, "", _TLS_HINT),
    (r"received invalid response|expected authentication request|unsupported protocol version|invalid packet length"
     r"|unexpected response", ConfigurationError, "", "; the server there is not PostgreSQL"),
    (r"does not support SSL|certificate|private key file|\bSSL\b|\bsslmode\b|sslrootcert|channel binding|TLS",
     ConfigurationError, "", _TLS_HINT),
    (r"definition of service|service file|invalid .* value:|invalid port number|could not match \d+"
     r"|unrecognized configuration parameter|authentication method requirement|invalid connection option"
     r"|invalid value for parameter|invalid integer value|bad value for|forbidden value", ConfigurationError, "", ""),
)  # fmt: skip

_KNOWN: Final = tuple((re.compile(text), kind, reason, more) for text, kind, reason, more in _SAID)

_REFUSED_OPTION: Final = re.compile(r"bad value for \w+|invalid connection option|forbidden value")
"""Texts of psycopg (a `ProgrammingError` without a SQLSTATE) and libpq about options, before they connect."""

_NOT_TLS: Final = re.compile(
    r"SSL SYSCALL error|SSL connection has been closed|SSL error: unexpected eof", re.IGNORECASE
)
"""libpq's texts about a broken connection with TLS."""


class translated_errors:  # noqa: N801 - reads as the statement it is: `with translated_errors():`
    """Translate errors of psycopg and SQLAlchemy in the block into Relatum's.

    A class, not a generator, since every lookup uses it: it takes a third of the time.

    Args:
        theirs_too: Whether the block also runs the caller's own statements. The driver's errors about refused values
            and missing tables are then not translated, since they are the caller's. Default: False.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, ended the connection, or is full or read-only (field `reason`);
            nothing was committed, unless the connection was lost during the commit itself.
        SchemaMissing: a table, column or function does not exist.
        ConfigurationError: there is no such database, TLS is not set up as required, or a pooler mixes up sessions.
        AccessRefused: this user lacks a privilege, or may not log in.
        RowRefused: PostgreSQL refuses a value, and would refuse it again; nothing was written.
    """

    __slots__ = ("_theirs_too",)

    def __init__(self, *, theirs_too: bool = False) -> None:
        self._theirs_too = theirs_too

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, sa.exc.DBAPIError):
            original, is_lost = error.orig, error.connection_invalidated
        elif isinstance(error, psycopg.Error):
            original, is_lost = error, False
        else:
            return
        if self._theirs_too and isinstance(original, (*REFUSALS, *_ABSENT)):
            return
        translated = _translated(original, is_lost=is_lost)
        # Other errors are defects of Relatum.
        if translated is not None:
            raise translated from error


def _translated(original: BaseException | None, *, is_lost: bool) -> RelatumError | None:
    # The first line: psycopg puts neither passwords nor parameters into it.
    said = (str(original).strip().splitlines() or [type(original).__name__])[0]
    for classes, kind, reason, text in _MEANT:
        if isinstance(original, classes):
            return _made(kind, text.format(said) + _grant(said), reason)
    if isinstance(original, REFUSALS) and not is_lost:
        return RowRefused(f"PostgreSQL refuses a value, and a retry would not help: {said}", sqlstate=original.sqlstate)
    if _is_of_connecting(original) and not is_lost:
        return _of_connecting(str(original))
    if is_lost or isinstance(original, _PASSING):
        return DatabaseUnavailable(f"PostgreSQL does not answer: {said}")
    return None


def _is_of_connecting(original: BaseException | None) -> bool:
    """Return whether there was no session yet: an error of libpq, or of psycopg about an option."""
    if not isinstance(original, psycopg.Error) or original.sqlstate is not None:
        return False
    is_refused = isinstance(original, psycopg.ProgrammingError) and bool(_REFUSED_OPTION.search(str(original)))
    return is_refused or isinstance(original, psycopg.OperationalError)


def _of_connecting(text: str) -> RelatumError:
    """Translate a failure to connect. With several hosts, it is transient if the failure of one host is."""
    tried = [_of_one_host(failure) for failure in _failures(text)]
    chosen = next((error for error in tried if isinstance(error, DatabaseUnavailable)), tried[-1])
    if len(tried) > 1:
        texts = "; ".join(dict.fromkeys(str(error) for error in tried))
        return type(chosen)(f"no host of the database's URL can be used: {texts}", **vars(chosen))
    return chosen


def _failures(text: str) -> Iterator[str]:
    """Yield the first line of each host's failure; psycopg lists several after a first paragraph."""
    lines = text.strip().splitlines() or [""]
    listed = [line for line in lines if line.startswith("- host: ")]
    for line in listed or lines[:1]:
        yield re.sub(r"^- host: .*?, port: .*?, hostaddr: \S+?: ", "", line)


def _of_one_host(said: str) -> RelatumError:
    said = said.removeprefix("connection failed: ").removeprefix("connection is bad: ")
    if not _NOT_TLS.search(said):
        for known, kind, reason, more in _KNOWN:
            if known.search(said):
                return _made(kind, f"{_OPENINGS[kind]}: {said}{more}", reason)
    return DatabaseUnavailable(f"PostgreSQL does not answer: {said}")


_OPENINGS: Final[dict[type[RelatumError], str]] = {
    DatabaseUnavailable: "PostgreSQL does not accept connections now",
    ConfigurationError: "cannot connect to PostgreSQL with these settings",
    AccessRefused: "PostgreSQL refuses this user",
}


def _made(kind: type[RelatumError], text: str, reason: str) -> RelatumError:
    return kind(text, reason=reason) if reason else kind(text)


def _grant(said: str) -> str:
    """Return which of Relatum's roles to grant, if a privilege is missing; else an empty text."""
    if not said.startswith("permission denied for"):
        return ""
    if " database " in said:
        return "; run `relatum migrate` as the owner of the database, or as a user that may CREATE in it"
    return (
        "; grant it a role: relatum_reader looks up, relatum_consumer also shares groups and consumes in "
        "order, relatum_recorder records, taps and defines, relatum_collector collects, relatum_router places contexts "
        "and sets (GRANT relatum_reader TO its_name)"
    )
