// Helps users fill in the search form.
const form = document.querySelector("[data-search]");

// The form submits only fields that were filled in.
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

// Suggests values that begin with the typed text, once typing pauses. Each request cancels the previous request.
const valueField = form.querySelector("[data-values]");
const TYPING_MS = 150;
let pause, controller;

function suggestValues() {
  clearTimeout(pause);
  controller?.abort();
  const key = form.elements.key.value;
  if (!key) return;
  pause = setTimeout(async () => {
    controller = new AbortController();
    try {
      const query = new URLSearchParams({ key, prefix: valueField.value });
      const response = await fetch(`${valueField.dataset.values}?${query}`, { signal: controller.signal });
      const { values } = response.ok ? await response.json() : { values: [] };
      valueField.list.replaceChildren(...values.map((value) => Object.assign(document.createElement("option"), { value })));
    } catch { /* The search works without suggestions. */ }
  }, TYPING_MS);
}

for (const event of valueField ? ["input", "focus"] : []) valueField.addEventListener(event, suggestValues);
