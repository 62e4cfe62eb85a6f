// Helps to fill in the form of a search.
const form = document.querySelector("[data-search]");

// The address has only what was filled in.
form.addEventListener("formdata", ({ formData }) => {
  for (const name of new Set(formData.keys())) {
    if (formData.getAll(name).every((value) => value === "" || (name === "order" && value === "oldest"))) formData.delete(name);
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
