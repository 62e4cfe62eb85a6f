"""pika's callback connections in a thread of their own."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pika
from pika.adapters.select_connection import SelectConnection

import relatum


@contextmanager
def running(url: str, **options: Any) -> Iterator[tuple[SelectConnection, Callable[..., Any]]]:
    opened: Future[SelectConnection] = Future()

    def on_open(connection: Any) -> None:
        relatum.intercept(connection, **options)
        opened.set_result(connection)

    def on_closed(connection: Any, _reason: BaseException) -> None:
        connection.ioloop.stop()

    connection = SelectConnection(
        pika.URLParameters(url),
        on_open_callback=on_open,
        on_open_error_callback=lambda _, error: opened.set_exception(RuntimeError(str(error))),
        on_close_callback=on_closed,
    )
    thread = threading.Thread(target=connection.ioloop.start, daemon=True)
    thread.start()
    opened.result(90)

    def on_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer: Future[Any] = Future()

        def call() -> None:
            try:
                answer.set_result(function(*args, **kwargs))
            except BaseException as error:
                answer.set_exception(error)

        connection.ioloop.add_callback_threadsafe(call)
        return answer.result(90)

    yield connection, on_thread
    if connection.is_open:
        on_thread(connection.close)
    thread.join(90)
    relatum.release(connection)
    connection.ioloop.close()


def open_channel(connection: SelectConnection, on_thread: Callable[..., Any]) -> Any:
    opened: Future[Any] = Future()
    on_thread(connection.channel, on_open_callback=opened.set_result)
    return opened.result(90)
