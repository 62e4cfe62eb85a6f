// Refreshes the answer of a page every few seconds, while the box is checked and the page is visible.
import { drawTimes, tell } from "./shared.js";

const SILENT_MS = 30_000;

const box = document.querySelector("[data-refresh]");

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

// The server renders the page as for a reader without scripts.
async function renew() {
  try {
    // A silent connection can stay open forever.
    const response = await fetch(location.href, { signal: AbortSignal.timeout(SILENT_MS) });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const [target, found] = [document, page].map((each) => each.querySelector("#answer"));
    // A page that asks for its token, for example, has no answer.
    if (!found) { location.reload(); return; }
    const [servers, now] = [document, page].map((each) => each.querySelector("#servers"));
    // Screen readers read a replaced alert again.
    if (servers.textContent !== now.textContent) { servers.replaceChildren(...now.childNodes); drawTimes(servers); }
    document.querySelector("[data-took]").textContent = page.querySelector("[data-took]").textContent;
    const restore = kept(target);
    target.replaceChildren(...found.childNodes);
    restore();
    drawTimes(target);
    tell("");
  } catch {
    tell("The page does not answer. This is its last state; it retries by itself.");
  }
}

async function look() {
  // Keep text that the user has selected.
  if (box.checked && !document.hidden && getSelection().isCollapsed) await renew();
  setTimeout(look, box.dataset.refresh);
}

if (box) setTimeout(look, box.dataset.refresh);
