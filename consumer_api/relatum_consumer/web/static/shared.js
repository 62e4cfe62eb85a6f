// Shared by all pages: times in the reader's zone, keyboard shortcuts, clicks, and refreshing.

const storedSetting = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const storeSetting = (name, value) => { try { localStorage.setItem(name, value); } catch { /* The setting lasts until the page is left. */ } };

// --- times ---------------------------------------------------------------------------------------------

let isUtc = storedSetting("relatum-zone") === "utc";
const timeFormat = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  fractionalSecondDigits: 3,
});

export function drawTimes(within = document) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    const text = isUtc || Number.isNaN(moment.valueOf()) ? time.title : timeFormat.format(moment).replace(",", ".").replace(/\.000$/, "");
    const [date, clock] = text.split(/ (.*)/);
    time.replaceChildren(Object.assign(document.createElement("span"), { textContent: date }), ` ${clock}`);
    // A column shows each date once.
    const cell = time.closest("td"), above = cell?.parentElement.previousElementSibling?.cells[cell.cellIndex];
    time.classList.toggle("same-date", above?.querySelector("time span")?.textContent === date);
  }
  const name = document.querySelector("[data-zone-name]");
  if (name) name.textContent = isUtc ? "UTC" : "Local time";
}

// Shows a notice at the edge of the page, which screen readers read.
export function notify(text) {
  const line = document.querySelector("[data-told]");
  if (line.textContent !== text) line.textContent = text;
}

// --- keyboard and pointer ------------------------------------------------------------------------------

for (const each of document.querySelectorAll("[data-needs-script]")) each.hidden = false;

document.querySelector("[data-zone]")?.addEventListener("click", () => {
  isUtc = !isUtc;
  storeSetting("relatum-zone", isUtc ? "utc" : "local");
  drawTimes();
});

const shortcuts = document.querySelector("[data-shortcuts]");
shortcuts.checked = storedSetting("relatum-shortcuts") !== "off";
shortcuts.addEventListener("change", () => storeSetting("relatum-shortcuts", shortcuts.checked ? "on" : "off"));

// Dictation can produce single letters, so users can switch shortcuts off.
function isShortcut(event) {
  const isTyping = event.target.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable]");
  return shortcuts.checked && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey;
}

document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  if (event.key === "/") {
    const first = document.querySelector("[data-first]");
    if (first) { event.preventDefault(); first.focus(); first.select?.(); }
  } else if (event.key === "j" || event.key === "n") document.querySelector("a[rel=next]")?.click();
  else if (event.key === "k" || event.key === "p") document.querySelector("a[rel=prev]")?.click();
});

// A click on a row opens its message, unless text is selected, or the click was on another control.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("tr:has(a.strong), .rows > li")?.querySelector("a.strong, a[data-open]");
  if (link && !event.target.closest("a, button, summary, input") && getSelection().isCollapsed) link.click();
});

// A click or the focus elsewhere closes the menu, as Escape does.
const menu = document.querySelector("details.menu");
for (const kind of ["click", "focusin"]) document.addEventListener(kind, ({ target }) => { menu.open &&= menu.contains(target); });
menu.addEventListener("keydown", ({ key }) => { if (key === "Escape") { menu.firstElementChild.focus(); menu.open = false; } });

drawTimes();

// --- refreshing ----------------------------------------------------------------------------------------

// Refreshes the answer of a page every few seconds, while the box is checked and the page is visible.
const SILENT_MS = 30_000;
const box = document.querySelector("[data-refresh]");

// Returns a function that restores the focus and the scroll positions after the target's content is replaced.
function viewRestorer(target) {
  const alike = (one) => [...target.querySelectorAll(one.localName)].filter((each) => each.getAttribute("href") === one.getAttribute("href"));
  const focused = target.contains(document.activeElement) ? document.activeElement : null;
  const place = focused ? alike(focused).indexOf(focused) : 0;
  const scrolls = [...target.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  return () => {
    if (focused) alike(focused)[place]?.focus({ preventScroll: true });
    target.querySelectorAll(".scroll").forEach((each, n) => { each.scrollLeft = scrolls[n] ?? 0; });
  };
}

// Replaces the answer with that of the page as the server renders it now.
async function refresh() {
  try {
    // The time limit ends silent connections, which could stay open forever.
    const response = await fetch(location.href, { signal: AbortSignal.timeout(SILENT_MS) });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const [target, found] = [document, page].map((each) => each.querySelector("#answer"));
    // Without an answer, the page may need its token. A proxy's error page (5xx) is temporary.
    if (!found && response.status < 500) { location.reload(); return; }
    const [servers, now] = [document, page].map((each) => each.querySelector("#servers"));
    // Replaced only on changes: screen readers read a replaced alert again.
    if (servers.textContent !== now.textContent) { servers.replaceChildren(...now.childNodes); drawTimes(servers); }
    document.querySelector("[data-took]").textContent = page.querySelector("[data-took]").textContent;
    const restore = viewRestorer(target);
    target.replaceChildren(...found.childNodes);
    restore();
    drawTimes(target);
    notify("");
  } catch {
    notify("The page does not answer. This is its last state; it retries automatically.");
  }
}

async function poll() {
  // Keep text that the user has selected.
  if (box.checked && !document.hidden && getSelection().isCollapsed) await refresh();
  setTimeout(poll, box.dataset.refresh);
}

if (box) setTimeout(poll, box.dataset.refresh);
