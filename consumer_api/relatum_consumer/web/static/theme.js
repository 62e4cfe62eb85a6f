// Applies the chosen theme, if any, before the page is drawn.
{
  let chosen = null;
  try { chosen = localStorage.getItem("relatum-theme"); } catch { /* Storage may be refused. */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
