"use strict";
// Follows the system's theme until the reader chooses; the choice is kept where the browser lets a local file keep one.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const remember = (theme) => { try { localStorage.setItem("xcompress-theme", theme); } catch { /* private mode */ } };
  let chosen = null;
  try { chosen = localStorage.getItem("xcompress-theme"); } catch { /* private mode */ }
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => { button.lastElementChild.textContent = isDark() ? "Light theme" : "Dark theme"; };
    button.hidden = false;
    show();
    dark.addEventListener("change", show);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      remember(root.dataset.theme);
      show();
    });
  });
})();
