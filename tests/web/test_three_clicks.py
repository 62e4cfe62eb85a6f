"""The first way through the page, in Chromium, on streams as the demo has them: flights, their planes, the weather."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from relatum.keys import KeyDefinition
from relatum.store import make_engine
from relatum_consumer.web import WebOptions, WebServer
from tests.support import declare_stream, delete_stream, publish_plain, record, unique_name
from tests.support.web import at
from tests.web.test_browser import browser, looking

__all__ = ["browser"]

KEYS = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
HOUR_US = 3_600_000_000
START_US = 1_357_000_000_000_000 // HOUR_US * HOUR_US
PLANES = 4
FLIGHTS = 60


def message(body: dict[str, Any], at_us: int | None = None) -> tuple[bytes, dict[str, Any]]:
    """A row of the demo's data as a message."""
    headers = {name: body[name] for name in ("tailnum", "origin", "time_hour") if name in body}
    return json.dumps(body).encode(), headers if at_us is None else headers | {"relatum_time": at_us}


def flight(number: int) -> tuple[bytes, dict[str, Any]]:
    """A flight: two an hour, by each plane in turn, from two airports."""
    hour, tail = number // 2, f"N{number % PLANES}UA"
    body = {"flight": number, "tailnum": tail, "origin": ("EWR", "LGA")[number % 2], "time_hour": f"{hour:02}:00"}
    return message(body, START_US + hour * HOUR_US + 600_000_000 * (1 + number % 2))


def report(number: int) -> tuple[bytes, dict[str, Any]]:
    """A report of the weather: each hour at both airports."""
    hour = number // 2
    body = {"wind": number, "origin": ("EWR", "LGA")[number % 2], "time_hour": f"{hour:02}:00"}
    return message(body, START_US + hour * HOUR_US)


@pytest.fixture
def demo_page(amqp_url: str, stream_url: str, database_url: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a page on such streams, and their names."""
    prefix = unique_name("demo")
    names = {name: f"{prefix}-{name}" for name in ("flights", "planes", "weather")}
    engine = make_engine(database_url)
    try:
        for name in names.values():
            declare_stream(amqp_url, name)
        publish_plain(amqp_url, names["planes"], [message({"tailnum": f"N{n}UA", "seats": n}) for n in range(PLANES)])
        publish_plain(amqp_url, names["weather"], [report(n) for n in range(FLIGHTS)])
        publish_plain(amqp_url, names["flights"], [flight(n) for n in range(FLIGHTS)])
        record(amqp_url, engine, *names.values(), keys=KEYS)
        with WebServer(WebOptions(amqp_url, database_url, stream_url, port=0, timeout_s=60.0)) as server:
            yield server.url.rstrip("/"), names
    finally:
        engine.dispose()
        for name in names.values():
            delete_stream(amqp_url, name)


def part(page: Page, key: str, where: str) -> Any:
    """What belongs to a message by a key, in some place."""
    return page.locator(f"[data-key={key}] [data-where={where}] a")


def test_from_a_flight_to_its_plane_its_weather_and_the_flights_before(
    browser: Browser, demo_page: tuple[str, dict[str, str]]
) -> None:
    """The page opens with a flight to click; from it plane, weather and the flight before are one click each."""
    served, names = demo_page
    with looking(browser, served) as window:
        page = window.page
        page.goto(f"{served}/")
        page.get_by_role("link", name=f"of {names['flights']}").click()
        expect(page.locator("h1")).to_contain_text(f"Offset {FLIGHTS - 1}")
        # The plane is in another stream, and 14 flights of it are before it: it is not lost among them.
        expect(part(page, "tailnum", "elsewhere")).to_have_text([f"{names['planes']} 3"])
        expect(part(page, "airport_hour", "elsewhere")).to_have_text([f"{names['weather']} {FLIGHTS - 1}"])
        before = [f"{names['flights']} {n}" for n in (FLIGHTS - 5, FLIGHTS - 9)]
        expect(part(page, "tailnum", "earlier")).to_have_text(before)
        for key, where, lies in [
            ("tailnum", "elsewhere", at(names["planes"], 3)),
            ("airport_hour", "elsewhere", at(names["weather"], FLIGHTS - 1)),
            ("tailnum", "earlier", at(names["flights"], FLIGHTS - 5)),
        ]:
            part(page, key, where).first.click()
            expect(page).to_have_url(f"{served}{lies}")
            page.go_back()
            expect(page.locator("h1")).to_contain_text(f"Offset {FLIGHTS - 1}")
