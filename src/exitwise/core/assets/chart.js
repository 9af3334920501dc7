"use strict";
// Elements and charts. Text is inserted as text nodes only, never as HTML. Colors come from the style sheet, so that a
// change of theme needs no redraw.

function element(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
const html = (tag, attributes, ...children) => element(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => element("http://www.w3.org/2000/svg", tag, attributes, children);
const byId = (id) => document.getElementById(id);

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step);
  return values;
}

// A range that contains all numbers with a margin; the margin does not extend it below zero or above `limit`.
function range(numbers, margin = 0.05, limit = Infinity) {
  const finite = numbers.filter(Number.isFinite);
  if (!finite.length) return [0, 1];
  const low = Math.min(...finite), high = Math.max(...finite);
  const extra = (high - low || Math.abs(high) || 1) * margin;
  return [low >= 0 ? Math.max(0, low - extra) : low - extra, Math.min(high + extra, Math.max(high, limit))];
}

// A chart that repaints itself when the width of its container changes. `paint(svg, width, height)` draws it; `height` is
// in pixels, or a function of the width.
function figure(label, height, paint, attributes) {
  const drawing = svg("svg", { role: "img", "aria-label": label, ...attributes });
  const container = html("div", { class: "figure" }, drawing);
  let width = 0;
  container.repaint = () => {
    if (!container.clientWidth) return;
    width = container.clientWidth;
    const tall = typeof height === "function" ? height(width) : height;
    drawing.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    drawing.setAttribute("height", tall);
    drawing.replaceChildren();
    paint(drawing, width, tall);
  };
  container.drawing = drawing;
  new ResizeObserver(() => container.clientWidth !== width && container.repaint()).observe(container);
  return container;
}

// Draw axes with ticks; return the scales and the group to draw in.
function axes(drawing, width, height, options) {
  const { x, y, xTitle, yTitle, title, xFormat = String, yFormat = String, xTicks, yTicks, grid = true } = options;
  const ys = yTicks || ticks(y[0], y[1], Math.max(2, height / 55));
  const longest = Math.max(1, ...ys.map((value) => yFormat(value).length));
  const left = options.left || 12 + 7 * longest, right = 14, top = title || yTitle ? 26 : 8, bottom = xTitle ? 40 : 22;
  const xs = xTicks || ticks(x[0], x[1], Math.max(2, (width - left - right) / 90));
  const sx = (value) => left + ((value - x[0]) / (x[1] - x[0] || 1)) * (width - left - right);
  const sy = (value) => height - bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (height - top - bottom);
  const base = height - bottom;
  if (title || yTitle) drawing.append(svg("text", { class: "title", x: 0, y: 13 }, title || yTitle));
  for (const value of ys) {
    const at = Math.round(sy(value)) + 0.5;
    if (grid) drawing.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: at, y2: at }));
    drawing.append(svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, yFormat(value)));
  }
  drawing.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: base + 0.5, y2: base + 0.5 }));
  for (const value of xs) {
    drawing.append(svg("line", { class: "axis", x1: sx(value), x2: sx(value), y1: base, y2: base + 4 }));
    drawing.append(svg("text", { x: sx(value), y: base + 17, "text-anchor": "middle" }, xFormat(value)));
  }
  if (xTitle) drawing.append(svg("text", { x: width - right, y: height - 5, "text-anchor": "end" }, xTitle));
  const plane = svg("g");
  drawing.append(plane);
  return { sx, sy, plane, left, right: width - right, top, base };
}

const path = (points, { sx, sy }) => points.map(([x, y], i) => `${i ? "L" : "M"}${sx(x).toFixed(1)} ${sy(y).toFixed(1)}`).join("");

function line(plot, points, kind) {
  plot.plane.append(svg("path", { class: `line ${kind}`, d: path(points, plot) }));
}

function band(plot, rows, kind) {
  if (rows.length < 2) return;
  const edge = [...rows.map(([x, low]) => [x, low]), ...rows.map(([x, , high]) => [x, high]).reverse()];
  plot.plane.append(svg("path", { class: `band ${kind}`, d: path(edge, plot) + "Z" }));
}

function dot(plot, x, y, kind, radius = 6) {
  plot.plane.append(svg("circle", { class: `dot ${kind}`, cx: plot.sx(x), cy: plot.sy(y), r: radius }));
}

// Draw a bar from x0 to x1 and from y0 to y1, in the units of the axes.
function bar(plot, x0, x1, y0, y1, kind) {
  const top = plot.sy(Math.max(y0, y1)), tall = Math.abs(plot.sy(y0) - plot.sy(y1));
  const wide = Math.max(0.5, plot.sx(x1) - plot.sx(x0));
  const rect = svg("rect", { class: `bar ${kind}`, x: plot.sx(x0), y: top, width: wide, height: tall });
  plot.plane.append(rect);
  return rect;
}

// Draw the outline of a histogram.
function outline(plot, counts, low, high) {
  const step = (high - low) / counts.length;
  const points = [[low, 0]];
  counts.forEach((n, i) => points.push([low + i * step, n], [low + (i + 1) * step, n]));
  plot.plane.append(svg("path", { class: "outline", d: path([...points, [high, 0]], plot) }));
}

const tip = byId("tip");
function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${event.clientY + box.height + 22 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16}px`;
}
const hideTip = () => { tip.hidden = true; };

// The target {x, y} in pixels that is nearest to the pointer, or null if none is within `radius` pixels.
function nearest(drawing, event, targets, radius) {
  const box = drawing.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let best = null, smallest = radius ** 2;
  for (const target of targets) {
    const distance = (target.x - x) ** 2 + (target.y - y) ** 2;
    if (distance < smallest) [best, smallest] = [target, distance];
  }
  return best;
}

// Show the text of the target under the pointer; `targets()` returns [{x, y, text}].
function hoverable(container, targets, radius = 40) {
  container.drawing.addEventListener("pointermove", (event) => {
    const target = nearest(container.drawing, event, targets(), radius);
    if (target) showTip(target.text, event); else hideTip();
  });
  container.drawing.addEventListener("pointerleave", hideTip);
}

// A legend of lines, bars and marks; each entry is [kind, text, shape].
function legend(...entries) {
  const shapes = {
    line: (kind) => svg("path", { class: `line ${kind}`, d: "M1 6H25" }),
    bar: (kind) => svg("rect", { class: `bar ${kind}`, x: 6, y: 0, width: 14, height: 12 }),
    dots: (kind) => svg("path", { class: `points ${kind}`, d: marks([[13, 6]], kind, 4) }),
    outline: () => svg("rect", { class: "outline", x: 6, y: 1, width: 14, height: 10 }),
  };
  const items = entries.map(([kind, text, shape]) => html("li", {}, svg("svg", { "aria-hidden": "true" }, shapes[shape || "line"](kind)), text));
  return html("ul", { class: "legend" }, items);
}

// Many marks as one path: discs for correct samples, crosses for wrong ones.
function marks(points, kind, size) {
  const r = size, d = size * 0.85;
  const mark = kind === "wrong"
    ? (x, y) => `M${(x - d).toFixed(1)} ${(y - d).toFixed(1)}l${2 * d} ${2 * d}m0 ${-2 * d}l${-2 * d} ${2 * d}`
    : (x, y) => `M${(x - r).toFixed(1)} ${y.toFixed(1)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
  return points.map(([x, y]) => mark(x, y)).join("");
}
