// Runs before the first paint, so that a chosen theme never flashes. No module: those are deferred.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("ckptd-theme"); } catch { /* storage is closed: follow the system */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
