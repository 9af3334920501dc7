// The page: each section is drawn from the data below, and follows the budget where it depends on it.

const data = JSON.parse(byId("data").textContent);
const METRICS = {
  top1: { name: "Top-1 accuracy", short: "top-1", unit: " %", factor: 100, digits: 2, more: true },
  top5: { name: "Top-5 accuracy", short: "top-5", unit: " %", factor: 100, digits: 2, more: true },
  nlpd: { name: "NLPD (negative log predictive density)", short: "NLPD", unit: "", factor: 1, digits: 3, more: false },
  ece: { name: "ECE (expected calibration error)", short: "ECE", unit: "", factor: 1, digits: 3, more: false },
};
const SIDES = { vanilla: "plain", ours: "calibrated" };
const state = { unit: 0, step: 0, exit: 0, point: null, extras: new Set(), at: "taken" };
const followers = []; // of the budget
const explorer = () => data.explorers[state.unit];
const step = () => explorer().steps[state.step];
const sections = [];

// Numbers in words

const grouped = (value) => value.toLocaleString("en");
const metric = (name, value) => value === null ? "none" : (value * METRICS[name].factor).toFixed(METRICS[name].digits);
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
function signed(name, value) {
  const text = metric(name, value);
  return Number(text) > 0 ? `+${text}` : Number(text) === 0 ? metric(name, 0) : text.replace("-", "−");
}
const verdict = (name, value) => Number(metric(name, value)) === 0 ? "" : value > 0 === METRICS[name].more ? "better" : "worse";
const scaleOf = (unit, most) => unit !== "MACs" ? [1, unit] : most >= 2e9 ? [1e9, "billion MACs"] : most >= 2e5 ? [1e6, "million MACs"] : [1, "MACs"];
const short = (value) => String(Number(value.toPrecision(4)));
function amount(value, unit) {
  const [size, name] = scaleOf(unit, value >= 1e9 ? 2e9 : value >= 1e5 ? 1e6 : value);
  return `${short(value / size)} ${name}`;
}
const className = (label) => data.classes[label];
const named = (label) => html("bdi", {}, className(label));
const exitOf = (side, point) => explorer().exits[side][state.step].charCodeAt(point) - 48;

// Building blocks

function section(id, name, title, ...children) {
  const made = html("section", { id, "aria-labelledby": `${id}-title` }, html("h2", { id: `${id}-title` }, title), children);
  byId("main").append(made);
  byId("sections").append(html("li", {}, html("a", { href: `#${id}` }, name)));
  return made;
}
const text = (...words) => html("p", {}, words);
function table(caption, head, rows, attributes) {
  const cell = (tag) => (value) => value instanceof Element && /^T[DH]$/.test(value.tagName) ? value : html(tag, {}, value);
  const body = rows.map((row) => row instanceof Element ? row : html("tr", {}, row.map(cell("td"))));
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption, ...attributes },
    html("table", {}, html("caption", {}, caption), html("thead", {}, html("tr", {}, head.map(cell("th")))), html("tbody", {}, body)));
}
const td = (content, kind) => html("td", { class: kind }, content);
function choice(title, name, options, chosen, changed) {
  return html("fieldset", {}, html("legend", {}, title), options.map(([value, label]) =>
    html("label", {}, html("input", { type: "radio", name, value, checked: value === chosen, onchange: () => changed(value) }), label)));
}
function follow(update) {
  followers.push(update);
  update();
}

// What the budget buys

function headline() {
  const net = data.net, lead = html("p", { class: "lead", id: "lead", "aria-live": "polite" }), cards = html("div", { class: "cards", id: "cards" });
  const costs = data.explorers[0].costs, unit = data.explorers[0].unit;
  const many = costs.length > 1;
  section("headline", "At a glance", "What it is and what a budget buys",
    text(many ? `A network with ${costs.length} exits` : "A network with one exit", ` and ${grouped(net.classes)} classes. `,
      many ? `Stopping at its first exit costs ${amount(costs[0], unit)} per sample, at its last ${amount(costs.at(-1), unit)}. ` : `It costs ${amount(costs[0], unit)} per sample. `,
      `Its confidence decides where a sample leaves, calibrated by ${data.method}. `,
      many ? `If no sample left early, the plain network would be right on ${metric("top1", data.uncertainty.vanilla.at(-1).metrics.top1)} % of them.` : ""),
    lead, cards,
    data.guarantee ? html("p", { class: "note" }, `The run's own policy has a guarantee, those of this page have none. ${data.guarantee}`) : null,
    html("p", { class: "soft small" }, `Measured on ${grouped(net.samples)} test samples that nothing was fitted on. Intervals are ${percent(net.level, 0)} bootstrap intervals.`));
  const range2 = (name, [low, high]) => `${metric(name, low)} to ${metric(name, high)}`;
  const signed2 = (name, [low, high]) => `${signed(name, low)} to ${signed(name, high)}`;
  follow(() => {
    const { budget, vanilla, ours, change } = step(), unit = explorer().unit, costs = explorer().costs;
    const gain = ours.top1 - vanilla.top1, sure = change.top1[0] > 0 || change.top1[1] < 0;
    const points = (value) => `${(100 * Math.abs(value)).toFixed(1)} points`;
    lead.replaceChildren(
      "For ", html("strong", {}, amount(budget, unit)), ` per sample (${percent(budget / costs.at(-1), 0)} of the whole network), the calibrated network is right on `,
      html("strong", { class: "ours" }, `${metric("top1", ours.top1)} %`), " of the samples; plain, the same network on ",
      html("span", { class: "vanilla" }, `${metric("top1", vanilla.top1)} %`),
      `: ${signed("top1", gain)} points (${signed2("top1", change.top1)})${sure ? "" : ", which may be chance"}. Its confidence is on average `,
      html("strong", { class: "ours" }, points(ours.ece)), " off its accuracy, where it was ", html("span", { class: "vanilla" }, points(vanilla.ece)), " off.");
    const card = (name) => html("div", { class: "card" }, html("h3", { title: METRICS[name].name }, METRICS[name].short + METRICS[name].unit),
      html("div", { class: "number", id: `ours-${name}` }, metric(name, ours[name])),
      html("p", { class: "soft" }, range2(name, ours.intervals[name])),
      html("p", { class: "vanilla" }, "plain ", html("span", { id: `vanilla-${name}` }, metric(name, vanilla[name])), ` (${range2(name, vanilla.intervals[name])})`),
      html("p", { class: verdict(name, ours[name] - vanilla[name]) }, `change ${signed(name, ours[name] - vanilla[name])} (${signed2(name, change[name])})`));
    const [size, word] = scaleOf(unit, costs.at(-1)), cost = (value) => short(value / size);
    const most = (side) => html("span", { id: `${side === ours ? "ours" : "vanilla"}-cost` }, cost(side.cost));
    cards.replaceChildren(card("top1"), card("nlpd"), card("ece"), html("div", { class: "card" }, html("h3", {}, `mean cost, ${word}`),
      html("div", { class: "number" }, most(ours)), html("p", { class: "soft" }, ours.intervals.cost.map(cost).join(" to ")),
      html("p", { class: "vanilla" }, "plain ", most(vanilla), ` (${vanilla.intervals.cost.map(cost).join(" to ")})`),
      html("p", {}, `${percent(ours.cost / costs.at(-1), 0)} of the whole network`)));
  });
}

