// Copies the link of a message to the clipboard.
import "./shared.js";

const button = document.querySelector("[data-copy]");

button?.addEventListener("click", async () => {
  const label = button.querySelector("span");
  const link = new URL(location.pathname + location.search, location.href);
  try {
    await navigator.clipboard.writeText(link.href);
    label.textContent = "Copied";
  } catch {
    label.textContent = "Not allowed";
  }
  setTimeout(() => { label.textContent = "Copy link"; }, 2000);
});
