// The button that switches between the light and the dark theme.

function theme() {
  const button = byId("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("exitwise-theme"); } catch { return null; } };
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${name === "dark" ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    set(name);
    try { localStorage.setItem("exitwise-theme", name); } catch { /* storage is blocked */ }
  });
  system.addEventListener("change", () => remembered() || set(system.matches ? "dark" : "light"));
  set(remembered() || (system.matches ? "dark" : "light"));
}

theme();
