// Small multiples in SVG: one cursor through all charts, values in the legend, smoothing. No library.

const SVG = "http://www.w3.org/2000/svg";
const PALETTE = 8;

// el("div", {class: "x", onclick: f}, child, ...): text is always set as text, never as markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

function draw(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text != null) node.textContent = text;
  parent.append(node);
  return node;
}

function show(value) {
  if (value == null) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return value.toExponential(2);
  if (size < 1e-3) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(+value.toPrecision(size >= 100 ? 4 : 3));
}

// Round numbers that cover [low, high]: about `count` of them.
function ticks(low, high, count, whole = false) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

// Exponential moving average, corrected for its start, over the steps that have a value.
function smoothed(points, weight) {
  let mean = 0, mass = 0;
  return points.map(([step, value]) => {
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return [step, mean / mass];
  });
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - points[low - 1][0] < points[low][0] - step ? low - 1 : low;
}

// series: [{name, points: [[step, value]], color: 0-7, dash}]; stacked charts add up at each step.
class Chart {
  static all = [];
  static cursor = null;
  static weight = 0;
  static onPick = () => {};

  constructor({ title, note, series, stacked = false, height = 168 }) {
    Object.assign(this, { series, stacked, height });
    this.legend = el("div", { class: "legend" });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", `${title}: ${series.map((one) => `${one.name} ${show(one.points.at(-1)[1])}`).join(", ")}`);
    this.node = el("div", { class: "chart" }, el("h4", {}, title, (this.at = el("span", { class: "at" }))), note ? el("p", { class: "note" }, note) : null, this.legend, this.svg);
    this.steps = [...new Set(series.flatMap((one) => one.points.map(([step]) => step)))].sort((a, b) => a - b);
    this.svg.addEventListener("pointermove", (event) => Chart.point(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => Chart.point(null));
    this.svg.addEventListener("click", (event) => Chart.onPick(this.stepAt(event)));
    this.svg.addEventListener("blur", () => Chart.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(this.svg);
    Chart.all.push(this);
    this.tell();
  }

  static point(step) {
    if (step === Chart.cursor) return;
    Chart.cursor = step;
    for (const chart of Chart.all) { chart.tell(); chart.mark(); }
  }

  static redraw() {
    for (const chart of Chart.all) chart.render();
  }

  key(event) {
    const last = this.steps.length - 1;
    const at = Chart.cursor == null ? last : nearest(this.steps.map((step) => [step]), Chart.cursor);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (event.key in moves) Chart.point(this.steps[Math.min(last, Math.max(0, moves[event.key]))]);
    else if (event.key === "Enter") Chart.onPick(Chart.cursor ?? this.steps[last]);
    else return;
    event.preventDefault();
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    const { left, right, low, high } = this.frame;
    const share = (event.clientX - box.left - left) / (right - left);
    return this.steps[nearest(this.steps.map((step) => [step]), low + share * (high - low))];
  }

  // The values at the cursor, or the last ones.
  tell() {
    this.legend.replaceChildren(...this.series.map((one) => {
      const at = Chart.cursor == null ? one.points.length - 1 : nearest(one.points, Chart.cursor);
      const hit = Chart.cursor == null || one.points[at][0] === Chart.cursor;
      return el("span", {}, el("i", { class: `dash${one.dash ?? 0}`, style: `border-color: var(--c${one.color})` }), `${one.name} `,
        el("b", {}, hit ? show(one.points[at][1]) : "-"));
    }));
    this.at.textContent = Chart.cursor == null ? "" : `step ${Chart.cursor}`;
  }

  lines() {
    if (!this.stacked) return this.series.map((one) => ({ ...one, top: one.points }));
    const sums = new Map();
    return this.series.map((one) => {
      const bottom = one.points.map(([step]) => [step, sums.get(step) ?? 0]);
      const top = one.points.map(([step, value], i) => [step, bottom[i][1] + value]);
      for (const [step, value] of top) sums.set(step, value);
      return { ...one, top, bottom };
    });
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const lines = this.lines(), values = lines.flatMap((one) => one.top.map(([, value]) => value));
    let bottom = Math.min(...values), top = Math.max(...values);
    if (this.stacked || (bottom > 0 && bottom < 0.35 * top)) bottom = 0;
    const flat = top === bottom, margin = (flat ? Math.abs(top) || 1 : top - bottom) * (flat ? 0.5 : 0.05);
    top += margin;
    if (bottom !== 0) bottom -= margin;
    const marks = ticks(bottom, top, 4);
    const room = Math.max(...marks.map((mark) => show(mark).length)) * 6.1 + 10;
    const low = this.steps[0], high = Math.max(this.steps.at(-1), low + 1);
    const frame = this.frame = { left: room, right: width - 8, low, high, top: 8, bottom: this.height - 20 };
    const x = (step) => frame.left + ((step - low) / (high - low)) * (frame.right - frame.left);
    const y = (value) => frame.bottom - ((value - bottom) / (top - bottom)) * (frame.bottom - frame.top);
    this.x = x;
    const svg = this.svg;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    svg.setAttribute("height", this.height);
    for (const mark of marks) {
      draw("line", { class: "grid-line", x1: frame.left, x2: frame.right, y1: y(mark), y2: y(mark) }, svg);
      draw("text", { x: frame.left - 6, y: y(mark) + 3.5, "text-anchor": "end" }, svg, show(mark));
    }
    for (const mark of ticks(low, high, Math.max(2, Math.floor(width / 75)), true)) {
      const anchor = x(mark) > frame.right - 14 ? "end" : "middle";
      draw("text", { x: x(mark), y: this.height - 5, "text-anchor": anchor }, svg, mark);
    }
    draw("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }, svg);
    const path = (points) => points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    for (const one of lines) {
      const stroke = `var(--c${one.color})`, dash = ["none", "6 4", "2 3", "1 5"][one.dash ?? 0];
      if (this.stacked) {
        const back = [...one.bottom].reverse();
        draw("path", { d: `${path(one.top)}${path(back).replace("M", "L")}Z`, fill: stroke, "fill-opacity": 0.75, stroke, "stroke-width": 0.75 }, svg);
        continue;
      }
      const smooth = Chart.weight > 0 && one.top.length > 3;
      const style = { fill: "none", stroke, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": dash };
      if (smooth) draw("path", { ...style, d: path(one.top), "stroke-width": 1, "stroke-opacity": 0.3 }, svg);
      draw("path", { ...style, d: path(smooth ? smoothed(one.top, Chart.weight) : one.top) }, svg);
      if (one.top.length <= 12) for (const [step, value] of one.top) draw("circle", { cx: x(step), cy: y(value), r: 2.6, fill: stroke }, svg);
    }
    this.mark();
  }

  mark() {
    this.svg.querySelector(".cursor")?.remove();
    const frame = this.frame;
    if (!frame || Chart.cursor == null || Chart.cursor < frame.low || Chart.cursor > frame.high) return;
    draw("line", { class: "cursor", x1: this.x(Chart.cursor), x2: this.x(Chart.cursor), y1: frame.top, y2: frame.bottom }, this.svg);
  }
}

// A curve without axes, for a tile.
function sparkline(points, color) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const values = points.map(([, value]) => value), low = Math.min(...values), high = Math.max(...values);
  const at = (value, i) => `${((i / (values.length - 1)) * 100).toFixed(1)} ${(36 - ((value - low) / (high - low || 1)) * 30).toFixed(1)}`;
  const line = values.map((value, i) => `${i ? "L" : "M"}${at(value, i)}`).join("");
  draw("path", { d: `${line}L100 40L0 40Z`, fill: `var(--c${color})`, "fill-opacity": 0.12 }, svg);
  draw("path", { d: line, fill: "none", stroke: `var(--c${color})`, "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }, svg);
  return svg;
}
