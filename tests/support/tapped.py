"""Users that may do little, and the firehose, on private brokers."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from relatum.local import LocalRabbitMQ
from relatum.tapping import Firehose
from tests.support._waiting import LIMIT_S, wait_until
from tests.support.rabbitmq_tools import evaluate

PASSWORD = "secret"


def add_users(server: LocalRabbitMQ, users: Mapping[str, tuple[str, str, str]]) -> None:
    """Make users by what they may configure, write and read."""
    rows = ",".join("{" + ",".join(f'<<"{text}">>' for text in (name, *rights)) + "}" for name, rights in users.items())
    made = (
        f'[begin ok = rabbit_auth_backend_internal:add_user(U, <<"{PASSWORD}">>, <<"x">>),'
        ' ok = rabbit_auth_backend_internal:set_permissions(U, <<"/">>, C, W, R, <<"x">>) end'
        " || {U, C, W, R} <- [ROWS]]"
    )
    evaluate(server, made.replace("ROWS", rows.replace("\\", "\\\\")))


def as_user(url: str, name: str) -> str:
    """The URL of a broker for another user."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}").geturl()


@contextmanager
def carrying(url: str, stream: str, *errors: type[Exception]) -> Iterator[Firehose]:
    """Run a carrier in a thread; leaving ends it, by one of the errors where some are given."""
    firehose = Firehose(url, stream)
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            firehose.run(stop)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="firehose of the test")
    thread.start()
    try:
        yield firehose
        if errors:
            wait_until(lambda: failures, what="the carrier's end")
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert [type(failure) for failure in failures] == list(errors)
