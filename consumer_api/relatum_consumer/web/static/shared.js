// Shared by all pages: times in the reader's zone, keyboard shortcuts, and clicks.

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

// A line at the edge of the page, which screen readers read.
export function tell(words) {
  const line = document.querySelector("[data-told]");
  if (line.textContent !== words) line.textContent = words;
}

// --- keyboard and pointer ------------------------------------------------------------------------------

for (const each of document.querySelectorAll("[data-needs-script]")) each.hidden = false;

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

// A click elsewhere closes the menu.
document.addEventListener("click", (event) => {
  document.querySelectorAll("details.menu[open]").forEach((each) => { if (!each.contains(event.target)) each.open = false; });
});

drawTimes();
