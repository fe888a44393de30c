"use strict";

/* The charts: loss against steps, bytes and time, which are read together. */

function formatBytes(count) {
  let rest = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (rest < 999.5) return `${Number(rest.toPrecision(3))} ${unit}`;
    rest /= 1000;
  }
  return `${Number(rest.toPrecision(3))} TB`;
}

function timeUnit(seconds) {
  if (seconds > 3 * 3600) return ["h", 3600];
  return seconds > 300 ? ["min", 60] : ["s", 1];
}

function formatSeconds(seconds) {
  const [unit, size] = timeUnit(seconds);
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

/** Round numbers from low to high, about as many as asked for. */
function linearTicks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks;
}

function logTicks(low, high, count) {
  const ticks = [];
  const decades = Math.log10(high / low);
  const factors = decades > count ? [1] : decades > count / 2 ? [1, 5] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  const stride = Math.ceil(ticks.length / count);
  const thinned = ticks.filter((_, i) => i % stride === 0);
  return thinned.length > 1 ? thinned : linearTicks(low, high, count);
}

const STEP = 0, LOSS = 1, SENT = 2, RECEIVED = 3, SECONDS = 4;
const AXES = {
  step: { field: STEP, label: () => "step", format: (x) => x.toLocaleString("en") },
  bytes: { field: SENT, log: true, label: () => "sent per rank (log scale)", format: formatBytes },
  seconds: {
    field: SECONDS,
    label: () => "time of training",
    format: (x, top) => {
      const [unit, size] = timeUnit(top);
      return `${Number((x / size).toPrecision(6))} ${unit}`;
    },
    unit: (top) => timeUnit(top)[1],
  },
};
const MARGIN = { top: 26, right: 16, bottom: 42, left: 50 };

