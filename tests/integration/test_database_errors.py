"""What is said of a database that cannot be used: its cause, whether waiting helps, and never a password."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import LiteralString
from urllib.parse import urlsplit, urlunsplit

import pytest
from typer.testing import CliRunner

import relatum
from relatum.errors import AccessRefused, ConfigurationError, DatabaseUnavailable, RelatumError, SchemaMissing
from relatum.recording import Recorder
from relatum.store.catalog import key_definitions
from relatum.store.database import as_engine
from relatum.store.translation import translated_errors
from relatum_cli.app import app
from relatum_cli.exits import exit_code_of
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import unique_name
from tests.support.databases import administer
from tests.support.fake_postgresql import answering, refusal, welcome
from tests.support.pgbouncer import Account, pgbouncer
from tests.support.place import Place
from tests.support.tls import FILES

SECRET = "pass-word"
"""The password of the fixture `role`."""


def use(url: str) -> RelatumError:
    with (
        pytest.raises(RelatumError) as refused,
        as_engine(url) as engine,
        translated_errors(),
        engine.connect() as connection,
    ):
        key_definitions(connection)
    return refused.value


def check(url: str, kind: type[RelatumError], reason: str | None, said: str) -> None:
    """Both the library and the command say it, and show no password."""
    error = use(url)
    assert type(error) is kind, error
    assert getattr(error, "reason", None) == reason
    assert said in str(error)
    ended = CliRunner().invoke(app, ["keys", "list"], env={"RELATUM_DATABASE_URL": url, "COLUMNS": "500"})
    assert ended.exit_code == exit_code_of(error) == (5 if kind is DatabaseUnavailable else 3), ended.output
    password = urlsplit(url).password
    for text in (str(error), ended.output):
        assert SECRET not in text
        assert password is None or password not in text


def changed(url: str, *, user: str | None = None, at: str | None = None, name: str | None = None) -> str:
    """A URL with another user (with the tests' password), other hosts, or another database."""
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    login = f"{user}:{SECRET}" if user else login
    return urlunsplit(parts._replace(netloc=f"{login}@{at or host}", path=f"/{name}" if name else parts.path))


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A user who may log in, and nothing more."""
    name = unique_name("relatum_role").replace("-", "_")
    administer(database_url, "CREATE ROLE {} LOGIN PASSWORD 'pass-word'", name)
    yield name
    administer(database_url, "DROP OWNED BY {}", name)
    administer(database_url, "DROP ROLE {}", name)


@pytest.mark.parametrize(
    ("change", "kind", "reason", "said"),
    [
        ("ALTER ROLE {0} PASSWORD 'another'", AccessRefused, None, "authentication failed"),
        ("ALTER ROLE {0} NOLOGIN", AccessRefused, None, "not permitted to log in"),
        ("ALTER ROLE {0} CONNECTION LIMIT 0", DatabaseUnavailable, "connections", "too many connections for role"),
        ("GRANT USAGE ON SCHEMA public TO {0}", AccessRefused, None, "permission denied"),
        ("GRANT USAGE ON SCHEMA relatum TO {0}", AccessRefused, None, "relatum_router places"),
        ("REVOKE CONNECT ON DATABASE {1} FROM PUBLIC", AccessRefused, None, "permission denied for database"),
    ],
)
def test_what_a_user_may_not_do_is_named(
    database_url: str, role: str, change: LiteralString, kind: type[RelatumError], reason: str | None, said: str
) -> None:
    """A missing right of a user is refused access, and named; a limit of connections may pass."""
    administer(database_url, change, role, urlsplit(database_url).path[1:])
    check(changed(database_url, user=role), kind, reason, said)


@pytest.mark.parametrize("granted", ["relatum_consumer", "relatum_reader"])
def test_who_may_only_read_records_nothing_and_is_told(place: Place, role: str, granted: str) -> None:
    """A recorder that may only read ends at once, and names the role that it needs."""
    administer(place.database, "GRANT {} TO {}", granted, role)
    with pytest.raises(AccessRefused, match="GRANT relatum_recorder") as refused:
        Recorder(place.amqp, changed(place.database, user=role), [place.stream]).run(threading.Event())
    assert exit_code_of(refused.value) == 3


def test_who_may_not_migrate_is_told_who_may(empty_database_url: str, role: str) -> None:
    """Somebody's own user, where the owner's is needed."""
    with pytest.raises(AccessRefused, match="as the owner"):
        upgrade(changed(empty_database_url, user=role))


WAYS: dict[str, tuple[Callable[[str], str], type[RelatumError], str | None, str]] = {
    "no schema": (lambda url: url, SchemaMissing, None, "relatum migrate"),
    "no such database": (lambda url: changed(url, name="nobody"), ConfigurationError, None, '"nobody" does not exist'),
    "no such user": (lambda url: changed(url, user="nobody"), AccessRefused, None, "authentication failed"),
    "no such host": (lambda url: changed(url, at="no.invalid"), DatabaseUnavailable, "name", "does not resolve"),
    "nobody there": (lambda url: changed(url, at="127.0.0.1:1"), DatabaseUnavailable, None, "Connection refused"),
    "TLS where there is none": (lambda url: f"{url}?sslmode=require", ConfigurationError, None, "sslmode"),
    "no such service": (lambda url: f"{url}?service=nobody", ConfigurationError, None, '"nobody" not found'),
    "no such mode": (lambda url: f"{url}?sslmode=nobody", ConfigurationError, None, '"nobody"'),
    "no such setting": (lambda url: f"{url}?options=-cnobody%3D1", ConfigurationError, None, '"nobody"'),
    "a standby": (lambda url: f"{url}?target_session_attrs=standby", DatabaseUnavailable, "target", "hot standby"),
    "no socket": (lambda url: f"{url}?host=/nobody", DatabaseUnavailable, None, "No such file"),
    "read-only": (
        lambda url: f"{url}?options=-cdefault_transaction_read_only%3Don&target_session_attrs=read-write",
        DatabaseUnavailable,
        "read_only",
        "read-only",
    ),
    "two hosts, of which one may come back": (
        lambda url: changed(url, at=f"127.0.0.1:1,{urlsplit(url).hostname}:{urlsplit(url).port}", name="nobody"),
        DatabaseUnavailable,
        None,
        '"nobody" does not exist',
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_wrong_with_a_url_is_named(database_server_url: str, way: str) -> None:
    """Code 3 where a person must change something, 5 where waiting may help."""
    make, kind, reason, said = WAYS[way]
    check(make(database_server_url), kind, reason, said)


@pytest.mark.parametrize(
    ("answer", "kind", "reason", "said"),
    [
        (refusal("57P03", "the database system is starting up"), DatabaseUnavailable, "starting", "starting up"),
        (refusal("57P03", "the database system is shutting down"), DatabaseUnavailable, "stopping", "shutting down"),
        (refusal("57P03", "the database system is in recovery mode"), DatabaseUnavailable, "starting", "recovery"),
        (refusal("53300", "sorry, too many clients already"), DatabaseUnavailable, "connections", "raise the limit"),
        (
            refusal("28000", 'no pg_hba.conf entry for host "::1", user "u", database "d", no encryption'),
            AccessRefused,
            None,
            "sslmode",
        ),
        (refusal("28000", "connection requires a valid client certificate"), AccessRefused, None, "sslcert"),
        (welcome("14.9"), ConfigurationError, None, "PostgreSQL 14 is too old"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ConfigurationError, None, "the server there is not PostgreSQL"),
    ],
)
def test_what_a_server_says_at_the_start_is_understood(
    answer: bytes, kind: type[RelatumError], reason: str | None, said: str
) -> None:
    """A server that starts, stops or is full is waited for; one that is too old, or no PostgreSQL, is not."""
    with answering(answer) as url:
        check(url, kind, reason, said)


def test_a_server_that_dies_before_it_agrees_on_tls_is_waited_for() -> None:
    """It answers the request for TLS with an error: that is not about the setup of TLS."""
    died = refusal("57P01", "terminating connection due to unexpected postmaster exit")
    with answering(died, negotiates=False) as url:
        check(url, DatabaseUnavailable, None, "an error response")


def test_certificates_of_postgresql_are_told_apart(database_url: str, tmp_path: Path) -> None:
    """TLS that is not as the URL asks is configuration, and names the option; as it asks, it works."""
    own = {name: tmp_path / name for name in ("certificate.pem", "key.pem")}
    for name, path in own.items():
        shutil.copy(FILES / name, path)
    account = Account.choose(None, must_reach=list(own.values()))
    for path in own.values():
        path.chmod(0o600)
        account.own(path)
    certificate, key = own.values()
    more = f"client_tls_sslmode = require\nclient_tls_cert_file = {certificate}\nclient_tls_key_file = {key}"
    with pgbouncer(database_url, tmp_path, more=more) as url:
        named = url.replace("127.0.0.1", "localhost") + f"?hostaddr=127.0.0.1&sslrootcert={certificate}"
        with as_engine(f"{named}&sslmode=verify-full") as engine, engine.connect() as connection:
            key_definitions(connection)
        for query, said in {
            "sslmode=disable": "SSL",
            "sslmode=verify-full": "root certificate file",
            f"sslmode=verify-full&sslrootcert={tmp_path}/nobody.pem": "nobody.pem",
            f"sslmode=verify-full&sslrootcert={certificate}&host=elsewhere&hostaddr=127.0.0.1": "does not match host",
            f"sslmode=require&sslcert={certificate}&sslkey={tmp_path}/nobody.key": "nobody.key",
        }.items():
            check(f"{url}?{query}", ConfigurationError, None, said)


COMPONENTS: dict[str, Callable[[str, str], object]] = {
    "look-ups": lambda broker, database: Relations(broker, database).find("host", "h"),
    "the schema": lambda broker, database: upgrade(database),
    "affinity sets": lambda broker, database: relatum.AffinitySets("orders", database, broker=broker).count(),
    "serial consumers": lambda broker, database: relatum.SerialConsumer(
        "orders", "test", database=database, broker=broker
    ).start(),
    "outcomes": lambda broker, database: relatum.Outcomes(database).of("id"),
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_says_it_so(amqp_url: str, component: str) -> None:
    """Each component raises the same error for a refused password, and does not show it."""
    with answering(refusal("28P01", 'password authentication failed for user "user"')) as url:
        with pytest.raises(AccessRefused, match="authentication failed") as refused:
            COMPONENTS[component](amqp_url, url)
        assert "secret" not in str(refused.value)
