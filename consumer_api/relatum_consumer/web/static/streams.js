// Streams: renewed every few seconds where that is wished, and while somebody looks.
import { renew } from "./shared.js";

const EVERY_MS = 3000;
const box = document.querySelector("[data-refresh]");

async function look() {
  if (box.checked && !document.hidden) await renew(location.href);
  setTimeout(look, EVERY_MS);
}

if (box) look();
