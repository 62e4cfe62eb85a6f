"""The page in Debian's Chromium: ways, keyboard, themes, widths, axe; `--long` sees all views, with pictures."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from relatum import GROUP_KEY
from relatum_consumer import Expectation
from relatum_consumer.expectations import add_expectations
from relatum_consumer.web import WebServer
from tests.support import LIMIT_S, recording, unique_name, wait_until
from tests.support.groups import group_id, of_group
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.web import at
from tests.web.conftest import BODIES, HOSTILE, KEYS, MANY, Talks, World, filled, page_of, views

SCREENSHOTS: Final = Path(__file__).parents[2] / ".venv" / "screenshots"

HEIGHT: Final = 900

WEIGHT_BYTES_MAX: Final = 200_000

CONVERSATIONS: Final = {
    "conversation": "/trace?stream=ORDERS&offset=0",
    "conversation-large": "/trace?key=order_id&value=talk-200",
}

TABLES_PX: Final = 920
"""The least width at which lists are tables of many columns."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, as the system has it. For this file alone: what drives it keeps the thread's event loop."""
    program = os.environ.get("RELATUM_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no Chromium: tools/install chromium installs it")
    expect.set_options(timeout=LIMIT_S * 1000)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[str]:
    with WebServer(world.page(port=0)) as server:
        yield server.url.rstrip("/")


@pytest.fixture(scope="module")
def talked(talks: Talks) -> Iterator[str]:
    with WebServer(talks.page(port=0)) as server:
        yield server.url.rstrip("/")


class Watched:
    """A page that says what its console said, and where it looked beyond its own site."""

    def __init__(self, page: Page, site: str) -> None:
        self.page = page
        self.said: list[str] = []
        self.elsewhere: list[str] = []
        page.add_init_script("window.hacked = () => { window.wasHacked = true; }")
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(site) or self.elsewhere.append(asked.url))

    def _note(self, message: ConsoleMessage) -> None:
        # The answer for a missing thing is a page with that status, which the console reports as an error.
        if message.type in ("error", "warning") and "the server responded with a status of 4" not in message.text:
            self.said.append(message.text)

    def check(self) -> None:
        """See that nothing was wrong, nothing ran that is not ours, and nothing came from elsewhere."""
        self.page.wait_for_load_state()
        assert self.said == []
        assert self.elsewhere == []
        assert not self.page.evaluate("window.wasHacked === true")
        beyond = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert beyond <= 0, "it is wider than the window"


@contextmanager
def looking(
    browser: Browser, served: str, *, theme: str = "light", width: int = 1280, **options: Any
) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme=theme,  # type: ignore[arg-type]
        timezone_id="Asia/Tokyo",
        base_url=served,
        **options,
    )
    context.set_default_timeout(LIMIT_S * 1000)
    try:
        watched = Watched(context.new_page(), served)
        yield watched
        watched.check()
    finally:
        context.close()


@pytest.fixture
def window(request: pytest.FixtureRequest, browser: Browser, served: str) -> Iterator[Watched]:
    """A window on the page of the world: a usual one, or as `seen` asks."""
    with looking(browser, served, **getattr(request, "param", {})) as window:
        yield window


@pytest.fixture
def tab(window: Watched) -> Page:
    return window.page


def seen(**options: Any) -> pytest.MarkDecorator:
    """How a test's window is, in words of `looking`."""
    return pytest.mark.parametrize("window", [options], indirect=True, ids=["-".join(options)])


