// Refreshes a page every few seconds, while the box is checked and the page is visible.
import { renew, tell } from "./shared.js";

const box = document.querySelector("[data-refresh]");

async function look() {
  // Keep text that the user has selected.
  const isWished = box.checked && !document.hidden && getSelection().isCollapsed;
  if (isWished && !(await renew(location.href))) tell("The page does not answer. This is its last state; it retries by itself.", true);
  setTimeout(look, box.dataset.refresh);
}

if (box) setTimeout(look, box.dataset.refresh);
