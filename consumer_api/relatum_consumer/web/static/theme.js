// Before anything is drawn: the theme that was chosen, where one was.
{
  let chosen = null;
  try { chosen = localStorage.getItem("relatum-theme"); } catch { /* Storage may be refused. */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