function make(name, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** What all charts share: which methods are shown, and which point is being read. */
class Board {
  constructor(series) {
    this.series = series.map((each) => ({
      ...each,
      // Where seeds share no steps there is no mean, and each is a line of its own.
      lines: each.mean ? [each.mean] : each.seeds.map((seed) => seed.points),
      thin: each.mean && each.seeds.length > 1 ? each.seeds.map((seed) => seed.points) : [],
    }));
    this.hidden = new Set();
    this.first = 0; // the step from which curves are shown
    this.reading = null; // {s, line, i}: series, line and point
    this.charts = [];
    const last = this.series.flatMap((each) => each.lines).map((line) => line.at(-1)?.[STEP] ?? 0);
    this.last = Math.max(0, ...last);
  }

  shown(s) {
    return !this.hidden.has(s);
  }

  keeps(point) {
    return point[STEP] >= this.first;
  }

  redraw() {
    this.read(null);
    this.charts.forEach((chart) => chart.draw());
  }

  read(reading, chart) {
    this.reading = reading;
    this.charts.forEach((each) => each.mark(reading, each === chart));
  }

  /** The rows of the tip, as pairs. */
  describe({ s, line, i }) {
    const { name, lines, thin, seeds } = this.series[s];
    const point = lines[line][i];
    const rows = [
      ["loss", point[LOSS].toFixed(3)],
      ["step", point[STEP].toLocaleString("en")],
      ["sent", formatBytes(point[SENT])],
      ["received", formatBytes(point[RECEIVED])],
      ["time", formatSeconds(point[SECONDS])],
    ];
    thin.forEach((points, index) => {
      const same = points.find((each) => each[STEP] === point[STEP]);
      if (same) rows.push([`loss, ${seeds[index].name}`, same[LOSS].toFixed(3)]);
    });
    const title = lines.length > 1 ? `${name}, ${seeds[line].name}` : name;
    return { title: thin.length ? `${title}, mean` : title, rows };
  }
}

class Chart {
  constructor(board, figure, live) {
    this.board = board;
    this.figure = figure;
    this.axis = AXES[figure.dataset.axis];
    this.title = figure.querySelector("strong").textContent;
    this.live = live;
    this.targets = []; // {s, line, i, x, y}: what can be read
    this.svg = make("svg", { class: "plot", tabindex: "0", role: "application" }, figure);
    this.svg.setAttribute("aria-roledescription", "chart");
    this.svg.setAttribute("aria-label", `${this.title}: the arrow keys read its points`);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    figure.append(this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") board.read(null); // a finger leaves what it touched
    });
    this.svg.addEventListener("blur", () => board.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(figure);
  }

  resize() {
    const style = getComputedStyle(this.figure);
    const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
    const width = Math.floor(this.figure.clientWidth - padding);
    if (width <= 0 || width === this.width) return;
    this.width = width;
    this.height = Math.round(Math.min(380, Math.max(240, width * 0.5)));
    this.draw();
  }

  /** The points of a line that this axis can show, with their places in the line. */
  visible(line) {
    return line
      .map((point, i) => ({ point, i }))
      .filter(({ point }) => this.board.keeps(point) && (!this.axis.log || point[SENT] > 0));
  }

  scales(drawn) {
    const all = drawn.flatMap(({ lines }) => lines.flat());
    const field = (index) => all.map(({ point }) => point[index]);
    const levels = drawn.flatMap(({ levels }) => levels.map(({ point }) => point[LOSS]));
    const range = (values) => [
      values.reduce((a, b) => Math.min(a, b), Infinity),
      values.reduce((a, b) => Math.max(a, b), -Infinity),
    ];
    let [bottom, top] = range([...field(LOSS), ...levels]);
    const room = (top - bottom || Math.abs(top) || 1) * 0.06;
    [bottom, top] = [bottom - room, top + room];
    let [left, right] = range(field(this.axis.field));
    if (!Number.isFinite(left)) [left, right] = this.axis.log ? [1, 10] : [0, 1];
    if (this.axis.log) [left, right] = left === right ? [left / 2, right * 2] : [left, right];
    else if (!this.board.first) left = 0;
    if (left === right) right = left + 1;
    const place = this.axis.log ? Math.log : (x) => x;
    const inner = this.width - MARGIN.left - MARGIN.right;
    const deep = this.height - MARGIN.top - MARGIN.bottom;
    const span = place(right) - place(left);
    return {
      left, right, bottom, top,
      x: (value) => MARGIN.left + (inner * (place(value) - place(left))) / span,
      y: (value) => MARGIN.top + (deep * (top - value)) / (top - bottom),
    };
  }

  draw() {
    if (!this.width) return;
    const { board, svg, width, height } = this;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.targets = [];
    const drawn = board.series.flatMap((each, s) => {
      if (!board.shown(s)) return [];
      const lines = each.lines.map((line) => this.visible(line));
      const thin = each.thin.map((line) => this.visible(line));
      // A logarithmic axis has no zero: what sends nothing is a level, not a curve.
      const levels = each.lines.flatMap((line, index) => {
        const i = line.length - 1;
        return this.axis.log && i >= 0 && !line[i][SENT] ? [{ point: line[i], i, index }] : [];
      });
      return [{ s, each, lines, thin, levels }];
    });
    if (!drawn.some(({ lines, levels }) => lines.flat().length + levels.length)) {
      const text = make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg);
      text.textContent = "nothing to show";
      return;
    }
    const scales = this.scales([
      ...drawn,
      { lines: drawn.flatMap(({ thin }) => thin), levels: [] },
    ]);
    this.drawAxes(scales);
    for (const { s, each, lines, thin, levels } of drawn) {
      const look = `series colour-${each.colour} dash-${each.dash}`;
      const group = make("g", { class: look, "data-series": s }, svg);
      thin.forEach((line) => this.drawLine(line, scales, group, "thin"));
      lines.forEach((line, index) => {
        this.drawLine(line, scales, group, "line");
        for (const { point, i } of line) {
          const [x, y] = [scales.x(point[this.axis.field]), scales.y(point[LOSS])];
          this.targets.push({ s, line: index, i, x, y });
          if (line.length <= 30) make("circle", { cx: x, cy: y, r: 3 }, group);
        }
      });
      for (const { point, i, index } of levels) {
        const y = scales.y(point[LOSS]);
        const ends = { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y };
        make("line", { class: "line", ...ends }, group);
        const label = make("text", { x: MARGIN.left + 6, y: y - 5, stroke: "none" }, group);
        label.textContent = `${each.name}: 0 bytes`;
        for (let x = ends.x1; x <= ends.x2; x += 20) this.targets.push({ s, line: index, i, x, y });
      }
    }
    this.chosen = make("g", {}, svg);
  }

  drawLine(line, scales, group, kind) {
    if (!line.length) return;
    const path = line.map(
      ({ point }) => `${scales.x(point[this.axis.field]).toFixed(1)} ${scales.y(point[LOSS]).toFixed(1)}`,
    );
    make("path", { class: kind, d: `M${path.join("L")}` }, group);
  }

  drawAxes({ x, y, left, right, bottom, top }) {
    const { svg, width, height, axis } = this;
    const floor = height - MARGIN.bottom;
    const yTicks = linearTicks(bottom, top, Math.max(4, Math.round(height / 60)));
    const decimals = Math.max(1, ...yTicks.map((tick) => (String(tick).split(".")[1] ?? "").length));
    for (const tick of yTicks) {
      make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }, svg);
      const text = make("text", { x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" }, svg);
      text.textContent = tick.toFixed(Math.min(decimals, 6));
    }
    const count = Math.max(2, Math.floor((width - MARGIN.left) / 85));
    const unit = axis.unit?.(right) ?? 1;
    const xTicks = axis.log
      ? logTicks(left, right, count)
      : linearTicks(left / unit, right / unit, count).map((tick) => tick * unit);
    for (const tick of xTicks) {
      make("line", { class: "axis", x1: x(tick), x2: x(tick), y1: floor, y2: floor + 5 }, svg);
      const text = make("text", { x: x(tick), y: floor + 18, "text-anchor": "middle" }, svg);
      text.textContent = axis.format(tick, right);
    }
    make("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor }, svg);
    const label = make("text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, svg);
    label.textContent = axis.label();
    const loss = make("text", { x: 0, y: 12 }, svg);
    loss.textContent = "loss";
  }

  /** Read the point that is nearest to the pointer. */
  point(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let [best, least] = [null, 80 ** 2];
    for (const target of this.targets) {
      const distance = (target.x - x) ** 2 + (target.y - y) ** 2;
      if (distance < least) [best, least] = [target, distance];
    }
    this.board.read(best, this);
  }

  /** Left and right go along a line, up and down to the next one. */
  key(event) {
    if (event.key === "Escape") return this.board.read(null);
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if ((!along && !across) || !this.targets.length) return;
    event.preventDefault();
    const now = this.board.reading;
    const isNow = (target) => now && target.s === now.s && target.line === now.line;
    const own = this.targets.filter(isNow);
    let next = this.targets[0];
    if (own.length && along) {
      const i = own.findIndex((target) => target.i === now.i) + along;
      next = own[Math.min(own.length - 1, Math.max(0, i))];
    } else if (own.length) {
      const lines = [...new Set(this.targets.map((target) => `${target.s} ${target.line}`))];
      const i = lines.indexOf(`${now.s} ${now.line}`) + across;
      const name = lines[(i + lines.length) % lines.length];
      const others = this.targets.filter((target) => `${target.s} ${target.line}` === name);
      const far = (target) => Math.abs(target.x - own.find((each) => each.i === now.i).x);
      next = others.reduce((a, b) => (far(b) < far(a) ? b : a));
    }
    this.board.read(next, this);
    const { title, rows } = this.board.describe(next);
    this.live.textContent = `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`;
  }

  /** Show what is read: a ring in every chart, and the figures in the one that is pointed at. */
  mark(reading, isHere) {
    if (!this.chosen) return;
    this.svg.parentElement.classList.toggle("reading", Boolean(reading));
    for (const group of this.svg.querySelectorAll("g.series")) {
      group.classList.toggle("active", reading?.s === Number(group.dataset.series));
    }
    this.chosen.replaceChildren();
    this.tip.hidden = true;
    if (!reading) return;
    const same = ({ s, line, i }) => s === reading.s && line === reading.line && i === reading.i;
    const target = isHere ? reading : this.targets.find(same);
    if (!target) return;
    const { colour } = this.board.series[reading.s];
    const ring = { class: `chosen colour-${colour}`, cx: target.x, cy: target.y, r: 5.5 };
    make("circle", ring, this.chosen);
    if (isHere) this.showTip(target);
  }

  showTip(target) {
    const { title, rows } = this.board.describe(target);
    const heading = document.createElement("strong");
    heading.textContent = title;
    const table = document.createElement("table");
    for (const [name, value] of rows) {
      const row = table.insertRow();
      const head = document.createElement("th");
      head.textContent = name;
      row.append(head);
      row.insertCell().textContent = value;
    }
    this.tip.replaceChildren(heading, table);
    this.tip.hidden = false;
    const box = this.svg.getBoundingClientRect();
    const outer = this.figure.getBoundingClientRect();
    const x = box.left - outer.left + (target.x * box.width) / this.width;
    const y = box.top - outer.top + (target.y * box.height) / this.height;
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const beside = x + 14 + wide <= outer.width ? x + 14 : x - 14 - wide;
    const clamp = (value, most) => Math.max(4, Math.min(value, most - 4));
    this.tip.style.left = `${clamp(beside, outer.width - wide)}px`;
    this.tip.style.top = `${clamp(y - high / 2, outer.height - high)}px`;
  }
}

function drawCharts() {
  const board = new Board(JSON.parse(document.getElementById("series").textContent));
  const live = document.getElementById("reading");
  for (const id of ["controls", "charts"]) document.getElementById(id).hidden = false;
  for (const figure of document.querySelectorAll("figure")) {
    board.charts.push(new Chart(board, figure, live));
  }
  document.querySelectorAll("#legend button").forEach((button, s) => {
    button.addEventListener("click", () => {
      if (!board.hidden.delete(s)) board.hidden.add(s);
      button.setAttribute("aria-pressed", String(board.shown(s)));
      board.redraw();
    });
  });
  const start = document.getElementById("start");
  start.addEventListener("input", () => {
    board.first = Math.round((board.last * start.value) / 100);
    document.getElementById("first").textContent = board.first.toLocaleString("en");
    board.redraw();
  });
}

drawCharts();