// The slider's own numbers

function extraCurves() {
  const all = [];
  const add = (group, curves) => curves.forEach((curve) => all.push({ group, ...curve, key: `${group}: ${curve.name}` }));
  for (const other of data.others) if (other.unit === explorer().unit) add(other.name, other.curves);
  if (explorer().unit === "MACs") {
    add("Other methods, thresholds by the paper's rule", data.curves);
    add("Published in the paper (other networks, trained far longer)", data.published.filter((curve) => !curve.model.startsWith("vanilla predictions")));
  }
  return all;
}

function explore() {
  const options = html("div", {}), shown = html("div", {});
  let extras = [];
  const places = Object.keys(METRICS).map((name) => {
    const { name: title, factor, digits } = METRICS[name];
    let targets = [];
    const place = figure(`${title} against mean cost, calibrated and plain`, 270, (drawing, width, height) => {
      const { steps, unit, costs } = explorer(), [size, word] = scaleOf(unit, costs.at(-1));
      const series = Object.keys(SIDES).map((side) => ({
        kind: side, name: SIDES[side],
        points: steps.map((each) => [each[side].cost, each[side][name], each[side].intervals[name]]).sort((a, b) => a[0] - b[0]),
      }));
      const more = extras.filter((curve) => state.extras.has(curve.key) && curve.metrics[name])
        .map((curve) => ({ kind: curve.kind, name: curve.key, points: curve.metrics[name] }));
      const all = [...more, ...series].flatMap((each) => each.points);
      const plot = axes(drawing, width, height, {
        x: range(all.map((p) => p[0] / size), 0.02),
        y: range([...all.map((p) => p[1] * factor), ...series.flatMap((each) => each.points.flatMap((p) => p[2].map((v) => v * factor)))], 0.05, factor === 100 ? 100 : Infinity),
        title: title + (factor === 100 ? ", %" : ""), xTitle: `mean cost per sample, ${word}`, xFormat: short, yFormat: short,
      });
      const scaled = ([x, y]) => [x / size, y * factor];
      targets = [];
      for (const { kind, name: called, points } of [...more, ...series]) {
        if (points[0][2]) band(plot, points.map(([x, , [low, high]]) => [x / size, low * factor, high * factor]), kind);
        if (points.length > 1) line(plot, points.map(scaled), kind);
        else dot(plot, ...scaled(points[0]), kind, 4);
        for (const point of points) {
          const [x, y] = scaled(point);
          targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${called}\n${METRICS[name].short} ${y.toFixed(digits)}${METRICS[name].unit}\nmean cost ${amount(point[0], unit)}` });
        }
      }
      for (const side of Object.keys(SIDES)) dot(plot, ...scaled([step()[side].cost, step()[side][name]]), side, 7);
    });
    hoverable(place, () => targets);
    return place;
  });
  const exits = html("div", {}), confusion = html("div", {});
  const shares = figure("Share of samples that leave at each exit", 200, (drawing, width, height) => {
    const number = explorer().costs.length, most = Math.max(...Object.keys(SIDES).flatMap((side) => step()[side].exit_shares));
    const plot = axes(drawing, width, height, {
      x: [-0.5, number - 0.5], y: [0, Math.max(10, 100 * most * 1.12)], title: "Share of samples per exit, %", xTitle: "exit",
      xTicks: [...Array(number).keys()], xFormat: (k) => String(k + 1), yFormat: short,
    });
    Object.keys(SIDES).forEach((side, j) => step()[side].exit_shares.forEach((share, k) => {
      bar(plot, k - 0.36 + 0.37 * j, k - 0.01 + 0.37 * j, 0, 100 * share, side);
      const wide = plot.sx(0.35) - plot.sx(0);
      if (wide > 30) plot.plane.append(svg("text", { x: plot.sx(k - 0.185 + 0.37 * j), y: plot.sy(100 * share) - 4, "text-anchor": "middle" }, (100 * share).toFixed(wide > 42 ? 1 : 0)));
    }));
  });
  section("budgets", "Budgets", "Budget explorer",
    text("Move the budget at the bottom of the page: thresholds are those that the library fits to it on validation samples, everything else is measured on test samples. Where a curve ends before the others, going deeper would not help, and thresholds spend less than the budget. Costs are the plain network's; what calibration adds is below, under Cost."),
    legend(["ours", "calibrated"], ["vanilla", "plain"]), html("div", { class: "grid2" }, places), options, shown,
    html("h3", {}, "Who leaves where, and who leaves early and wrong"), html("div", { class: "grid2" }, shares, confusion), exits);

  function renew() {
    extras = extraCurves();
    const on = extras.filter((curve) => state.extras.has(curve.key));
    on.forEach((curve, i) => { curve.kind = `extra${i % 5}${i >= 5 ? " dashed" : ""}`; });
    shown.replaceChildren(on.length ? legend(...on.map((curve) => [curve.kind, curve.key])) : "");
    places.forEach((place) => place.repaint());
  }
  function list() {
    const groups = [...new Set(extraCurves().map((curve) => curve.group))];
    options.replaceChildren(html("details", {}, html("summary", {}, "More curves: other methods, other runs, the paper's"), groups.map((group) =>
      html("fieldset", {}, html("legend", {}, group), extraCurves().filter((curve) => curve.group === group).map((curve) =>
        html("label", {}, html("input", {
          type: "checkbox", checked: state.extras.has(curve.key), "data-curve": curve.key,
          onchange: (event) => { state.extras[event.target.checked ? "add" : "delete"](curve.key); renew(); },
        }), curve.name)))),
      groups.length ? null : text("There are none for this network in this unit.")));
  }
  let unit = null;
  follow(() => {
    if (unit !== state.unit) { unit = state.unit; list(); }
    renew();
    shares.repaint();
    const found = step(), number = explorer().costs.length, samples = data.net.samples;
    const threshold = (value) => value === "inf" ? "nobody" : value === "-inf" ? "everyone" : value.toFixed(4);
    const rows = [...Array(number).keys()].map((k) => [
      String(k + 1), ...Object.keys(SIDES).flatMap((side) => [
        td(threshold(found[side].thresholds[k]), side), td(percent(found[side].exit_shares[k]), side), td(grouped(found[side].leaving[k].wrong), side),
      ])]);
    const head = ["exit", ...Object.values(SIDES).flatMap((name) => [`${name}: threshold`, "leave", "of these wrong"])];
    exits.replaceChildren(table("Thresholds on confidence, and who leaves", head, rows, { id: "exits" }));
    confusion.replaceChildren(...Object.entries(SIDES).map(([side, name]) => {
      const sum = (rows, what) => rows.reduce((total, row) => total + row[what], 0);
      const early = found[side].leaving.slice(0, -1), last = found[side].leaving.slice(-1);
      const count = (rows, what) => `${grouped(sum(rows, what))} (${percent(sum(rows, what) / samples)})`;
      return html("div", {}, table(`${name} network`, ["", "right", "wrong", "avoidable"], [
        ["left early", count(early, "right"), html("td", {}, html("strong", { id: `early-wrong-${side}` }, count(early, "wrong"))), count(early, "avoidable")],
        ["went to the end", count(last, "right"), count(last, "wrong"), ""]]));
    }), text(html("strong", {}, grouped(found.saved.samples)), " samples are saved: plain, they leave early and wrong; calibrated, they go on and come out right. ",
      html("strong", {}, grouped(found.lost.samples)), " are lost the other way round. Avoidable: left early and wrong, while the last exit would have been right."));
  });
}

// Uncertainty against error

function uncertainty() {
  const most = Math.log(Math.max(2, data.net.classes)), total = data.net.samples, number = data.net.exits;
  const { label } = data.points;
  const at = (side, what, point) => data.points[side][what][state.exit][point] / 1000;
  const right = (side, point) => data.points[side].predicted[state.exit][point] === label[point];
  const xAxis = { left: 40, x: [0, most], xTitle: "uncertainty: entropy of the predictive, nats", xFormat: short, yFormat: short };
  const columns = Object.keys(SIDES).reverse().map((side) => {
    const of = () => data.uncertainty[side][state.exit], both = (what) => Object.keys(SIDES).flatMap((each) => data.uncertainty[each][state.exit][what]);
    const name = `${SIDES[side]} network`;
    const step = (counts) => most / counts.length;
    const erring = figure(`${name}: entropy of samples with error above one half`, 130, (drawing, width, height) => {
      const counts = of().erring;
      const plot = axes(drawing, width, height, { ...xAxis, xTitle: null, y: [0, Math.max(1, ...both("erring")) * 1.05], title: `Error > .5: ${percent(of().erring_share, 2)} of samples, by entropy`, yTicks: [] });
      counts.forEach((n, i) => bar(plot, i * step(counts), (i + 1) * step(counts), 0, n, side));
    });
    let places = [];
    const scatter = figure(`${name}: uncertainty against error. Arrow keys walk through the points, Enter shows one.`, (width) => Math.min(400, width * 0.85), (drawing, width, height) => {
      const plot = axes(drawing, width, height, { ...xAxis, y: [0, 1.1], yTicks: ticks(0, 1, 5), title: "Error: 1 − p(true label)", grid: false });
      const cells = of().density, tall = cells[0].length, densest = Math.max(...cells.flat());
      cells.forEach((column, i) => column.forEach((n, j) => {
        if (n) bar(plot, (i * most) / cells.length, ((i + 1) * most) / cells.length, j / tall, (j + 1) / tall, "cell").setAttribute("opacity", (0.05 + 0.4 * Math.sqrt(n / densest)).toFixed(3));
      }));
      for (const [a, b] of [[[0, 0.5], [most, 0.5]], [[most / 2, 0.5], [most / 2, 1.1]]]) plot.plane.append(svg("path", { class: "half", d: path([a, b], plot) }));
      places = label.map((_, i) => ({ i, x: plot.sx(Math.min(most, at(side, "entropy", i))), y: plot.sy(at(side, "error", i)) }));
      for (const kind of ["correct", "wrong"]) {
        const chosen = places.filter(({ i }) => right(side, i) === (kind === "correct"));
        plot.plane.append(svg("path", { class: `points ${kind}`, d: marks(chosen.map(({ x, y }) => [x, y]), kind, 2.4) }));
      }
      const word = (name, x, y, anchor) => plot.plane.append(svg("text", { class: "kind", x: plot.sx(x), y: plot.sy(y), "text-anchor": anchor }, `${name} ${percent(of().kinds[name] / total)}`));
      word("tricky", most * 0.01, 1.04, "start"); word("hard", most, 1.04, "end"); word("easy", most * 0.49, 0.04, "end");
      if (state.point !== null) plot.plane.append(svg("circle", { class: "ring", cx: places[state.point].x, cy: places[state.point].y, r: 8 }));
    }, { class: "pickable", tabindex: 0, "data-side": side });
    const words = ({ i }) => `${className(label[i])}\nexit ${state.exit + 1} says ${className(data.points[side].predicted[state.exit][i])}, ${percent(at(side, "confidence", i), 0)} sure\nentropy ${at(side, "entropy", i).toFixed(2)}, error ${at(side, "error", i).toFixed(2)}`;
    hoverable(scatter, () => places.map((place) => ({ ...place, get text() { return words(place); } })), 14);
    scatter.drawing.addEventListener("click", (event) => {
      const found = nearest(scatter.drawing, event, places, 16);
      if (found) pick(found.i);
    });
    scatter.drawing.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Enter" && state.point !== null) return pick(state.point);
      if (!way) return;
      event.preventDefault();
      const order = places.map(({ i }) => i).sort((a, b) => at(side, "entropy", a) - at(side, "entropy", b));
      const now = state.point === null ? (way > 0 ? -1 : 0) : order.indexOf(state.point);
      pick(order[(now + way + order.length) % order.length]);
    });
    const all = figure(`${name}: entropy of all samples, correct and misclassified`, 150, (drawing, width, height) => {
      const { correct, wrong } = of(), sums = Object.keys(SIDES).flatMap((each) => data.uncertainty[each][state.exit].correct.map((n, i) => n + data.uncertainty[each][state.exit].wrong[i]));
      const plot = axes(drawing, width, height, { ...xAxis, y: [0, Math.max(1, ...sums) * 1.05], title: "All samples, by entropy", yTicks: [] });
      correct.forEach((n, i) => {
        const x = i * step(correct), next = (i + 1) * step(correct);
        bar(plot, x, next, 0, n, "correct");
        bar(plot, x, next, n, n + wrong[i], "wrong");
      });
    });
    return { parts: [erring, scatter, all], node: html("div", {}, html("h3", { class: side }, name), erring, scatter, all) };
  });
  const repaint = () => columns.forEach(({ parts }) => parts.forEach((part) => part.repaint()));
  state.exit = Math.max(0, number - 2);
  const exits = [...Array(number).keys()].map((k) => [k, `exit ${k + 1}`]);
  section("uncertainty", "Uncertainty", "Uncertainty against error",
    text("A network that knows what it does not know is uncertain where it errs. Tricky samples are wrong with little doubt: they leave early, and nobody notices. Calibration moves them to the right, where they are hard, and go on to the next exit. Easy ones are right and certain."),
    choice("At", "exit", exits, state.exit, (k) => { state.exit = k; repaint(); }),
    legend(["correct", "correct", "dots"], ["wrong", "misclassified", "dots"]),
    html("div", { class: "grid2" }, columns.map(({ node }) => node)),
    html("p", { class: "soft small" }, label.length < total ? `Histograms, shares and density are of all ${grouped(total)} test samples; ${grouped(label.length)} of them, drawn at random, are shown as points. ` : `All ${grouped(total)} test samples are shown. `, "Choose a point to see what every exit says of it."));
  state.repaintPoints = () => columns.forEach(({ parts }) => parts[1].repaint());
}

// One sample

function picture(point) {
  if (!data.pictures) return null;
  const { columns, rows } = data.pictures, x = point % columns, y = Math.floor(point / columns);
  const at = (k, n) => (n > 1 ? (100 * k) / (n - 1) : 0);
  return html("span", { class: "picture", role: "img", "aria-label": `picture: ${className(data.points.label[point])}` },
    html("i", { style: `background-size:${100 * columns}% ${100 * rows}%;background-position:${at(x, columns)}% ${at(y, rows)}%` }));
}

function pick(point) {
  state.point = point;
  state.repaintPoints();
  showDetail();
}

function showDetail() {
  const point = state.point, { label, index } = data.points, place = byId("detail");
  if (point === null) { place.hidden = true; return; }
  const rows = [...Array(data.net.exits).keys()].map((k) => [String(k + 1), ...Object.keys(SIDES).map((side) => {
    const said = data.points[side], right = said.predicted[k][point] === label[point];
    return html("td", { class: right ? "better" : "worse" }, right ? "✓ " : "✗ ", named(said.predicted[k][point]), html("br"),
      `${(said.confidence[k][point] / 10).toFixed(0)} % sure, entropy ${(said.entropy[k][point] / 1000).toFixed(2)}`, exitOf(side, point) === k ? html("strong", {}, " ← leaves here") : "");
  })]);
  place.replaceChildren(html("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => { state.point = null; showDetail(); state.repaintPoints(); } }, "×"),
    picture(point) || "", html("h3", {}, named(label[point])), html("p", { class: "small soft" }, `true label; test sample ${grouped(index[point])}. At this budget it leaves at exit ${exitOf("ours", point) + 1} calibrated, at exit ${exitOf("vanilla", point) + 1} plain.`),
    table("What each exit says", ["exit", ...Object.values(SIDES)], rows));
  place.hidden = false;
}

// Examples

function galleries() {
  const groups = {
    easy: ["Easy", "right, and certain of it"], hard: ["Hard", "wrong or nearly so, and in doubt"], tricky: ["Tricky", "wrong, and certain all the same: some are mislabelled"],
    saved: ["Saved", "plain, they leave early and wrong; calibrated, they go on and come out right"], lost: ["Lost", "the other way round"],
  };
  const lists = Object.keys(groups).map((kind) => html("ul", { class: "tiles", id: `tiles-${kind}` }));
  const counts = Object.keys(groups).map(() => html("span", { class: "soft" }));
  const last = data.net.exits - 1;
  section("examples", "Examples", "Examples",
    text("Easy, hard and tricky as the last exit of the calibrated network sees them; saved and lost at the budget chosen."),
    data.pictures_note ? html("p", { class: "note" }, data.pictures_note) : null,
    Object.values(groups).map(([title, meaning], i) => [html("h3", {}, title, " ", html("span", { class: "soft" }, `${meaning} `), counts[i]), lists[i]]));
  const tile = (kind, point) => {
    const ours = data.points.ours, both = kind === "saved" || kind === "lost";
    const exits = { ours: both ? exitOf("ours", point) : last, vanilla: exitOf("vanilla", point) };
    const entropy = (ours.entropy[exits.ours][point] / 1000).toFixed(2), sure = percent(ours.confidence[last][point] / 1000, 0);
    const said = both
      ? [html("span", { class: "vanilla" }, "plain: ", named(data.points.vanilla.predicted[exits.vanilla][point])), html("span", { class: "ours" }, "calibrated: ", named(ours.predicted[exits.ours][point]))]
      : [html("span", {}, ours.predicted[last][point] === data.points.label[point] ? "right" : ["taken for ", named(ours.predicted[last][point])], `, ${sure} sure`)];
    const badge = both ? `exit ${exits.vanilla + 1} → ${exits.ours + 1}` : `exit ${exitOf("ours", point) + 1}`;
    return html("li", {}, html("button", { type: "button", class: "tile", onclick: () => pick(point) }, picture(point), html("strong", {}, named(data.points.label[point])), said,
      data.pictures ? null : html("span", { class: "soft" }, `entropy ${entropy}`), html("span", { class: "badge" }, badge)));
  };
  follow(() => Object.keys(groups).forEach((kind, i) => {
    const moved = step()[kind], points = moved ? moved.points : data.galleries[kind];
    counts[i].textContent = moved ? `(${grouped(moved.samples)} of ${grouped(data.net.samples)} samples)` : "";
    lists[i].replaceChildren(...(points.length ? points.map((point) => tile(kind, point)) : [html("li", { class: "soft" }, "none among the points shown")]));
  }));
}

// Calibration

function calibration() {
  const of = (side) => state.at === "taken" ? step()[side] : { ...data.uncertainty[side][state.at].metrics, reliability: data.uncertainty[side][state.at].reliability };
  const titles = Object.fromEntries(Object.keys(SIDES).map((side) => [side, html("p", { class: side, id: `calibration-${side}` })]));
  const columns = Object.entries(SIDES).map(([side, name]) => {
    let targets = [];
    const diagram = figure(`${name} network: accuracy against confidence`, (width) => Math.min(320, width * 0.8), (drawing, width, height) => {
      const { count, confidence, accuracy } = of(side).reliability;
      const plot = axes(drawing, width, height, { x: [0, 1], y: [0, 1], title: "Accuracy in each bin", xTitle: "confidence", xFormat: short, yFormat: short, xTicks: ticks(0, 1, 5), yTicks: ticks(0, 1, 5) });
      targets = [];
      count.forEach((n, i) => {
        if (!n) return;
        const x = i / count.length, next = (i + 1) / count.length;
        bar(plot, x + 0.006, next - 0.006, 0, accuracy[i], side).classList.add("faint");
        bar(plot, x + 0.006, next - 0.006, accuracy[i], confidence[i], "gap");
        targets.push({ x: plot.sx((x + next) / 2), y: plot.sy(accuracy[i]), text: `${grouped(n)} samples\nconfidence ${percent(confidence[i])}\naccuracy ${percent(accuracy[i])}` });
      });
      plot.plane.append(svg("path", { class: "half", d: path([[0, 0], [1, 1]], plot) }));
    });
    hoverable(diagram, () => targets, 60);
    const histogram = figure(`${name} network: how often each confidence occurs`, 130, (drawing, width, height) => {
      const { count } = of(side).reliability, most = Math.max(...Object.keys(SIDES).flatMap((each) => of(each).reliability.count)) / data.net.samples;
      const plot = axes(drawing, width, height, { x: [0, 1], y: [0, 105 * most], title: "Samples, %", xTitle: "confidence", xFormat: short, yFormat: short, xTicks: ticks(0, 1, 5), yTicks: ticks(0, 100 * most, 2) });
      count.forEach((n, i) => bar(plot, i / count.length + 0.006, (i + 1) / count.length - 0.006, 0, (100 * n) / data.net.samples, side));
    });
    return { parts: [diagram, histogram], node: html("div", {}, html("h3", {}, side === "ours" ? "After: calibrated" : "Before: plain"), titles[side], diagram, histogram) };
  });
  const repaint = () => {
    for (const side of Object.keys(SIDES)) {
      const found = of(side);
      titles[side].textContent = `ECE ${metric("ece", found.ece)}; AUROC of telling right from wrong ${found.auroc === null ? "none, as all are of one kind" : found.auroc.toFixed(3)}`;
    }
    columns.forEach(({ parts }) => parts.forEach((part) => part.repaint()));
  };
  const options = [["taken", "the exits taken at this budget"], ...data.uncertainty.ours.map((_, k) => [k, `exit ${k + 1}`])];
  const auroc = (value) => value === null ? "none" : value.toFixed(3);
  const rows = data.uncertainty.ours.map((ours, k) => {
    const plain = data.uncertainty.vanilla[k].metrics;
    return [String(k + 1), ...["top1", "nlpd", "ece"].flatMap((name) => [td(metric(name, plain[name]), "vanilla"), td(metric(name, ours.metrics[name]), "ours")]), td(auroc(plain.auroc), "vanilla"), td(auroc(ours.metrics.auroc), "ours")];
  });
  section("calibration", "Calibration", "Calibration",
    text("Of the samples that a calibrated network is 80 % sure of, it has 80 % right: bars end at the diagonal. The tinted part is what is missing or too much; weighted by how often each confidence occurs, it is the ECE."),
    choice("At", "reliability", options, "taken", (value) => { state.at = value; repaint(); }),
    html("div", { class: "grid2" }, columns.map(({ node }) => node)),
    table("Every exit, if all samples stopped there", ["exit", "top-1 %, plain", "calibrated", "NLPD, plain", "calibrated", "ECE, plain", "calibrated", "AUROC, plain", "calibrated"], rows));
  follow(repaint);
}

// Tables

function sortable(found) {
  const published = found.rows.some((row) => row.published);
  const columns = [{ title: "method", value: (row) => row.method }];
  for (const name of Object.keys(METRICS)) {
    const { short: title, factor } = METRICS[name], unit = factor === 100 ? " %" : "";
    columns.push({ title: title + unit, value: (row) => row.metrics[name], cell: (row) => metric(name, row.metrics[name]) });
    columns.push({ title: "±", label: `${title}, change`, value: (row) => row.change[name], cell: (row, i) => i ? td(signed(name, row.change[name]), verdict(name, row.change[name])) : "" });
    if (!published) continue;
    columns.push({ title: "paper", label: `${title}, published`, kind: "published", value: (row) => row.published?.[name], cell: (row) => row.published ? metric(name, row.published[name]) : "" });
    columns.push({ title: "±", label: `${title}, published change`, kind: "published", value: (row) => row.published_change?.[name],
      cell: (row, i) => i && row.published_change ? td(signed(name, row.published_change[name]), `published ${verdict(name, row.published_change[name])}`) : "" });
  }
  const body = html("tbody", {}), order = { column: null, down: false };
  const heads = columns.map((column, j) => html("th", { class: column.kind, scope: "col" },
    html("button", { type: "button", "aria-label": `Sort by ${column.label || column.title}`, onclick: () => { order.down = order.column === j ? !order.down : j > 0; order.column = j; fill(); } }, column.title)));
  function fill() {
    const rows = found.rows.map((row, i) => ({ row, i }));
    if (order.column !== null) {
      const value = ({ row }) => columns[order.column].value(row);
      const compare = (a, b) => typeof a === "string" ? a.localeCompare(b) : (a ?? -Infinity) - (b ?? -Infinity);
      rows.sort((a, b) => compare(value(a), value(b)) * (order.down ? -1 : 1) || a.i - b.i);
    }
    heads.forEach((head, j) => order.column === j ? head.setAttribute("aria-sort", order.down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    body.replaceChildren(...rows.map(({ row, i }) => html("tr", { class: row.method === data.method || row.method === "Our model" ? "strong" : null }, columns.map((column, j) => {
      const content = column.cell ? column.cell(row, i) : column.value(row);
      return content instanceof Element ? content : html(j ? "td" : "th", { class: column.kind, scope: j ? null : "row" }, content);
    }))));
  }
  fill();
  const [low, high] = found.range.map((value) => amount(value, found.unit));
  return [html("h3", {}, found.title), html("p", { class: "soft small" }, found.range[0] ? `Means over budgets from ${low} to ${high}; ± is the change against vanilla.` : `One exit, at ${high}.`,
    published ? " Paper: what was published for this architecture, trained far longer." : ""),
    html("div", { class: "buttons" }, copier("Copy as CSV", found.csv), copier("Copy as LaTeX", found.latex)),
    html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": found.title, id: `table-${found.name}` },
      html("table", { class: "dense" }, html("thead", {}, html("tr", {}, heads)), body))];
}

function copier(title, content) {
  return html("button", {
    type: "button", onclick: async (event) => {
      const button = event.currentTarget;
      const area = html("textarea", {}, content); // works in a file that was opened by a double click, too
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      button.focus();
      button.textContent = done ? "Copied" : "Could not copy";
      setTimeout(() => { button.textContent = title; }, 1500);
    },
  }, title);
}

function tables() {
  let withPaper = false;
  const kinds = ["vanilla", "middle", "ours"];
  const paper = { vanilla: "vanilla", middle: "vanilla predictions, our decisions", ours: "ours" };
  const places = Object.keys(METRICS).map((name) => {
    const { factor, digits } = METRICS[name];
    let targets = [];
    const place = figure(`Decision experiment: ${METRICS[name].name} against cost`, 220, (drawing, width, height) => {
      const own = data.decisions.map((curve, i) => ({ kind: kinds[i], name: curve.name, points: curve.metrics[name] }));
      const theirs = withPaper ? kinds.flatMap((kind) => data.published.filter((curve) => curve.own && curve.model === paper[kind] && curve.metrics[name]).map((curve) => ({ kind: `${kind} dashed`, name: `published: ${curve.name}`, points: curve.metrics[name] }))) : [];
      const all = [...theirs, ...own].map((each) => ({ ...each, points: each.points.map(([x, y]) => [x / size, y * factor]) }));
      const plot = axes(drawing, width, height, { x: range(all.flatMap((e) => e.points.map((p) => p[0])), 0.02), y: range(all.flatMap((e) => e.points.map((p) => p[1])), 0.05, factor === 100 ? 100 : Infinity), title: METRICS[name].name + (factor === 100 ? ", %" : ""), xTitle: `mean cost per sample, ${word}`, xFormat: short, yFormat: short });
      targets = [];
      for (const { kind, name: called, points } of all) {
        if (points.length > 1) line(plot, points, kind); else dot(plot, ...points[0], kind, 4);
        points.forEach(([x, y]) => targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${called}\n${METRICS[name].short} ${y.toFixed(digits)}${METRICS[name].unit}\nmean cost ${short(x)} ${word}` }));
      }
    });
    hoverable(place, () => targets);
    return place;
  });
  const unit = data.tables[0].unit, [size, word] = scaleOf(unit, data.decisions[0].metrics.top1.at(-1)[0]);
  const has = data.published.some((curve) => curve.own);
  section("tables", "Tables", "The paper's tables", sortable(data.tables[0]), sortable(data.tables[1]),
    text("Who decides when to stop: the middle curve takes the plain network's answers at the exits that the calibrated one chooses."),
    legend(["vanilla", "plain"], ["middle", "plain answers, calibrated decisions"], ["ours", "calibrated"]),
    has ? html("fieldset", {}, html("label", {}, html("input", { type: "checkbox", id: "decisions-published", onchange: (event) => { withPaper = event.target.checked; places.forEach((place) => place.repaint()); } }), "with the paper's curves (dotted)")) : null,
    html("div", { class: "grid2" }, places));
}

