"use strict";

/* The charts: drawn by Plotly, shown, cut and read together. */

const charts = JSON.parse(document.getElementById("charts-data").textContent);
const plots = [...document.querySelectorAll("figure .plot")];
const live = document.getElementById("reading");
const steps = charts[0].traces.flatMap((trace) => trace.customdata);
const last = steps.reduce((a, b) => Math.max(a, b), 0);
const hidden = new Set();
let [first, reading] = [0, null]; // reading: {trace, point}, as the keyboard moves it

/** A trace in the colours of the page, without what comes before the first step shown. */
function prepare(trace, colour) {
  const kept = trace.customdata.map((step) => step >= first);
  const cut = Object.fromEntries(
    ["x", "y", "customdata", "text"]
      .filter((key) => trace[key])
      .map((key) => [key, trace[key].filter((_, i) => kept[i])]),
  );
  return { ...trace, ...cut, line: { ...trace.line, color: colour(trace.meta) } };
}

function draw() {
  const style = getComputedStyle(document.body);
  const colour = (name) => style.getPropertyValue(name).trim();
  const line = { gridcolor: colour("--line"), linecolor: colour("--rule"), zeroline: false };
  plots.forEach((plot, place) => {
    const { traces, xaxis } = charts[place];
    const shown = traces.filter((trace) => !hidden.has(trace.legendgroup));
    const data = shown.map((trace) => prepare(trace, colour));
    const empty = !data.some((trace) => trace.x.some((x) => x !== null));
    const words = { text: "nothing to show", showarrow: false, x: 0.5, y: 0.5 };
    Plotly.react(
      plot,
      empty ? [] : data,
      {
        xaxis: { ...line, ...xaxis, title: { text: xaxis.title }, showgrid: false, visible: !empty,
                 showline: true, rangemode: first ? "normal" : "tozero", fixedrange: true },
        yaxis: { ...line, title: { text: "loss" }, visible: !empty, fixedrange: true },
        annotations: empty ? [{ ...words, xref: "paper", yref: "paper" }] : [],
        font: { color: colour("--soft"), size: 12, family: style.fontFamily },
        hoverlabel: { bgcolor: colour("--page"), bordercolor: colour("--rule"), align: "left",
                      font: { color: colour("--ink") }, namelength: -1 },
        paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false,
        hovermode: "closest", hoverdistance: 80, margin: { l: 56, r: 16, t: 14, b: 48 },
      },
      { displayModeBar: false, responsive: true },
    );
  });
}

/** Show the same point in all charts but, where given, the one in which it is shown already. */
function mark(name, step, except) {
  const plain = (name) => name.replace(/: 0 bytes$/, "");
  for (const plot of plots) {
    if (plot === except) continue;
    const trace = plot.data.findIndex((each) => each.text && plain(each.name) === plain(name));
    const point = trace < 0 ? -1 : plot.data[trace].customdata.indexOf(step);
    if (point >= 0) Plotly.Fx.hover(plot, [{ curveNumber: trace, pointNumber: point }]);
  }
}

/** Left and right go along a line, up and down to the next one. */
function move(plot, event) {
  const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (event.key === "Escape") plots.forEach((each) => Plotly.Fx.unhover(each));
  const lines = plot.data.filter((trace) => trace.text?.length);
  if ((!along && !across) || !lines.length) return;
  event.preventDefault();
  const step = reading && lines[reading.trace % lines.length].customdata[reading.point];
  const trace = reading ? (reading.trace + (across ?? 0) + lines.length) % lines.length : 0;
  const line = lines[trace];
  const at = Math.max(0, line.customdata.indexOf(step));
  const point = reading ? Math.min(line.text.length - 1, Math.max(0, at + (along ?? 0))) : 0;
  reading = { trace, point };
  mark(line.name, line.customdata[point]);
  live.innerHTML = line.text[point].replace("</b><br>", "</b>: ").replaceAll("<br>", ", ");
}

for (const id of ["controls", "charts"]) document.getElementById(id).hidden = false;
draw();
for (const plot of plots) {
  plot.on("plotly_hover", ({ event, points: [{ data, customdata }] }) => {
    if (event?.isTrusted) mark(data.name, customdata, plot);
  });
  plot.on("plotly_unhover", () => plots.forEach((each) => each !== plot && Plotly.Fx.unhover(each)));
  plot.addEventListener("keydown", (event) => move(plot, event));
}
document.querySelectorAll("#legend button").forEach((button, series) => {
  button.addEventListener("click", () => {
    if (!hidden.delete(series)) hidden.add(series);
    button.setAttribute("aria-pressed", String(!hidden.has(series)));
    draw();
  });
});
const start = document.getElementById("start");
start.addEventListener("input", () => {
  first = Math.round((last * start.value) / 100);
  document.getElementById("first").textContent = first.toLocaleString("en");
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
