"use strict";
// Draws the charts in the colours of the theme, and lets a case of the history be chosen. Everything is in the page.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  const views = new Map(); // by place: a chart drawn anew leaves no listeners behind

  function colour(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }

  function config() {
    const [ink, quiet, line, weft, two, three, four, five, six, page] =
      ["ink", "quiet", "line", "weft", "two", "three", "four", "five", "six", "page"].map(colour);
    const font = getComputedStyle(document.body).fontFamily;
    const text = { font, labelFont: font, titleFont: font };
    return {
      background: "transparent", padding: { left: 6, right: 6, top: 2, bottom: 2 }, font,
      view: { stroke: null }, mark: { color: ink }, text: { color: ink },
      range: { category: [weft, two, three, four, five, six] },
      axis: { ...text, labelColor: quiet, titleColor: quiet, labelFontSize: 11, titleFontSize: 12, titleFontWeight: 400,
        gridColor: line, domainColor: line, tickColor: line, labelPadding: 4 },
      legend: { ...text, labelColor: ink, labelFontSize: 12, symbolStrokeWidth: 2 },
      style: {
        label: { fontSize: 12, align: "left", baseline: "middle" },
        value: { fontSize: 12, align: "right", baseline: "middle", fontWeight: 600 },
        mark: { filled: true, size: 64, opacity: 1, stroke: page, strokeWidth: 1 },
        reference: { color: quiet, thickness: 1.5, opacity: 1 },
        stem: { strokeWidth: 2, opacity: 0.55 },
        noise: { strokeWidth: 6, opacity: 0.3 },
        case: { thickness: 1.5, opacity: 0.7 },
        share: { filled: true, opacity: 0.6 },
        mean: { filled: true, color: ink, stroke: page, strokeWidth: 1, size: 90, opacity: 1, thickness: 3 },
        band: { opacity: 0.18 },
        hit: { opacity: 0, size: 80 },
      },
    };
  }

  // ast: expressions are interpreted, since the page's policy forbids to evaluate text as a program.
  async function draw(place, spec) {
    const tooltip = { disableDefaultStyle: true };
    const options = { mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, tooltip, config: config() };
    const inner = place.firstElementChild ?? place.appendChild(document.createElement("div"));
    inner.setAttribute("aria-hidden", "true"); // the place has the chart in words, the table its numbers
    views.get(inner)?.finalize();
    const { view } = await window.vegaEmbed(inner, spec, options);
    views.set(inner, view);
  }

  function drawPast(select) {
    const { runs, series, spec } = data.past[select.dataset.past];
    const { kind, ways, points } = series[select.value];
    const seconds = (value) => `${(value * 1e3).toPrecision(4)} ms`;
    const values = points.map(([way, run, low, value, high]) => ({
      name: ways[way], at: run, x: runs[run], low, value, high,
      tip: `${ways[way]}, ${runs[run]}: ${seconds(value)} (${seconds(low)} to ${seconds(high)})`,
    }));
    const chosen = JSON.parse(JSON.stringify(spec));
    chosen.data = { values };
    for (const layer of chosen.layer) {
      for (const channel of ["color", "shape"]) {
        if (layer.encoding[channel]) layer.encoding[channel].scale.domain = ways;
      }
      layer.encoding.x.scale = { domain: runs };
      layer.encoding.y.title = kind;
    }
    const place = document.getElementById(`${select.dataset.past}-past`);
    const title = select.selectedOptions[0].textContent;
    place.setAttribute("aria-label", `${title}, over ${runs.length} runs; its numbers are in the table below.`);
    return draw(place, chosen);
  }

  const selects = [...document.querySelectorAll("select[data-past]")];

  async function drawAll() {
    root.dataset.charts = "drawing";
    for (const place of document.querySelectorAll("[data-chart]")) await draw(place, data.charts[place.dataset.chart]);
    for (const select of selects) await drawPast(select);
    root.dataset.charts = "drawn";
  }

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  function show() {
    const dark = chosen === null ? system.matches : chosen;
    root.style.colorScheme = chosen === null ? "" : dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
    return drawAll();
  }

  button.addEventListener("click", () => {
    chosen = button.getAttribute("aria-pressed") !== "true";
    show();
  });
  system.addEventListener("change", show);
  for (const select of selects) select.addEventListener("change", () => drawPast(select));
  for (const each of document.querySelectorAll("button[data-file]")) {
    each.addEventListener("click", () => {
      const name = each.dataset.file;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([data.raw[name]], { type: "application/json" }));
      link.download = name.replaceAll("/", "_");
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
  show();
})();