// What Laplace costs

function costs() {
  if (!data.laplace_costs.length) return;
  const KINDS = { vanilla: "vanilla", ours: "efficient", naive: "naive" };
  let chosen = data.laplace_costs[0];
  const bars = (title, value, label) => {
    let targets = [];
    const place = figure(title, 240, (drawing, width, height) => {
      const number = chosen.vanilla.length, [size, word] = scaleOf("MACs", Math.max(...chosen.naive));
      const numbers = Object.values(KINDS).flatMap((kind) => chosen[kind].map((_, k) => value(kind, k, size)));
      const plot = axes(drawing, width, height, { x: [-0.5, number - 0.5], y: [0, Math.max(...numbers) * 1.08 || 1], title: label(word), xTitle: "exit", xTicks: [...Array(number).keys()], xFormat: (k) => String(k + 1), yFormat: short });
      targets = [];
      Object.entries(KINDS).forEach(([kind, name], j) => chosen[name].forEach((cost, k) => {
        const y = value(name, k, size);
        bar(plot, k - 0.39 + 0.26 * j, k - 0.15 + 0.26 * j, 0, y, kind);
        targets.push({ x: plot.sx(k - 0.27 + 0.26 * j), y: plot.sy(y), text: `exit ${k + 1}, ${name}\n${amount(cost, "MACs")}\n${(cost / chosen.vanilla[k]).toFixed(3)} times vanilla` });
      }));
    });
    hoverable(place, () => targets, 60);
    return place;
  };
  const places = [bars("Cost of stopping at each exit", (kind, k, size) => chosen[kind][k] / size, (word) => `Cost up to each exit, ${word}`), bars("Cost beyond the plain network's", (kind, k) => 100 * (chosen[kind][k] / chosen.vanilla[k] - 1), () => "Beyond vanilla, %")];
  const numbers = html("div", {}), note = html("p", { class: "soft small" });
  const select = html("select", { id: "cost-net", onchange: (event) => { chosen = data.laplace_costs[event.target.selectedIndex]; renew(); } }, data.laplace_costs.map((net) => html("option", {}, net.own ? net.name : `the paper's ${net.name}`)));
  function renew() {
    places.forEach((place) => place.repaint());
    numbers.replaceChildren(table("Multiply-adds up to each exit", ["exit", "vanilla", "efficient Laplace", "times vanilla", "naive Laplace", "times vanilla"],
      chosen.vanilla.map((cost, k) => [String(k + 1), amount(cost, "MACs"), amount(chosen.efficient[k], "MACs"), (chosen.efficient[k] / cost).toFixed(3), amount(chosen.naive[k], "MACs"), (chosen.naive[k] / cost).toFixed(3)])));
    note.textContent = chosen.own ? `Each way of predicting pays at every exit on the way. Multiply-adds are the paper's FLOPs; ${chosen.draws} draws.` : "As published: the paper's figure multiplies the current exit's cost by the number of exits passed.";
  }
  section("cost", "Cost", "What Laplace costs", text("Drawing from the predictive needs no weights to be drawn: what depends on the sample is one number, so that the efficient way adds little."),
    html("p", {}, html("label", {}, "Network ", select)), legend(["vanilla", "vanilla", "bar"], ["ours", "efficient", "bar"], ["naive", "naive", "bar"]), html("div", { class: "grid2" }, places), numbers, note);
  renew();
}

