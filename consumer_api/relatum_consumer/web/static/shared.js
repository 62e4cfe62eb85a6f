// What all pages do: times in the reader's zone, the theme, keys of the keyboard, and a part of a page that is renewed.

const remembered = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const remember = (name, value) => { try { localStorage.setItem(name, value); } catch { /* It is forgotten, then. */ } };

// --- times ---------------------------------------------------------------------------------------------

let isUtc = remembered("relatum-zone") === "utc";
const shown = new Intl.DateTimeFormat("sv-SE", {
  year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  fractionalSecondDigits: 3,
});

export function drawTimes(within = document) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.dateTime);
    time.textContent = isUtc || Number.isNaN(moment.valueOf()) ? time.title : shown.format(moment).replace(",", ".");
  }
  const button = document.querySelector("[data-zone]");
  if (button) {
    button.textContent = isUtc ? "UTC" : "local";
    button.setAttribute("aria-pressed", String(isUtc));
  }
}

// --- a part that is renewed ----------------------------------------------------------------------------

// The server draws, also for this: what is shown has one form, with scripts and without.
let latest = 0;

export async function renew(url, part = "#answer") {
  const target = document.querySelector(part);
  const mine = ++latest;
  target.setAttribute("aria-busy", "true");
  try {
    const response = await fetch(url, { headers: { Accept: "text/html" }, redirect: "follow" });
    const text = await response.text();
    if (mine !== latest) return;
    const page = new DOMParser().parseFromString(text, "text/html");
    const found = page.querySelector(part);
    if (!found) { location.assign(url); return; }
    target.replaceChildren(...found.childNodes);
    document.title = page.title;
    drawTimes(target);
  } catch {
    if (mine === latest) location.assign(url);
  } finally {
    if (mine === latest) target.setAttribute("aria-busy", "false");
  }
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

// A browser scrolls there and may leave the focus behind.
document.addEventListener("click", (event) => {
  const skip = event.target.closest?.(".skip");
  if (!skip) return;
  event.preventDefault();
  document.querySelector(skip.hash).focus();
});

const isTyping = (target) => target.closest?.("input, textarea, select, [contenteditable]");

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  if (event.key === "/") {
    const first = document.querySelector("[data-first]");
    if (first) { event.preventDefault(); first.focus(); first.select(); }
  } else if (event.key === "j" || event.key === "n") document.querySelector("a[rel=next]")?.click();
  else if (event.key === "k" || event.key === "p") document.querySelector("a[rel=prev]")?.click();
});

// On a phone the pages' names are one line that is moved along.
document.querySelector(".top [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });

drawTheme();
drawTimes();