def kept(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def later(marker: pytest.MarkDecorator, what: str, *windows: tuple[str, int]) -> list[Any]:
    """Themes and widths in which a test does not look on each commit."""
    return [pytest.param(what, *window, marks=marker) for window in windows]


@pytest.mark.parametrize(
    ("what", "theme", "width"),
    [
        ("talks", "dark", 320),
        *later(pytest.mark.long, "talks", ("light", 1280), ("dark", 1280), ("light", 2560)),
        *later(pytest.mark.rare, "world", ("light", 1280), ("dark", 320)),
        *later(
            pytest.mark.long, "world", ("dark", 1280), ("light", 640), ("light", 320), ("light", 920), ("light", 2560)
        ),
    ],
)
def test_every_view(
    browser: Browser, request: pytest.FixtureRequest, is_long: bool, what: str, theme: str, width: int
) -> None:
    """It fits its window, breaks no short word, keeps nobody out, and with all that it loads is under 200 kB."""
    shown: World = request.getfixturevalue(what)
    served: str = request.getfixturevalue({"world": "served", "talks": "talked"}[what])
    with looking(browser, served, theme=theme, width=width) as window:
        page, received = window.page, list[float]()
        network = page.context.new_cdp_session(page)
        network.send("Network.enable")
        network.send("Network.setCacheDisabled", {"cacheDisabled": True})
        network.on("Network.loadingFinished", lambda told: received.append(told["encodedDataLength"]))
        for name, path in (views(shown) if what == "world" else CONVERSATIONS).items():
            received.clear()
            page.goto(served + path.replace("ORDERS", shown.orders))
            page.wait_for_load_state("load")
            expect(page.locator("main h1").first).to_be_attached()
            assert what == "talks" or 0 < sum(received) < WEIGHT_BYTES_MAX, name
            window.check()
            if width >= TABLES_PX:
                assert [page.evaluate(WORDS), page.evaluate(LINES)] == [[], []], name
            if theme == "light" or is_long or what == "talks":
                check_access(page, name)
            if is_long:
                kept(page, f"{name}-{theme}-{width}")


def check_access(page: Page, name: str) -> None:
    """See that axe finds nothing serious in a view."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == [], name


def test_a_search_has_an_address_of_what_was_typed(tab: Page) -> None:
    """It has no fields that were left empty, and going back brings the answer before."""
    tab.goto("/")
    tab.get_by_label("Key").select_option("host")
    tab.get_by_label("Value").fill("busy")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator("#answer").get_by_text("25 messages and more")).to_be_visible()
    expect(tab).to_have_url(re.compile(r"\?key=host&value=busy$"))
    tab.get_by_role("link", name="Next page").click()
    expect(tab.locator("tbody tr")).to_have_count(25)
    tab.get_by_label("Value").fill("nobody")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator("#answer").get_by_text("not recorded yet: a part")).to_be_visible()
    tab.go_back()
    expect(tab.locator("tbody tr")).to_have_count(25)


@seen(width=360, has_touch=True)
def test_a_phone_has_cards_instead_of_columns(tab: Page) -> None:
    """Each message is a card whose lines are named, and pages lead on."""
    tab.goto("/?key=host&value=busy&limit=200")
    style = "row => [getComputedStyle(row).display, getComputedStyle(row).gridTemplateColumns.split(' ').length]"
    assert tab.locator("tbody tr").first.evaluate(style) == ["grid", 1]
    tab.get_by_role("link", name="Next page").tap()
    expect(tab.locator("tbody tr")).to_have_count(MANY - 200)
    # All pages have a name there: those in the menu have the menu's.
    tab.goto("/contexts")
    expect(tab.locator("nav summary")).to_have_text("Contexts")
    name = tab.locator("nav summary").bounding_box()
    assert name is not None
    assert 0 < name["x"] < name["x"] + name["width"] <= 360 - 32


def test_values_are_offered_while_one_is_typed(tab: Page) -> None:
    """Those of the key that begin so; of a key of others none stay; what is typed on is asked for, too."""
    tab.goto("/")
    offered = tab.locator("#values option")
    tab.keyboard.press("/")
    tab.keyboard.type("host")
    tab.keyboard.press("Tab")
    expect(offered).to_have_count(1)
    expect(offered).to_have_attribute("value", "busy")
    tab.keyboard.type("x")
    expect(offered).to_have_count(0)
    tab.get_by_label("Key").select_option("order_id")
    tab.get_by_label("Value").fill("o-<")
    expect(offered).to_have_attribute("value", f"o-{HOSTILE}")


def test_all_of_it_goes_by_keyboard(tab: Page, world: World) -> None:
    """From the search to a message, on and back, without a pointer; letters are turned off for good where one likes."""
    tab.goto("/")
    tab.keyboard.press("Tab")
    expect(tab.get_by_text("Skip to the content")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.locator("main")).to_be_focused()
    tab.keyboard.press("/")
    expect(tab.get_by_label("Key")).to_be_focused()
    tab.keyboard.type("host")
    tab.keyboard.press("Tab")
    tab.keyboard.type("busy")
    tab.keyboard.press("Enter")
    expect(tab.locator("#answer").get_by_text("25 messages and more")).to_be_visible()
    link = tab.locator("td a.strong").first
    link.focus()
    assert link.evaluate("each => getComputedStyle(each).outlineStyle") != "none"
    tab.keyboard.press("Enter")
    expect(tab.locator("h1")).to_have_text(f"{world.orders} {len(BODIES)}")
    tab.keyboard.press("n")
    expect(tab.locator("h1")).to_have_text(f"{world.orders} {len(BODIES) + 1}")
    tab.keyboard.press("p")
    expect(tab.locator("h1")).to_have_text(f"{world.orders} {len(BODIES)}")
    tab.goto(f"/stream?stream={world.orders}")
    tab.keyboard.press("/")
    tab.keyboard.type("3")
    tab.keyboard.press("Enter")
    expect(tab.locator("h1")).to_contain_text(" 3")
    tab.goto(f"/message?stream={world.orders}&offset=3")
    tab.get_by_label("Shortcuts").uncheck()
    tab.reload()
    tab.keyboard.press("n")
    tab.keyboard.press("/")
    expect(tab.locator("h1")).to_contain_text(" 3")
    tab.get_by_label("Shortcuts").check()
    tab.keyboard.press("n")
    expect(tab.locator("h1")).to_contain_text(" 4")


@seen(width=320)
def test_the_menu_opens_within_a_narrow_window(tab: Page) -> None:
    """Wherever its button is wrapped to."""
    for path in ("/", "/contexts", "/trace"):
        tab.goto(path)
        tab.locator("nav summary").click()
        box = tab.locator("nav details > div").bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= 320, path


def test_the_menu_is_left_by_keyboard(tab: Page) -> None:
    """Escape closes it, and so does the focus that moves on: it covers nothing that one reads or types in."""
    tab.goto("/")
    menu = tab.locator("nav summary")
    for leave in ("Escape", "Tab"):
        menu.focus()
        tab.keyboard.press("Enter")
        expect(tab.get_by_role("link", name="Contexts")).to_be_visible()
        tab.get_by_role("link", name="Contexts").focus()
        tab.keyboard.press(leave)
        expect(tab.get_by_role("link", name="Contexts")).to_be_hidden()
        if leave == "Escape":
            expect(menu).to_be_focused()


def test_the_address_with_the_token_lets_one_in(browser: Browser, world: World) -> None:
    """Once: it is in no address afterwards, and another tab needs it no more."""
    token = "a-token-of-16-characters"
    with WebServer(world.page(port=0, token=token)) as server, looking(browser, server.url) as window:
        page, path = window.page, f"{server.url}message?stream={quote(world.orders)}&offset=0"
        page.goto(path)
        expect(page.get_by_text("this page needs its token")).to_be_visible()
        page.goto(f"{path}&token={token}")
        expect(page.locator("h1")).to_contain_text(world.orders)
        assert page.url == path
        other = page.context.new_page()
        other.goto(path)
        expect(other.locator("h1")).to_contain_text(world.orders)
        window.said.clear()


@seen(java_script_enabled=False)
def test_it_can_be_read_without_scripts(tab: Page, world: World) -> None:
    """Search, message and the latest are whole; nothing is offered that would do nothing."""
    tab.goto("/")
    tab.get_by_label("Key").select_option("host")
    tab.get_by_label("Value").fill("busy")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator("tbody tr")).to_have_count(25)
    tab.locator("td a.strong").first.click()
    expect(tab.locator("h1")).to_have_text(f"{world.orders} {len(BODIES)}")
    tab.goto(f"/message?stream={world.orders}&offset=0")
    expect(tab.get_by_text('"a"').first).to_be_visible()
    tab.goto(f"/live?stream={world.orders}")
    expect(tab.locator("tbody tr").first).to_be_visible()
    expect(tab.get_by_label("refresh")).to_be_hidden()
    tab.goto("about:blank")


def test_times_are_the_readers_and_utc_is_at_hand(tab: Page) -> None:
    """In the zone of the browser, with UTC as the title, and as the text where one likes; it is remembered."""
    tab.goto("/?key=host&value=busy&limit=2")
    time = tab.locator("tbody time").first
    # A column says its date once.
    expect(tab.locator("tbody .same-date")).to_have_count(1)
    assert tab.locator("tbody .same-date span").evaluate("each => getComputedStyle(each).clipPath") == "inset(50%)"
    expect(time).to_have_text("2023-11-15 07:13:20")
    expect(time).to_have_attribute("title", "2023-11-14 22:13:20 UTC")
    tab.locator("[data-zone]").click()
    expect(time).to_have_text("2023-11-14 22:13:20 UTC")
    tab.reload()
    expect(tab.locator("tbody time").first).to_have_text("2023-11-14 22:13:20 UTC")


def test_a_list_is_renewed_and_outlives_its_server(browser: Browser, world: World) -> None:
    """Keyboard users are not sent back to its beginning; without an answer it says so, and continues later."""
    with WebServer(world.page(port=0)) as server:
        url, port = server.url.rstrip("/"), urlsplit(server.url).port
        context = looking(browser, url)
        window = context.__enter__()
        page, rows = window.page, window.page.locator("table.streams tbody tr")
        page.goto(f"{url}/streams")
        link = rows.last.get_by_role("link")
        link.focus()
        rows.last.evaluate("row => { row.dataset.old = '1'; }")
        page.locator("[data-refresh]").evaluate("box => { box.checked = true; }")
        expect(page.locator("tr[data-old]")).to_have_count(0)
        expect(link).to_be_focused()
    expect(page.get_by_text("The page does not answer")).to_be_visible()
    expect(rows).to_have_count(2)
    with WebServer(world.page(port=port)):
        expect(page.locator("[data-told]")).to_have_text("")
        expect(link).to_be_focused()
        window.said.clear()
        context.__exit__(None, None, None)


def test_over_a_silent_link_what_is_shown_is_said_to_be_old(browser: Browser, served: str) -> None:
    """What hangs is given up, said, and asked for again by itself."""
    with Proxy.to(served) as link, looking(browser, f"http://127.0.0.1:{link.port}") as window:
        page, linked = window.page, f"http://127.0.0.1:{link.port}"

        def in_time(shown: Locator, words: str) -> None:
            """The page's own clock continues until it says so."""

            def is_said() -> bool:
                page.clock.run_for(2_000)
                return words in (shown.text_content() or "")

            wait_until(is_said, what=words)

        page.clock.install()
        page.goto(f"{linked}/streams")
        page.get_by_label("refresh").check()
        link.mode = "frozen"
        told = page.locator("[data-told]")
        in_time(told, "The page does not answer. This is its last state")
        page.locator("tbody tr").first.evaluate("row => { row.id = 'old'; }")
        link.mode = "pass"

        def is_renewed() -> bool:
            page.clock.run_for(2_000)
            return page.locator("#old").count() == 0

        wait_until(is_renewed, what="the list is there again")
        window.said.clear()


def test_drawn_lines_take_forced_colors(browser: Browser, talked: str, talks: Talks) -> None:
    """What is drawn is not forced by itself."""
    with looking(browser, talked, theme="dark", forced_colors="active") as window:
        page = window.page
        page.goto(f"{talked}/trace?stream={talks.orders}&offset=0")
        text = page.evaluate("getComputedStyle(document.body).color")
        assert page.locator(".start .when circle").evaluate("each => getComputedStyle(each).fill") == text
        assert page.locator(".when line").first.evaluate("each => getComputedStyle(each).stroke") == text


@seen(width=794, theme="dark")
def test_a_printed_view_is_whole(tab: Page) -> None:
    """On paper each table fits the page, dark themes are light, and nothing is left that one would click."""
    tab.emulate_media(media="print")
    for path in ("/", "/?key=host&value=busy", "/streams", "/missing/expectation?name=swift&span=all", "/groups"):
        tab.goto(path)
        expect(tab.locator("main h1").first).to_be_attached()
        assert tab.evaluate(BEYOND) == [], path
        assert tab.locator("nav:visible, form:visible, .button:visible").count() == 0, path
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"


@seen(accept_downloads=True)
def test_hostile_bodies_headers_and_names_do_nothing(window: Watched, tab: Page, world: World) -> None:
    """Each body in each view, and as a file: no script of it runs."""
    for offset in range(len(BODIES)):
        tab.goto(f"/message?stream={world.orders}&offset={offset}")
        for view in tab.locator(".tabs a:not([download])").all_inner_texts():
            tab.locator(".tabs").get_by_role("link", name=view, exact=True).click()
            window.check()
    expect(tab.get_by_text(HOSTILE[:20]).first).to_be_visible()
    tab.goto(f"/message?stream={world.orders}&offset=2")
    with tab.expect_download() as download:
        tab.get_by_role("link", name="download").click()
    assert download.value.suggested_filename == "message-2.bin"
    assert Path(download.value.path()).read_bytes() == BODIES[2]


LETTERS: Final = """link => {
    const walk = document.createTreeWalker(link, NodeFilter.SHOW_TEXT), places = [];
    for (let text = walk.nextNode(); text; text = walk.nextNode())
        for (let n = 0; n < text.length; n++) {
            const range = document.createRange();
            range.setStart(text, n);
            range.setEnd(text, n + 1);
            if (text.data[n].trim()) places.push(range.getBoundingClientRect().left);
        }
    return places;
}"""
"""Where each letter of an element is drawn."""


def test_names_from_right_to_left_move_nothing(browser: Browser, place: Place) -> None:
    """A message's number stays behind its stream's name; where no markup may be, there is none."""
    # Short, so that the number is never wrapped into the next line.
    stream = f"{unique_name('right')[-12:]}-\u05d0\u05d1\u05d2"
    with filled(place.amqp, {stream: [(b"1", {"order_id": "\u05d0\u05d1\u05d2"})]}):
        place.record(stream, keys=KEYS)
        with WebServer(page_of(place, port=0)) as server, looking(browser, server.url) as window:
            page = window.page
            for path in ("streams", f"stream?stream={quote(stream)}", f"live?stream={quote(stream)}"):
                page.goto(server.url + path)
                assert "bdi" not in page.title() + page.locator("main").inner_text()
                assert page.locator("[title*=bdi], [aria-label*=bdi]").count() == 0
            page.goto(f"{server.url}trace?stream={quote(stream)}&offset=0")
            *name, number = page.locator(".rows a").first.evaluate(LETTERS)
            assert number > max(name)


LONG: Final = "an-endless-name-" * 12 + "to-200ch"
VALUE: Final = "v" * 1_000

BEYOND: Final = """() => {
    const wide = (each) => each.scrollWidth > each.clientWidth + 1;
    const found = [...document.querySelectorAll("main .scroll, main .box, main .column")].filter(wide);
    for (const each of document.querySelectorAll("main *:not(svg *)")) {
        const { right, width } = each.getBoundingClientRect();
        const isBeyond = width && right > innerWidth + 1;
        if (isBeyond && !each.closest(".scrolled, .raw, .unseen, .skip, thead")) found.push(each);
    }
    if (wide(document.documentElement)) found.unshift(document.documentElement);
    const named = (each) => `${each.tagName}.${each.getAttribute("class")} ${each.textContent.trim().slice(0, 40)}`;
    return found.slice(0, 5).map(named);
}"""
"""What of a view is wider than the window, or than the box it is in."""

TALL: Final = """() => [...document.querySelectorAll("main .key, main .facts dd, main tr")]
    .filter((each) => each.getBoundingClientRect().height > innerHeight)
    .map((each) => each.textContent.trim().slice(0, 40))"""
"""What of a view takes more than the window's height: a value that is not clamped."""

WORDS: Final = """() => [...document.querySelectorAll(".state, .sign, .status, nav a, th")].filter((each) => {
    const text = each.querySelector("span:last-child") ?? each;
    const words = document.createRange();
    return [...text.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).some((node) =>
        [...node.data.matchAll(/\\b[a-z]{1,20}\\b/g)].some(({ index, 0: word }) => {
            words.setStart(node, index);
            words.setEnd(node, index + word.length);
            return new Set([...words.getClientRects()].map((each) => each.top)).size > 1;
        }));
}).map((each) => each.textContent.trim().slice(0, 40))"""
"""States whose words are broken within."""


_ENDLESS_ROWS: Final = (
    "INSERT INTO relatum.collectors (vhost, name) VALUES ('/', :name)",
    "INSERT INTO relatum.collector_sources (collector_id, stream) SELECT collector_id, :name FROM relatum.collectors",
    "INSERT INTO relatum.collected_messages (source_id, stream_offset, message_id, type, size) "
    "SELECT source_id, 0, :value, :value, 1 FROM relatum.collector_sources",
    "INSERT INTO relatum.super_streams (name, header) VALUES (:name, :name)",
    "INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place) "
    "SELECT super_stream_id, :name || n, n, n FROM relatum.super_streams, generate_series(0, 1) n",
)


def _endless_views() -> dict[str, str]:
    query = urlencode({"key": "order_id", "value": VALUE})
    return {
        "first": "/",
        "search": f"/?{query}",
        "search-refused": f"/?{urlencode({'key': LONG, 'value': VALUE})}",
        "message": f"/message?stream={LONG}&offset=0",
        "message-refused": f"/message?stream={LONG}&offset=99",
        "conversation": f"/trace?{query}",
        "conversation-message": f"/trace?stream={LONG}&offset=0",
        "streams": "/streams",
        "stream": f"/stream?stream={LONG}",
        "missing": "/missing?span=all",
        "expectation": f"/missing/expectation?{urlencode({'name': LONG[:100], 'span': 'all'})}",
        "groups": "/groups?show=all",
        "group": f"/groups/group?id={group_id(1)}",
        "collectors": "/collectors",
        "collector": f"/collectors/collector?{urlencode({'name': LONG, 'state': 'waiting'})}",
        "contexts": "/contexts",
        "super-stream": f"/contexts/super-stream?{urlencode({'name': LONG})}",
        "live": "/live",
    }


@pytest.mark.parametrize("width", [390, *(pytest.param(width, marks=pytest.mark.long) for width in (1280, 2560))])
def test_names_and_values_without_end_stay_in_their_places(
    browser: Browser, place: Place, is_long: bool, width: int
) -> None:
    """No view is wider than its window, no box than itself; no value fills the window, no state is broken."""
    wrong, headers = {}, {"order_id": VALUE, "long": VALUE, "kind": "a"} | of_group(1, 2)[1]
    with filled(place.amqp, {LONG: [(VALUE.encode(), headers)] * 3}):
        place.record(LONG, keys=["order_id", "long", "kind", GROUP_KEY])
        add_expectations(place.database, [Expectation(LONG[:100], LONG, "order_id", LONG, 0.001)])
        for statement in _ENDLESS_ROWS:
            place.sql(statement, name=LONG, value=VALUE[:200])
        with (
            WebServer(page_of(place, port=0)) as server,
            looking(browser, server.url.rstrip("/"), width=width) as window,
        ):
            for name, path in _endless_views().items():
                window.page.goto(path)
                expect(window.page.locator("main h1").first).to_be_attached()
                if is_long:
                    kept(window.page, f"endless-{name}-{width}")
                found = [*window.page.evaluate(BEYOND), *window.page.evaluate(TALL), *window.page.evaluate(WORDS)]
                if name == "message":
                    is_whole = "each => each.scrollHeight <= each.clientHeight"
                    assert window.page.locator("h1").evaluate(is_whole), "the offset is cut off"
                wrong |= {name: found} if found else {}
            window.page.goto("about:blank")
    assert wrong == {}, "\n".join(f"{name}: {' | '.join(found)}" for name, found in wrong.items())


LINES: Final = """() => [...document.querySelectorAll('td[data-label="Type"], .hits a')].filter((each) => {
    const content = document.createRange();
    content.selectNodeContents(each);
    return content.getBoundingClientRect().height > 1.8 * parseFloat(getComputedStyle(each).lineHeight);
}).map((each) => each.textContent.trim().slice(0, 40))"""
"""Types of messages, and places of what belongs to one, that take more than a line."""


def test_the_first_page_leads_on_by_a_key_and_by_a_message(tab: Page, world: World) -> None:
    """A chip searches for a recent value, or fills in its key; what belongs to a message is one click away."""
    tab.goto("/")
    tab.locator("#answer p.keys").get_by_role("link", name="host busy").click()
    expect(tab.locator("#answer").get_by_text("25 messages and more")).to_be_visible()
    tab.goto("/")
    tab.locator("#answer p.keys").get_by_role("link", name="place", exact=True).click()
    expect(tab.get_by_label("Key")).to_have_value("place")
    expect(tab.locator("input[name=value]").first).to_be_focused()
    tab.goto("/")
    tab.get_by_role("link", name=f"of {world.orders}").click()
    expect(tab.locator("h1")).to_have_text(f"{world.orders} {len(BODIES) + MANY - 1}")
    # In another stream, and not hidden among the neighbours in its own stream.
    tab.goto(at(world.orders, 1))
    for place in [(world.payments, 0), (world.orders, 0), (world.orders, 2)]:
        tab.locator("[data-key=order_id] li a").filter(
            has_text=re.compile(f"{re.escape(place[0])} {place[1]}$")
        ).click()
        expect(tab).to_have_url(at(*place))
        tab.go_back()


def test_a_conversation_is_walked_by_keyboard(browser: Browser, talked: str, talks: Talks) -> None:
    """From a message to its conversation, along its rows to another message, beside the conversation and then whole."""
    with looking(browser, talked) as window:
        page = window.page
        page.goto(f"{talked}/message?stream={talks.orders}&offset=0")
        page.locator("main").get_by_role("link", name="Conversation").focus()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text(f"{talks.orders} · 0")
        expect(page.locator(".status")).to_have_text("found: this is all")
        page.locator("#messages").focus()
        page.keyboard.press("Tab")
        expect(page.locator(".start a")).to_be_focused()
        last = page.get_by_role("link", name=f"{talks.mails} 0")
        for _ in range(20):
            page.keyboard.press("Tab")
            if last.evaluate("each => each === document.activeElement"):
                break
        expect(last).to_be_focused()
        page.keyboard.press("Enter")
        drawer = page.get_by_role("dialog")
        expect(drawer.locator("h1")).to_have_text(f"{talks.mails} 0")
        page.keyboard.press("Escape")
        expect(drawer).to_be_hidden()
        expect(last).to_be_focused()
        page.keyboard.press("Enter")
        drawer.get_by_role("link", name="Open the message").press("Enter")
        expect(page.locator("main > .head h1")).to_have_text(f"{talks.mails} 0")
        window.check()


def test_what_is_live_comes_by_itself_and_can_be_paused(browser: Browser, place: Place) -> None:
    """Rows come while one looks, and wait while one reads."""
    place.put(b"before")
    with recording(place.amqp, place.engine, place.stream, keys=KEYS), WebServer(page_of(place, port=0)) as server:
        place.wait_recorded()
        with looking(browser, server.url.rstrip("/")) as window:
            page, rows = window.page, window.page.locator("tbody tr")
            page.goto(f"{server.url}live?stream={place.stream}")
            expect(rows).to_have_count(1)
            place.put((HOSTILE.encode(), {"host": HOSTILE}))
            expect(rows.first).to_contain_text(HOSTILE[:20])
            page.get_by_label("refresh").uncheck()
            place.put(b"waits")
            place.wait_recorded()
            # More than one round of the list.
            page.wait_for_timeout(3_000)
            expect(rows).to_have_count(2)
            page.get_by_label("refresh").check()
            expect(rows.first).to_contain_text("waits")
            page.locator("tbody a.strong").first.click()
            expect(page.locator("h1")).to_contain_text(place.stream)


def test_a_list_outlives_the_server_behind_a_proxy(window: Watched, tab: Page) -> None:
    """The proxy's error page does not replace the last state."""
    tab.goto("/streams")
    tab.route("**/streams", lambda route: route.fulfill(status=502, body="Bad Gateway", content_type="text/html"))
    tab.get_by_label("refresh").check()
    expect(tab.get_by_text("The page does not answer")).to_be_visible()
    expect(tab.locator("table.streams tbody tr")).to_have_count(2)
    tab.unroute("**/streams")
    expect(tab.locator("[data-told]")).to_have_text("")
    window.said.clear()
