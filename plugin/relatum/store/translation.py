"""The one boundary where errors of psycopg and SQLAlchemy become Relatum's.

What a server answers before there is a session comes from libpq as text alone, without a SQLSTATE: `_SAID` knows its
texts. A server that speaks another language than English (`lc_messages`) is then taken to be away, in its own words.
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
"""What no waiting cures: SQLSTATE classes 22 and 23, and 54000, which psycopg counts among what passes.

Source: PostgreSQL, appendix A, "PostgreSQL Error Codes".
"""

_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # Sessions ended for their time: a new connection does better.
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
)

_MEANT: Final[tuple[tuple[tuple[type[psycopg.Error], ...], type[RelatumError], str, str], ...]] = (
    # What SQLSTATEs mean, the reason where that passes, and what is said of it; {} is the first line of PostgreSQL's.
    (
        (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName),
        SchemaMissing, "", "the database has no schema `relatum`, or an older one: run `relatum migrate`",
    ),
    (
        (errors.ReadOnlySqlTransaction,), DatabaseUnavailable, "read_only",
        "PostgreSQL is read-only here (a standby, or default_transaction_read_only): give the primary's URL, or all "
        "hosts and target_session_attrs=read-write; nothing was written",
    ),
    (
        (errors.DuplicatePreparedStatement, errors.InvalidSqlStatementName), ConfigurationError, "",
        "a statement that was prepared belongs to another session: a pooler hands out sessions by transaction. Add "
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

_TLS_HINT: Final = " (sslmode, sslrootcert, sslcert and sslkey in the database's URL say what is asked of TLS)"

_SAID: Final[tuple[tuple[str, type[RelatumError], str, str], ...]] = (
    # What libpq or the server says, what that is, the reason where it passes, and what is to be added.
    (r"session is read-only|is in hot standby mode", DatabaseUnavailable, "read_only", ""),
    (r"is not in hot standby mode|session is not read-only", DatabaseUnavailable, "target", ""),
    (r"too many (clients|connections)|connection slots are reserved|no more connections allowed"
     r"|max_client_conn|max_db_connections", DatabaseUnavailable, "connections",
     "; wait, close others, or allow more"),
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
     ": pg_hba.conf has no line for this host, user and database, with or without TLS as said (see sslmode)"),
    (r"requires a valid client certificate", AccessRefused, "", _TLS_HINT),
    (r"received invalid response|expected authentication request|unsupported protocol version|invalid packet length"
     r"|unexpected response", ConfigurationError, "", "; what answers there is not PostgreSQL"),
    (r"does not support SSL|certificate|private key file|\bSSL\b|\bsslmode\b|sslrootcert|channel binding|TLS",
     ConfigurationError, "", _TLS_HINT),
    (r"definition of service|service file|invalid .* value:|invalid port number|could not match \d+"
     r"|unrecognized configuration parameter|authentication method requirement|invalid connection option"
     r"|invalid value for parameter|invalid integer value|bad value for|forbidden value", ConfigurationError, "", ""),
)  # fmt: skip

_KNOWN: Final = tuple((re.compile(text), kind, reason, more) for text, kind, reason, more in _SAID)

_REFUSED_OPTION: Final = re.compile(r"bad value for \w+|invalid connection option|forbidden value")
"""What psycopg, as a `ProgrammingError` without a SQLSTATE, and libpq say of options before they connect anywhere."""

_NOT_TLS: Final = re.compile(
    r"SSL SYSCALL error|SSL connection has been closed|SSL error: unexpected eof", re.IGNORECASE
)
"""A connection that broke, as libpq says it of one with TLS."""


class translated_errors:  # noqa: N801 - reads as the statement it is: `with translated_errors():`
    """Turn what psycopg and SQLAlchemy raise inside the block into Relatum's errors.

    A class and not a generator: every lookup runs through it, at a third of the cost.

    Args:
        theirs_too: Whether the block runs a caller's own statements as well. What PostgreSQL refuses of them stays the
            driver's error then, which the caller may know better than ours.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, ended the connection, is full or read-only (field `reason`):
            nothing was committed, unless the connection was lost during the commit itself.
        SchemaMissing: a table, column or function is not there.
        ConfigurationError: there is no such database, TLS is not as asked for, or a pooler mixes up sessions.
        AccessRefused: this user may not.
        RowRefused: PostgreSQL cannot hold a value, however often it is given; nothing was written.
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
        if self._theirs_too and isinstance(original, REFUSALS):
            return
        translated = _translated(original, is_lost=is_lost)
        # What is not translated is a defect of ours.
        if translated is not None:
            raise translated from error


def _translated(original: BaseException | None, *, is_lost: bool) -> RelatumError | None:
    # Its first line: psycopg puts neither passwords nor parameters into it.
    said = (str(original).strip().splitlines() or [type(original).__name__])[0]
    for classes, kind, reason, text in _MEANT:
        if isinstance(original, classes):
            return _made(kind, text.format(said) + _grant(said), reason)
    if isinstance(original, REFUSALS) and not is_lost:
        return RowRefused(f"PostgreSQL refuses a value, and would again: {said}", sqlstate=original.sqlstate)
    if _is_of_connecting(original) and not is_lost:
        return _of_connecting(str(original))
    if is_lost or isinstance(original, _PASSING):
        return DatabaseUnavailable(f"PostgreSQL does not answer: {said}")
    return None


def _is_of_connecting(original: BaseException | None) -> bool:
    """Whether an error is from before there was a session: of libpq, or of psycopg, which reads some options itself."""
    if not isinstance(original, psycopg.Error) or original.sqlstate is not None:
        return False
    is_refused = isinstance(original, psycopg.ProgrammingError) and bool(_REFUSED_OPTION.search(str(original)))
    return is_refused or isinstance(original, psycopg.OperationalError)


def _of_connecting(text: str) -> RelatumError:
    """What a failure to connect is. With several hosts: what passes at one of them passes."""
    tried = [_of_one_host(failure) for failure in _failures(text)]
    chosen = next((error for error in tried if isinstance(error, DatabaseUnavailable)), tried[-1])
    if len(tried) > 1:
        texts = "; ".join(dict.fromkeys(str(error) for error in tried))
        return type(chosen)(f"no host of the database's URL will do: {texts}", **vars(chosen))
    return chosen


def _failures(text: str) -> Iterator[str]:
    """The first line of each host's failure; psycopg lists them after a first paragraph where there are several."""
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
    DatabaseUnavailable: "PostgreSQL takes no connection now",
    ConfigurationError: "PostgreSQL cannot be reached as it is set up",
    AccessRefused: "PostgreSQL refuses this user",
}


def _made(kind: type[RelatumError], text: str, reason: str) -> RelatumError:
    return kind(text, reason=reason) if reason else kind(text)


def _grant(said: str) -> str:
    """Which of Relatum's roles to grant, where a privilege is missing and not a login."""
    if not said.startswith("permission denied for"):
        return ""
    if " database " in said:
        return "; `relatum migrate` is run by the owner of the database, or by a user that may CREATE in it"
    return (
        "; grant it the role that may: relatum_reader looks up, relatum_consumer also shares groups and consumes in "
        "order, relatum_recorder records, taps and defines, relatum_collector collects, relatum_router places contexts "
        "and sets (GRANT relatum_reader TO its_name)"
    )