// Training

function training() {
  const found = data.training;
  if (!found) return;
  const { epochs } = found, last = epochs.at(-1);
  const words = last ? `${epochs.length}${found.of ? ` of ${found.of}` : ""} epochs. ` : "Not one epoch is done yet. ";
  const left = last && found.of > epochs.length ? `About ${Math.ceil(((found.of - epochs.length) * epochs.reduce((sum, row) => sum + row.seconds, 0)) / epochs.length / 60)} minutes to go. ` : "";
  const kept = () => {
    if (!found.kept) return `The network that is kept is that of epoch ${found.best}.`;
    const heads = found.kept.map((epoch, k) => `exit ${k + 1} ${epoch ? `of epoch ${epoch}` : "as it was"}`);
    return `Each head is kept from its own best epoch: ${heads.join(", ")}.`;
  };
  const lines = (title, series, format) => {
    let targets = [];
    const place = figure(title, 260, (drawing, width, height) => {
      const plot = axes(drawing, width, height, { x: [1, Math.max(2, found.of || epochs.length)], y: range(series.flatMap(({ values }) => values)), title, xTitle: "epoch", xFormat: short, yFormat: short, xTicks: ticks(0, Math.max(2, found.of || epochs.length), 6).filter((n) => n >= 1 && Number.isInteger(n)) });
      targets = [];
      for (const { kind, name, values } of series) {
        const points = values.map((value, i) => [epochs[i].epoch, value]);
        if (points.length > 1) line(plot, points, kind);
        points.forEach(([x, y]) => { targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${name}, epoch ${x}\n${format(y)}` }); });
        dot(plot, ...points.at(-1), kind, 4);
      }
    });
    hoverable(place, () => targets);
    return place;
  };
  const exits = last ? last.val_top1.map((_, k) => ({ kind: `extra${k % 5}${k >= 5 ? " dashed" : ""}`, name: `exit ${k + 1}`, values: epochs.map((row) => 100 * row.val_top1[k]) })) : [];
  section("training", "Training", "Training", html("p", { id: "epochs" }, words, left, last ? `${kept()} ` : "", data.live ? "This page loads itself again while the training goes on." : ""),
    last ? html("div", { class: "grid2" },
      html("div", {}, legend(["ours", "training"], ["vanilla", "validation"]), lines("Loss, summed over the exits", [{ kind: "ours", name: "training", values: epochs.map((row) => row.train_loss) }, { kind: "vanilla", name: "validation", values: epochs.map((row) => row.val_loss) }], (y) => y.toFixed(4))),
      html("div", {}, legend(...exits.map(({ kind, name }) => [kind, name])), lines("Validation top-1, %", exits, (y) => `${y.toFixed(2)} %`))) : null);
}

function made() {
  section("made", "Making", "How it was made", html("dl", {}, data.made.map(([name, value]) => [html("dt", {}, name), html("dd", {}, ["command", "to make it again"].includes(name) ? html("code", {}, value) : value)])));
}

// The page as a whole

function budget() {
  const slider = byId("budget"), unit = byId("unit");
  const renew = () => {
    const { budget, ours, vanilla } = step(), name = explorer().unit;
    const words = `${amount(budget, name)} (${percent(budget / explorer().costs.at(-1), 0)})`;
    slider.max = explorer().steps.length - 1;
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", words);
    byId("amount").textContent = words;
    byId("short").textContent = `top-1 ${metric("top1", ours.top1)} %, plain ${metric("top1", vanilla.top1)} %`;
  };
  slider.addEventListener("input", () => { state.step = Number(slider.value); followers.forEach((update) => update()); });
  unit.append(...data.explorers.map((each) => html("option", {}, each.unit)));
  unit.hidden = data.explorers.length < 2;
  unit.addEventListener("change", () => {
    const share = step().budget / explorer().costs.at(-1);
    state.unit = unit.selectedIndex;
    const gap = (each) => Math.abs(each.budget / explorer().costs.at(-1) - share);
    state.step = explorer().steps.reduce((best, each, i, all) => gap(each) < gap(all[best]) ? i : best, 0);
    followers.forEach((update) => update());
  });
  byId("bar").hidden = false;
  follow(renew);
  follow(showDetail);
}

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
    try { localStorage.setItem("exitwise-theme", name); } catch { /* a browser that forgets */ }
  });
  system.addEventListener("change", () => remembered() || set(system.matches ? "dark" : "light"));
  set(remembered() || (system.matches ? "dark" : "light"));
}

theme();
byId("title").textContent = `${data.net.name} on ${data.net.data}`;
byId("run").textContent = `exitwise report of the run ${data.net.run}`;
if (data.pictures && data.pictures.side < 24) document.documentElement.dataset.pixels = "large";
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.point !== null) { state.point = null; showDetail(); state.repaintPoints(); } });
const parts = data.explorers ? [headline, explore, uncertainty, galleries, calibration, tables, costs, training, made] : [training, made];
if (data.explorers) {
  state.step = data.explorers[0].chosen;
  parts.splice(2, 0, budget);
}
// The first picture at once, the rest as soon as the browser has drawn it.
(function next() {
  const part = parts.shift();
  if (!part) { document.documentElement.dataset.ready = "yes"; return; }
  part();
  if (part === headline) next(); else setTimeout(next);
})();
