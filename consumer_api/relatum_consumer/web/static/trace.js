// Opens a message of a conversation in a drawer, so that the conversation keeps its scroll position.
import { drawTimes, notify } from "./shared.js";

const drawer = document.querySelector("[data-drawer]");

document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("a[data-open]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  try {
    const response = await fetch(link.href);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    page.querySelectorAll("main .steps, main .tabs").forEach((each) => each.remove());
    const found = page.querySelectorAll("main > .head, main > .summary, main > [data-problem], main .column:first-child > *");
    if (!found.length) { location.assign(link.href); return; }
    drawer.querySelector("[data-content]").replaceChildren(...found);
    drawer.querySelector("[data-whole]").href = link.href;
    drawTimes(drawer);
    if (!drawer.open) drawer.showModal();
  } catch {
    notify("The page does not answer: the message cannot be shown now.");
  }
});

drawer?.addEventListener("click", (event) => {
  // A click on the backdrop has the dialog itself as its target.
  if (event.target === drawer || event.target.closest("[data-close]")) drawer.close();
});
