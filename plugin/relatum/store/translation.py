"""Translates errors of psycopg and SQLAlchemy into Relatum's; no other module does.

Errors before a session exists are libpq's texts without a SQLSTATE, which `_BY_TEXT` lists. Such errors of a server
whose messages are not in English (`lc_messages`) count as unavailability, with the server's text.
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
"""Errors that a retry would get again: SQLSTATE classes 22 and 23, and 54000, an OperationalError in psycopg.

Source: PostgreSQL, appendix A, "PostgreSQL Error Codes".
"""

_UNDEFINED: Final = (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName)

_TRANSIENT: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # The server ended the session after a time-out: a new connection may succeed.
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
)

_BY_CLASS: Final[tuple[tuple[tuple[type[psycopg.Error], ...], type[RelatumError], str, str], ...]] = (
    # psycopg's classes (by SQLSTATE), Relatum's error, the reason if it is transient, and its text; {} is PostgreSQL's.
    (
        _UNDEFINED, SchemaMissing, "", "the database has no schema `relatum`, or an older one: run `relatum migrate`",
    ),
    (
        (errors.ReadOnlySqlTransaction,), DatabaseUnavailable, "read_only",
        "this PostgreSQL server is read-only (a standby, or default_transaction_read_only): use the primary's URL, or "
        "list all hosts and add target_session_attrs=read-write; nothing was written",
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
        "another session has held a lock for too long (pg_stat_activity and pg_blocking_pids show it); nothing was "
        "changed, and the call is safe to repeat: {}",
    ),
    ((errors.DiskFull,), DatabaseUnavailable, "disk_full", "PostgreSQL's disk is full: {}; nothing was written"),
    ((NoAnswerInTime,), DatabaseUnavailable, "timeout", "PostgreSQL gave {}"),
)  # fmt: skip

_TLS_HINT: Final = " (set TLS with sslmode, sslrootcert, sslcert and sslkey in the database's URL)"

_BY_TEXT: Final[tuple[tuple[str, type[RelatumError], str, str], ...]] = (
    # Text of libpq or the server, Relatum's error, the reason if it is transient, and a suffix for the message.
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
     "; remove `options` from the database's URL, or make the pooler ignore it (ignore_startup_parameters)"),
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

_REFUSED_OPTION: Final = re.compile(r"bad value for \w+|invalid connection option|forbidden value")
"""Texts of psycopg (a `ProgrammingError` without a SQLSTATE) and libpq about invalid options."""

_NOT_TLS: Final = re.compile(
    r"SSL (SYSCALL error|connection has been closed|error: unexpected eof|exchange|negotiation packet)", re.IGNORECASE
)
"""libpq's texts about a TLS connection that broke, or a server that died before it: not about the setup of TLS."""


class translated_errors:  # noqa: N801 - reads as the statement it is: `with translated_errors():`
    """Translate errors of psycopg and SQLAlchemy in the block into Relatum's.

    This is a class because every lookup uses it: a generator would take three times as long. With `theirs_too`, the
    block also runs the caller's statements: the driver's errors about refused values and missing tables are then not
    translated, since they may be the caller's.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, ended the connection, or is full or read-only (field `reason`);
            nothing was committed, unless the connection was lost during the commit itself.
        SchemaMissing: a table, column or function does not exist.
        ConfigurationError: the database does not exist, TLS is not set up as required, or a pooler mixes up sessions.
        AccessRefused: the user lacks a privilege, or may not log in.
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
        if self._theirs_too and isinstance(original, (*REFUSALS, *_UNDEFINED)):
            return
        translated = _translated(original, is_lost=is_lost)
        # Errors without a translation are defects of Relatum, and raised unchanged.
        if translated is not None:
            raise translated from error


def _translated(original: BaseException | None, *, is_lost: bool) -> RelatumError | None:
    # The first line: psycopg puts neither passwords nor parameters into it.
    message = (str(original).strip().splitlines() or [type(original).__name__])[0]
    for classes, kind, reason, text in _BY_CLASS:
        if isinstance(original, classes):
            return _error(kind, text.format(message) + _grant_hint(message), reason)
    if isinstance(original, REFUSALS) and not is_lost:
        text = f"PostgreSQL refuses a value, and a retry would not help: {message}"
        return RowRefused(text, sqlstate=original.sqlstate)
    if _is_before_session(original) and not is_lost:
        return _connect_error(str(original))
    if is_lost or isinstance(original, _TRANSIENT):
        return DatabaseUnavailable(f"PostgreSQL does not answer: {message}")
    return None


def _is_before_session(original: BaseException | None) -> bool:
    """Return whether an error came before a session: from libpq, or from psycopg about an option."""
    if not isinstance(original, psycopg.Error) or original.sqlstate is not None:
        return False
    is_refused = isinstance(original, psycopg.ProgrammingError) and bool(_REFUSED_OPTION.search(str(original)))
    return is_refused or isinstance(original, psycopg.OperationalError)


def _connect_error(text: str) -> RelatumError:
    """Translate a failure to connect. With several hosts, the error is transient if one host's failure is."""
    failures = [_host_error(failure) for failure in _failures(text)]
    result = next((error for error in failures if isinstance(error, DatabaseUnavailable)), failures[-1])
    if len(failures) > 1:
        texts = "; ".join(dict.fromkeys(str(error) for error in failures))
        return type(result)(f"no host of the database's URL can be used: {texts}", **vars(result))
    return result


def _failures(text: str) -> Iterator[str]:
    """Yield the first line of each host's failure. For several hosts, psycopg lists them after a first paragraph."""
    lines = text.strip().splitlines() or [""]
    host_lines = [line for line in lines if line.startswith("- host: ")]
    for line in host_lines or lines[:1]:
        yield re.sub(r"^- host: .*?, port: .*?, hostaddr: \S+?: ", "", line)


def _host_error(message: str) -> RelatumError:
    message = message.removeprefix("connection failed: ").removeprefix("connection is bad: ")
    if not _NOT_TLS.search(message):
        for text, kind, reason, suffix in _BY_TEXT:
            if re.search(text, message):
                return _error(kind, f"{_PREFIXES[kind]}: {message}{suffix}", reason)
    return DatabaseUnavailable(f"PostgreSQL does not answer: {message}")


_PREFIXES: Final[dict[type[RelatumError], str]] = {
    DatabaseUnavailable: "PostgreSQL does not accept connections now",
    ConfigurationError: "cannot connect to PostgreSQL with these settings",
    AccessRefused: "PostgreSQL refuses this user",
}


def _error(kind: type[RelatumError], text: str, reason: str) -> RelatumError:
    return kind(text, reason=reason) if reason else kind(text)


def _grant_hint(message: str) -> str:
    """Return a suffix that says which role to grant if a privilege is missing; else an empty text."""
    if not message.startswith("permission denied for"):
        return ""
    if " database " in message:
        return "; run `relatum migrate` as the owner of the database, or as a user that may CREATE in it"
    return (
        "; grant the user a role: relatum_reader looks up, relatum_consumer also shares groups and consumes in order, "
        "relatum_recorder records, taps and defines keys, relatum_collector collects, relatum_router places contexts "
        "and sets (GRANT relatum_reader TO its_name)"
    )
