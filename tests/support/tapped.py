"""Users that may do little, on private brokers."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from relatum.local import LocalRabbitMQ
from tests.support.rabbitmq_tools import evaluate

PASSWORD = "secret"


def add_users(server: LocalRabbitMQ, users: Mapping[str, tuple[str, str, str]]) -> None:
    rows = ",".join("{" + ",".join(f'<<"{text}">>' for text in (name, *rights)) + "}" for name, rights in users.items())
    made = (
        f'[begin ok = rabbit_auth_backend_internal:add_user(U, <<"{PASSWORD}">>, <<"x">>),'
        ' ok = rabbit_auth_backend_internal:set_permissions(U, <<"/">>, C, W, R, <<"x">>) end'
        " || {U, C, W, R} <- [ROWS]]"
    )
    evaluate(server, made.replace("ROWS", rows.replace("\\", "\\\\")))


def as_user(url: str, name: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()
