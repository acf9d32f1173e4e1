"use strict";
// Draws the charts in the colours of the theme, those that are folded when they are unfolded. Everything is in the page.
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
    const [ink, quiet, line, page] = ["ink", "quiet", "line", "page"].map(colour);
    const category = ["weft", "two", "three", "four", "five", "six", "seven", "eight"].map(colour);
    const font = getComputedStyle(document.body).fontFamily;
    const text = { font, labelFont: font, titleFont: font };
    return {
      background: "transparent", padding: { left: 6, right: 6, top: 2, bottom: 2 }, font,
      view: { stroke: null }, mark: { color: ink }, text: { color: ink },
      range: { category },
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

  // A small chart of the history: a case over the runs, all ways beside one another, on a scale where ratios are distances.
  function specOfPast(place) {
    const { runs, machines, series, spec } = data.past[place.dataset.past];
    const { kind, ways, points } = series[place.dataset.series];
    const timed = kind !== "count";
    const shown = (value) => (timed ? `${(value * 1e3).toPrecision(4)} ms` : `${value}`);
    const machine = (run) => (kind === "host_time" ? machines[run] : 0); // of what else is told it says nothing
    const values = points.map(([way, run, low, value, high]) => ({
      name: ways[way], ours: ways[way] === "Weft", x: run + 1, low, value, high,
      machine: machine(run), here: machine(run) === machine(runs.length - 1),
      tip: `${ways[way]}, ${runs[run]}: ${shown(value)}${timed ? ` (${shown(low)} to ${shown(high)})` : ""}`,
    }));
    const ends = [Math.min(...points.map((each) => each[3])), Math.max(...points.map((each) => each[3]))];
    const [low, high] = [Math.min(...points.map((each) => each[2])), Math.max(...points.map((each) => each[4]))];
    const type = low > 0 ? "log" : "linear";
    const scale = { type, nice: false, domain: low > 0 ? [low / 1.03, high * 1.03] : [low, high || 1] };
    const axis = { values: [...new Set(ends)], grid: true, labelExpr: timed ? "format(datum.value, '.3~s') + 's'" : "format(datum.value, '.4~s')" };
    const chosen = JSON.parse(JSON.stringify(spec));
    chosen.data = { values };
    for (const layer of chosen.layer) {
      for (const channel of ["color", "shape"]) {
        if (layer.encoding[channel]) layer.encoding[channel].scale.domain = ways;
      }
      layer.encoding.x.scale = { domain: runs.map((_, run) => run + 1) };
      Object.assign(layer.encoding.y, { scale, axis });
    }
    return chosen;
  }

  const folded = (place) => place.closest("details:not([open])") !== null;
  const specOf = (place) => (place.dataset.chart ? data.charts[place.dataset.chart] : specOfPast(place));
  let turn = Promise.resolve(); // charts are drawn one after another, whoever asks

  // Those that are not folded, in the colours of the theme; without `anew` those that are not drawn yet.
  function drawAll(within, anew) {
    root.dataset.charts = "drawing";
    turn = turn.then(async () => {
      for (const place of within.querySelectorAll(".chart")) {
        if (!folded(place) && (anew || !place.firstElementChild)) await draw(place, specOf(place));
      }
    });
    const last = turn;
    return last.then(() => {
      if (turn === last) root.dataset.charts = "drawn";
    });
  }

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  function show() {
    const dark = chosen === null ? system.matches : chosen;
    root.style.colorScheme = chosen === null ? "" : dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
    for (const place of document.querySelectorAll(".chart")) if (folded(place)) place.replaceChildren(); // of the other theme
    return drawAll(document, true);
  }

  button.addEventListener("click", () => {
    chosen = button.getAttribute("aria-pressed") !== "true";
    show();
  });
  system.addEventListener("change", show);
  document.addEventListener("toggle", (event) => event.target.open && drawAll(event.target, false), true);

  // A link to what is folded unfolds it.
  function unfold() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let each = target.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  }
  addEventListener("hashchange", unfold);
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
  unfold();
})();
