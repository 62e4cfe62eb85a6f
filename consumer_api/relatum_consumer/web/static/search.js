// The search: asked without leaving the page, with an address for each answer.
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
    // What is there answers another question.
    answer.replaceChildren();
    tell("The page does not answer. Search again once it is back: nothing that was typed is lost.", true);
  }
});

// A key of several parts needs as many fields: the server draws them.
form.elements.key.addEventListener("change", () => {
  const parts = Number(form.elements.key.selectedOptions?.[0].dataset.parts ?? 1);
  if (parts !== form.querySelectorAll("input[name=value]").length && !form.elements.of_stream) {
    location.assign(`${form.getAttribute("action")}?${new URLSearchParams({ key: form.elements.key.value })}`);
  }
});

// Values that begin as what is typed, once it rests for a moment. What does not come in time is left out.
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
    } catch { /* What was typed is searched for all the same. */ }
  }, TYPING_MS);
}

for (const event of offered ? ["input", "focus"] : []) offered.addEventListener(event, offerValues);

addEventListener("popstate", () => location.reload());
