"use strict";
// Draws the plots of the part that is shown, again when the theme changes. Data come as columns and are made rows here.
(() => {
  const data = JSON.parse(document.getElementById("r3-data").textContent);
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");

  function rowsOf(columns) {
    const names = Object.keys(columns);
    const count = columns[names[0]].length;
    return Array.from({ length: count }, (_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
  }

  async function draw(place) {
    const figure = data.figures[place.dataset.figure];
    const values = rowsOf(figure.columns);
    const spec = { ...figure.spec, data: { values }, width: "container", height: figure.height };
    const now = theme();
    try {
      const result = await vegaEmbed(place, spec, {
        config: data.themes[now],
        renderer: values.length > 2000 ? "canvas" : "svg",
        actions: { export: true, source: false, compiled: false, editor: false },
        tooltip: { theme: now },
      });
      if (place.r3View) place.r3View.finalize();
      place.r3View = result.view;
      place.dataset.drawn = now;
    } catch (error) {
      place.textContent = "This plot could not be drawn: " + error.message;
      console.error(error);
    }
  }

  const drawShown = () =>
    Promise.all([...document.querySelectorAll("article:not([hidden]) .plot")].filter((p) => p.dataset.drawn !== theme()).map(draw));

  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    drawShown();
  });
  system.addEventListener("change", drawShown);

  for (const tab of document.querySelectorAll(".tab")) {
    tab.addEventListener("click", () => {
      for (const other of document.querySelectorAll(".tab")) other.setAttribute("aria-selected", String(other === tab));
      for (const article of document.querySelectorAll("article")) article.hidden = article.id !== tab.dataset.part;
      drawShown();
    });
  }
  drawShown().then(() => (root.dataset.ready = "true"));
})();
