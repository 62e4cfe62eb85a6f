// Searches without leaving the page; each answer has its own URL.
import { renew, tell } from "./shared.js";

const form = document.querySelector("[data-search]");

function address() {
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(form)) {
    if (value !== "" && !(name === "order" && value === "oldest")) query.append(name, value);
  }
  return `${form.getAttribute("action")}?${query}`;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const url = address();
  if (url !== location.pathname + location.search) history.pushState(null, "", url);
  const answer = document.querySelector("#answer");
  if (await renew(url)) tell([...answer.querySelectorAll(".summary > span")].map((each) => each.textContent.trim()).join(", "));
  else {
    // The shown answer belongs to another search.
    answer.replaceChildren();
    tell("The page does not answer. Search again once it is back: nothing that was typed is lost.", true);
  }
});

// A composite key needs a field for each part: the server renders them.
form.elements.key.addEventListener("change", () => {
  const parts = Number(form.elements.key.selectedOptions?.[0].dataset.parts ?? 1);
  if (parts !== form.querySelectorAll("input[name=value]").length && !form.elements.of_stream) {
    location.assign(`${form.getAttribute("action")}?${new URLSearchParams({ key: form.elements.key.value })}`);
  }
});

// Offers values that begin with the typed text, once typing pauses. Late answers are dropped.
const offered = form.querySelector("[data-values]");
const TYPING_MS = 150;
let pause, question;

function offerValues() {
  clearTimeout(pause);
  question?.abort();
  const key = form.elements.key.value;
  if (!key) return;
  pause = setTimeout(async () => {
    question = new AbortController();
    try {
      const query = new URLSearchParams({ key, prefix: offered.value });
      const response = await fetch(`${offered.dataset.values}?${query}`, { signal: question.signal });
      const { values } = response.ok ? await response.json() : { values: [] };
      offered.list.replaceChildren(...values.map((value) => Object.assign(document.createElement("option"), { value })));
    } catch { /* The search works without offered values. */ }
  }, TYPING_MS);
}

for (const event of offered ? ["input", "focus"] : []) offered.addEventListener(event, offerValues);

addEventListener("popstate", () => location.reload());
