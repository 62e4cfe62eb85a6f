// A page that is renewed every few seconds, where that is wished and while somebody looks.
import { renew, tell } from "./shared.js";

const box = document.querySelector("[data-refresh]");

async function look() {
  // Nobody's marked text is taken away.
  const isWished = box.checked && !document.hidden && getSelection().isCollapsed;
  if (isWished && !(await renew(location.href))) tell("The page does not answer: this is what was. It is tried again by itself.", true);
  setTimeout(look, box.dataset.refresh);
}

if (box) setTimeout(look, box.dataset.refresh);
