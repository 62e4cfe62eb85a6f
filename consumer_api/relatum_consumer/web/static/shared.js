// Shared by all pages: times in the reader's zone, the theme, keyboard shortcuts, and refreshing a part of a page.

const remembered = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const remember = (name, value) => { try { localStorage.setItem(name, value); } catch { /* Not remembered, then. */ } };

// --- times ---------------------------------------------------------------------------------------------

let isUtc = remembered("relatum-zone") === "utc";
const shown = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  fractionalSecondDigits: 3,
});

export function drawTimes(within = document) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    time.textContent = isUtc || Number.isNaN(moment.valueOf()) ? time.title : shown.format(moment).replace(",", ".").replace(/\.000$/, "");
  }
  const name = document.querySelector("[data-zone-name]");
  if (name) name.textContent = isUtc ? "UTC" : "Local time";
}

// --- refreshing a part of a page -----------------------------------------------------------------------

const ASKING_MS = 1000;
const SILENT_MS = 30_000;

// A line for screen readers, shown to all readers if `isSeen`.
export function tell(words, isSeen = false) {
  const line = document.querySelector("[data-told]");
  line.classList.toggle("unseen", !isSeen);
  if (line.textContent !== words) line.textContent = words;
}

// Keeps the focus and the scroll positions of a part that is replaced.
function kept(target) {
  const same = (one) => [...target.querySelectorAll(one.localName)].filter((each) => each.getAttribute("href") === one.getAttribute("href"));
  const focused = target.contains(document.activeElement) ? document.activeElement : null;
  const place = focused ? same(focused).indexOf(focused) : 0;
  const moved = [...target.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  return () => {
    if (focused) same(focused)[place]?.focus({ preventScroll: true });
    target.querySelectorAll(".scroll").forEach((each, n) => { each.scrollLeft = moved[n] ?? 0; });
  };
}

// The server renders this, too, so pages look the same with and without scripts. False if it does not answer.
let asking = null;

export async function renew(url, part = "#answer") {
  const target = document.querySelector(part);
  asking?.abort();
  const mine = asking = new AbortController();
  target.setAttribute("aria-busy", "true");
  const slow = setTimeout(() => tell("Asking…", true), ASKING_MS);
  // A silent connection can stay open forever.
  const silent = setTimeout(() => mine.abort(), SILENT_MS);
  try {
    const response = await fetch(url, { headers: { Accept: "text/html" }, redirect: "follow", signal: mine.signal });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const found = page.querySelector(part)?.childNodes ?? page.querySelectorAll("main [data-problem]");
    // A page that asks for its token, for example, has no such part.
    if (!found.length) { location.assign(url); return true; }
    const servers = document.querySelector("#servers");
    const now = page.querySelector("#servers");
    // Screen readers read a replaced alert again.
    if (now && servers.textContent !== now.textContent) { servers.replaceChildren(...now.childNodes); drawTimes(servers); }
    const took = page.querySelector("[data-took]");
    if (took) document.querySelector("[data-took]").textContent = took.textContent;
    const restore = kept(target);
    target.replaceChildren(...found);
    restore();
    document.title = page.title;
    drawTimes(target);
    tell("");
  } catch {
    return mine !== asking;
  } finally {
    clearTimeout(slow);
    clearTimeout(silent);
    if (mine === asking) target.setAttribute("aria-busy", "false");
  }
  return true;
}

// --- theme and keyboard --------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function drawTheme() {
  const name = document.documentElement.dataset.theme ?? "system";
  const label = document.querySelector("[data-theme-name]");
  if (label) label.textContent = name;
}

for (const each of document.querySelectorAll("[data-needs-script]")) each.hidden = false;

document.querySelector("[data-theme-button]")?.addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  remember("relatum-theme", next);
  drawTheme();
});

document.querySelector("[data-zone]")?.addEventListener("click", () => {
  isUtc = !isUtc;
  remember("relatum-zone", isUtc ? "utc" : "local");
  drawTimes();
});

// Browsers scroll to the target, but may not move the focus.
document.addEventListener("click", (event) => {
  const skip = event.target.closest?.(".skip");
  if (!skip) return;
  event.preventDefault();
  document.querySelector(skip.hash).focus();
});

const shortcuts = document.querySelector("[data-shortcuts]");
shortcuts.checked = remembered("relatum-shortcuts") !== "off";
shortcuts.addEventListener("change", () => remember("relatum-shortcuts", shortcuts.checked ? "on" : "off"));

// Dictation may produce single letters: they count only outside of inputs, and if shortcuts are switched on.
export function isShortcut(event) {
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

// A click elsewhere closes the menu.
document.addEventListener("click", (event) => {
  document.querySelectorAll("details.menu[open]").forEach((each) => { if (!each.contains(event.target)) each.open = false; });
});

drawTheme();
drawTimes();
