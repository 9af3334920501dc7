// The page: a function per section draws it from the data; sections that depend on the budget follow the slider.

const data = JSON.parse(byId("data").textContent);
const METRICS = {
  top1: { name: "Top-1 accuracy", short: "top-1", unit: " %", factor: 100, digits: 2, more: true },
  top5: { name: "Top-5 accuracy", short: "top-5", unit: " %", factor: 100, digits: 2, more: true },
  nlpd: { name: "NLPD (negative log predictive density)", short: "NLPD", unit: "", factor: 1, digits: 3, more: false },
  ece: { name: "ECE (expected calibration error)", short: "ECE", unit: "", factor: 1, digits: 3, more: false },
};
const MODELS = { vanilla: "vanilla", ours: "calibrated" };
const state = { unit: 0, step: 0, exit: 0, point: null, extras: new Set(), at: "taken" };
const followers = []; // called whenever the budget changes
const explorer = () => data.explorers[state.unit];
const step = () => explorer().steps[state.step];
const hasEarlyExits = Boolean(data.explorers) && data.net.exits > 1; // else there is neither a budget nor a decision to show

// Formatting of numbers

const metric = (name, value) => value === null ? "undefined" : (value * METRICS[name].factor).toFixed(METRICS[name].digits);
function signed(name, value) {
  const text = metric(name, value);
  return Number(text) > 0 ? `+${text}` : Number(text) === 0 ? metric(name, 0) : text.replace("-", "−");
}
const verdict = (name, value) => Number(metric(name, value)) === 0 ? "" : value > 0 === METRICS[name].more ? "better" : "worse";
const className = (label) => data.classes[label];
const named = (label) => html("bdi", {}, className(label));
const exitOf = (model, point) => explorer().exits[model][state.step].charCodeAt(point) - 48;

// Building blocks

function section(id, name, title, ...children) {
  const node = html("section", { id, "aria-labelledby": `${id}-title` }, html("h2", { id: `${id}-title` }, title), children);
  byId("main").append(node);
  byId("sections").append(html("li", {}, html("a", { href: `#${id}` }, name)));
  return node;
}
const paragraph = (...content) => html("p", {}, content);
function table(caption, head, rows, attributes) {
  const cell = (tag) => (value) => value instanceof Element && /^T[DH]$/.test(value.tagName) ? value : html(tag, {}, value);
  const body = rows.map((row) => row instanceof Element ? row : html("tr", {}, row.map(cell("td"))));
  return html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption, ...attributes },
    html("table", {}, html("caption", {}, caption), html("thead", {}, html("tr", {}, head.map(cell("th")))), html("tbody", {}, body)));
}
const td = (content, kind) => html("td", { class: kind }, content);
function choice(title, name, options, selected, onChange) {
  return html("fieldset", {}, html("legend", {}, title), options.map(([value, label]) =>
    html("label", {}, html("input", { type: "radio", name, value, checked: value === selected, onchange: () => onChange(value) }), label)));
}
function follow(update) {
  followers.push(update);
  update();
}

// At a glance

function headline() {
  const net = data.net, lead = html("p", { class: "lead", id: "lead", "aria-live": "polite" }), cards = html("div", { class: "cards", id: "cards" });
  const costs = data.explorers[0].costs, unit = data.explorers[0].unit;
  section("headline", "At a glance", hasEarlyExits ? "What the budget buys" : "What calibration changes",
    paragraph(hasEarlyExits ? `A network with ${costs.length} exits` : "A network with one exit", ` and ${grouped(net.classes)} classes. `,
      hasEarlyExits ? `A sample costs ${amount(costs[0], unit)} at the first exit and ${amount(costs.at(-1), unit)} at the last. ` : `It costs ${amount(costs[0], unit)} per sample. `,
      hasEarlyExits ? "A sample exits where its confidence reaches a threshold. " : "", `Two models with the same weights are compared: vanilla, and calibrated with ${data.method}. `,
      hasEarlyExits ? `Without early exits, the vanilla model is correct on ${metric("top1", data.uncertainty.vanilla.at(-1).metrics.top1)} % of the samples.` : ""),
    lead, cards,
    hasEarlyExits ? null : html("p", { class: "note" }, "Without earlier exits, every sample costs the same, so there are no budgets to explore. To save compute, add exits: ", html("code", {}, "exitwise train-heads --attach auto --exits 4"), " or ew.attach."),
    data.guarantee ? html("p", { class: "note" }, `The run's saved policy is certified; the policies on this page are not. ${data.guarantee}`) : null,
    html("p", { class: "soft small" }, `Measured on ${grouped(net.samples)} test samples, which are not used for fitting. Intervals are ${percent(net.level, 0)} bootstrap intervals.`));
  const formatInterval = (name, [low, high]) => `${metric(name, low)} to ${metric(name, high)}`;
  const formatSignedInterval = (name, [low, high]) => `${signed(name, low)} to ${signed(name, high)}`;
  follow(() => {
    const { budget, vanilla, ours, change } = step(), unit = explorer().unit, costs = explorer().costs;
    const gain = ours.top1 - vanilla.top1, significant = change.top1[0] > 0 || change.top1[1] < 0;
    const points = (value) => `${(100 * Math.abs(value)).toFixed(1)} points`;
    lead.replaceChildren(
      ...(hasEarlyExits ? ["At a budget of ", html("strong", {}, amount(budget, unit)), ` per sample (${percent(budget / costs.at(-1), 0)} of the full cost), the calibrated`] : ["The calibrated"]), " model is correct on ",
      html("strong", { class: "ours" }, `${metric("top1", ours.top1)} %`), " of the samples, the vanilla model on ",
      html("span", { class: "vanilla" }, `${metric("top1", vanilla.top1)} %`),
      `: ${signed("top1", gain)} points (${formatSignedInterval("top1", change.top1)})${significant ? "" : ", which may be chance"}. On average, the calibrated confidence differs from the accuracy by `,
      html("strong", { class: "ours" }, points(ours.ece)), ", the vanilla confidence by ", html("span", { class: "vanilla" }, points(vanilla.ece)), ".");
    const card = (name) => html("div", { class: "card" }, html("h3", { title: METRICS[name].name }, METRICS[name].short + METRICS[name].unit),
      html("div", { class: "number", id: `ours-${name}` }, metric(name, ours[name])),
      html("p", { class: "soft" }, formatInterval(name, ours.intervals[name])),
      html("p", { class: "vanilla" }, "vanilla ", html("span", { id: `vanilla-${name}` }, metric(name, vanilla[name])), ` (${formatInterval(name, vanilla.intervals[name])})`),
      html("p", { class: verdict(name, ours[name] - vanilla[name]) }, `change ${signed(name, ours[name] - vanilla[name])} (${formatSignedInterval(name, change[name])})`));
    const [size, unitName] = scaleOf(unit, costs.at(-1)), cost = (value) => short(value / size);
    const meanCost = (model) => html("span", { id: `${model === ours ? "ours" : "vanilla"}-cost` }, cost(model.cost));
    cards.replaceChildren(card("top1"), card("nlpd"), card("ece"), !hasEarlyExits ? "" : html("div", { class: "card" }, html("h3", {}, `mean cost, ${unitName}`),
      html("div", { class: "number" }, meanCost(ours)), html("p", { class: "soft" }, ours.intervals.cost.map(cost).join(" to ")),
      html("p", { class: "vanilla" }, "vanilla ", meanCost(vanilla), ` (${vanilla.intervals.cost.map(cost).join(" to ")})`),
      html("p", {}, `${percent(ours.cost / costs.at(-1), 0)} of the full cost`)));
  });
}

// Budget explorer

function extraCurves() {
  const extras = [];
  const add = (group, curves) => curves.forEach((curve) => extras.push({ group, ...curve, key: `${group}: ${curve.name}` }));
  for (const run of data.other_runs) if (run.unit === explorer().unit) add(run.name, run.curves);
  if (explorer().unit === "MACs") {
    add("Other methods, with the thresholds of the paper's sweep", data.curves);
    add("Published in the paper (other networks, trained far longer)", data.published.filter((curve) => !curve.model.startsWith("vanilla predictions")));
  }
  return extras;
}

function explore() {
  const options = html("div", {}), extraLegend = html("div", {});
  let extras = [];
  const charts = Object.keys(METRICS).map((name) => {
    const { name: title, factor, digits } = METRICS[name];
    let targets = [];
    const chart = figure(`${title} against mean cost, calibrated and vanilla`, 270, (drawing, width, height) => {
      const { steps, unit, costs } = explorer(), [size, unitName] = scaleOf(unit, costs.at(-1));
      const models = Object.keys(MODELS).map((model) => ({
        kind: model, name: MODELS[model],
        points: steps.map((at) => [at[model].cost, at[model][name], at[model].intervals[name]]).sort((a, b) => a[0] - b[0]),
      }));
      const selected = extras.filter((curve) => state.extras.has(curve.key) && curve.metrics[name])
        .map((curve) => ({ kind: curve.kind, name: curve.key, points: curve.metrics[name] }));
      const all = [...selected, ...models].flatMap((curve) => curve.points);
      const plot = axes(drawing, width, height, {
        x: range(all.map((p) => p[0] / size), 0.02),
        y: range([...all.map((p) => p[1] * factor), ...models.flatMap((curve) => curve.points.flatMap((p) => p[2].map((v) => v * factor)))], 0.05, factor === 100 ? 100 : Infinity),
        title: title + (factor === 100 ? ", %" : ""), xTitle: `mean cost per sample, ${unitName}`, xFormat: short, yFormat: short,
      });
      const scaled = ([x, y]) => [x / size, y * factor];
      targets = [];
      for (const { kind, name: label, points } of [...selected, ...models]) {
        if (points[0][2]) band(plot, points.map(([x, , [low, high]]) => [x / size, low * factor, high * factor]), kind);
        if (points.length > 1) line(plot, points.map(scaled), kind);
        else dot(plot, ...scaled(points[0]), kind, 4);
        for (const point of points) {
          const [x, y] = scaled(point);
          targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${label}\n${METRICS[name].short} ${y.toFixed(digits)}${METRICS[name].unit}\nmean cost ${amount(point[0], unit)}` });
        }
      }
      for (const model of Object.keys(MODELS)) dot(plot, ...scaled([step()[model].cost, step()[model][name]]), model, 7);
    });
    hoverable(chart, () => targets);
    return chart;
  });
  const exits = html("div", {}), confusion = html("div", {});
  const shares = figure("Share of samples per exit", 200, (drawing, width, height) => {
    const numExits = explorer().costs.length, largest = Math.max(...Object.keys(MODELS).flatMap((model) => step()[model].exit_shares));
    const plot = axes(drawing, width, height, {
      x: [-0.5, numExits - 0.5], y: [0, Math.max(10, 100 * largest * 1.12)], title: "Share of samples per exit, %", xTitle: "exit",
      xTicks: [...Array(numExits).keys()], xFormat: (k) => String(k + 1), yFormat: short,
    });
    Object.keys(MODELS).forEach((model, j) => step()[model].exit_shares.forEach((share, k) => {
      bar(plot, k - 0.36 + 0.37 * j, k - 0.01 + 0.37 * j, 0, 100 * share, model);
      const wide = plot.sx(0.35) - plot.sx(0);
      if (wide > 30) plot.plane.append(svg("text", { x: plot.sx(k - 0.185 + 0.37 * j), y: plot.sy(100 * share) - 4, "text-anchor": "middle" }, (100 * share).toFixed(wide > 42 ? 1 : 0)));
    }));
  });
  section("budgets", "Budgets", "Budget explorer",
    paragraph(hasEarlyExits ? "Move the slider at the bottom of the page to change the budget. " : "", "The thresholds are fitted to each budget on validation samples; everything else is measured on test samples. If a curve ends early, deeper exits would not improve it, and the policy spends less than the budget. Costs are those of the vanilla model; the section Cost shows what calibration adds."),
    legend(["ours", "calibrated"], ["vanilla", "vanilla"]), html("div", { class: "grid2" }, charts), options, extraLegend,
    html("h3", {}, "Exits taken, and errors of early exits"), html("div", { class: "grid2" }, shares, confusion), exits);

  function update() {
    extras = extraCurves();
    const selected = extras.filter((curve) => state.extras.has(curve.key));
    selected.forEach((curve, i) => { curve.kind = `extra${i % 5}${i >= 5 ? " dashed" : ""}`; });
    extraLegend.replaceChildren(selected.length ? legend(...selected.map((curve) => [curve.kind, curve.key])) : "");
    charts.forEach((chart) => chart.repaint());
  }
  function listExtras() {
    const groups = [...new Set(extraCurves().map((curve) => curve.group))];
    options.replaceChildren(html("details", {}, html("summary", {}, "More curves: other methods, other runs, the paper"), groups.map((group) =>
      html("fieldset", {}, html("legend", {}, group), extraCurves().filter((curve) => curve.group === group).map((curve) =>
        html("label", {}, html("input", {
          type: "checkbox", checked: state.extras.has(curve.key), "data-curve": curve.key,
          onchange: (event) => { state.extras[event.target.checked ? "add" : "delete"](curve.key); update(); },
        }), curve.label ?? curve.name)))),
      groups.length ? null : paragraph("No other curves are available in this unit.")));
  }
  let unit = null;
  follow(() => {
    if (unit !== state.unit) { unit = state.unit; listExtras(); }
    update();
    shares.repaint();
    const current = step(), numExits = explorer().costs.length, samples = data.net.samples;
    const threshold = (value) => value === "inf" ? "no sample" : value === "-inf" ? "all samples" : value.toFixed(4);
    const rows = [...Array(numExits).keys()].map((k) => [
      String(k + 1), ...Object.keys(MODELS).flatMap((model) => [
        td(threshold(current[model].thresholds[k]), model), td(percent(current[model].exit_shares[k]), model), td(grouped(current[model].exited[k].wrong), model),
      ])]);
    const head = ["exit", ...Object.values(MODELS).flatMap((name) => [`${name}: threshold`, "samples", "wrong"])];
    exits.replaceChildren(table("Confidence thresholds, and the samples that exit", head, rows, { id: "exits" }));
    confusion.replaceChildren(...Object.entries(MODELS).map(([model, name]) => {
      const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
      const early = current[model].exited.slice(0, -1), last = current[model].exited.slice(-1);
      const count = (rows, key) => `${grouped(sum(rows, key))} (${percent(sum(rows, key) / samples)})`;
      return html("div", {}, table(`${name} model`, ["", "correct", "wrong", "avoidable"], [
        ["exited early", count(early, "correct"), html("td", {}, html("strong", { id: `early-wrong-${model}` }, count(early, "wrong"))), count(early, "avoidable")],
        ["reached the last exit", count(last, "correct"), count(last, "wrong"), ""]]));
    }), paragraph(html("strong", {}, grouped(current.saved.samples)), " samples are saved: the vanilla model is wrong at an early exit, the calibrated model is correct at a later one. ",
      html("strong", {}, grouped(current.lost.samples)), " samples are lost: the calibrated model is wrong at an early exit, the vanilla model is correct at a later one. Avoidable: samples that exit early and wrong although the last exit is correct."));
  });
}

// Uncertainty against error

function uncertainty() {
  const maxEntropy = Math.log(Math.max(2, data.net.classes)), total = data.net.samples, numExits = data.net.exits;
  const { label } = data.points;
  const at = (model, key, point) => data.points[model][key][state.exit][point] / 1000;
  const isCorrect = (model, point) => data.points[model].predicted[state.exit][point] === label[point];
  const xAxis = { left: 40, x: [0, maxEntropy], xTitle: "uncertainty: entropy of the predictive, nats", xFormat: short, yFormat: short };
  const columns = Object.keys(MODELS).reverse().map((model) => {
    const of = () => data.uncertainty[model][state.exit], both = (key) => Object.keys(MODELS).flatMap((either) => data.uncertainty[either][state.exit][key]);
    const name = `${MODELS[model]} model`;
    const step = (counts) => maxEntropy / counts.length;
    const highError = figure(`${name}: entropy of samples with an error above 0.5`, 130, (drawing, width, height) => {
      const counts = of().high_error;
      const plot = axes(drawing, width, height, { ...xAxis, xTitle: null, y: [0, Math.max(1, ...both("high_error")) * 1.05], title: `Error > 0.5: ${percent(of().high_error_share, 2)} of samples, by entropy`, yTicks: [] });
      counts.forEach((n, i) => bar(plot, i * step(counts), (i + 1) * step(counts), 0, n, model));
    });
    let positions = [];
    const scatter = figure(`${name}: uncertainty against error. Use the arrow keys to step through the points, and Enter to show one.`, (width) => Math.min(400, width * 0.85), (drawing, width, height) => {
      const plot = axes(drawing, width, height, { ...xAxis, y: [0, 1.1], yTicks: ticks(0, 1, 5), title: "Error: 1 − p(true label)", grid: false });
      const cells = of().density, tall = cells[0].length, densest = Math.max(...cells.flat());
      cells.forEach((column, i) => column.forEach((n, j) => {
        if (n) bar(plot, (i * maxEntropy) / cells.length, ((i + 1) * maxEntropy) / cells.length, j / tall, (j + 1) / tall, "cell").setAttribute("opacity", (0.05 + 0.4 * Math.sqrt(n / densest)).toFixed(3));
      }));
      for (const [a, b] of [[[0, 0.5], [maxEntropy, 0.5]], [[maxEntropy / 2, 0.5], [maxEntropy / 2, 1.1]]]) plot.plane.append(svg("path", { class: "half", d: path([a, b], plot) }));
      positions = label.map((_, i) => ({ i, x: plot.sx(Math.min(maxEntropy, at(model, "entropy", i))), y: plot.sy(at(model, "error", i)) }));
      for (const kind of ["correct", "wrong"]) {
        const shown = positions.filter(({ i }) => isCorrect(model, i) === (kind === "correct"));
        plot.plane.append(svg("path", { class: `points ${kind}`, d: marks(shown.map(({ x, y }) => [x, y]), kind, 2.4) }));
      }
      const category = (name, x, y, anchor) => plot.plane.append(svg("text", { class: "kind", x: plot.sx(x), y: plot.sy(y), "text-anchor": anchor }, `${name} ${percent(of().categories[name] / total)}`));
      category("tricky", maxEntropy * 0.01, 1.04, "start"); category("hard", maxEntropy, 1.04, "end"); category("easy", maxEntropy * 0.49, 0.04, "end");
      if (state.point !== null) plot.plane.append(svg("circle", { class: "ring", cx: positions[state.point].x, cy: positions[state.point].y, r: 8 }));
    }, { class: "pickable", tabindex: 0, "data-model": model });
    const describe = ({ i }) => `${className(label[i])}\nexit ${state.exit + 1}: ${className(data.points[model].predicted[state.exit][i])}, confidence ${percent(at(model, "confidence", i), 0)}\nentropy ${at(model, "entropy", i).toFixed(2)}, error ${at(model, "error", i).toFixed(2)}`;
    hoverable(scatter, () => positions.map((position) => ({ ...position, get text() { return describe(position); } })), 14);
    scatter.drawing.addEventListener("click", (event) => {
      const target = nearest(scatter.drawing, event, positions, 16);
      if (target) pick(target.i);
    });
    scatter.drawing.addEventListener("keydown", (event) => {
      const direction = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Enter" && state.point !== null) return pick(state.point);
      if (!direction) return;
      event.preventDefault();
      const order = positions.map(({ i }) => i).sort((a, b) => at(model, "entropy", a) - at(model, "entropy", b));
      const current = state.point === null ? (direction > 0 ? -1 : 0) : order.indexOf(state.point);
      pick(order[(current + direction + order.length) % order.length]);
    });
    const all = figure(`${name}: entropy of all samples, correct and misclassified`, 150, (drawing, width, height) => {
      const { correct, wrong } = of(), sums = Object.keys(MODELS).flatMap((either) => data.uncertainty[either][state.exit].correct.map((n, i) => n + data.uncertainty[either][state.exit].wrong[i]));
      const plot = axes(drawing, width, height, { ...xAxis, y: [0, Math.max(1, ...sums) * 1.05], title: "All samples, by entropy", yTicks: [] });
      correct.forEach((n, i) => {
        const x = i * step(correct), next = (i + 1) * step(correct);
        bar(plot, x, next, 0, n, "correct");
        bar(plot, x, next, n, n + wrong[i], "wrong");
      });
    });
    return { parts: [highError, scatter, all], node: html("div", {}, html("h3", { class: model }, name), highError, scatter, all) };
  });
  const repaint = () => columns.forEach(({ parts }) => parts.forEach((part) => part.repaint()));
  state.exit = Math.max(0, numExits - 2);
  const exits = [...Array(numExits).keys()].map((k) => [k, `exit ${k + 1}`]);
  section("uncertainty", "Uncertainty", "Uncertainty against error",
    paragraph("A good model is uncertain where it errs. Tricky samples have a high error at low uncertainty: ", hasEarlyExits ? "they exit early, and the error goes unnoticed. Calibration moves them to the right, where they are hard and continue to the next exit." : "the error goes unnoticed. Calibration moves them to the right, where they are hard and the model says so.", " Easy samples have a low error at low uncertainty."),
    hasEarlyExits ? choice("At", "exit", exits, state.exit, (k) => { state.exit = k; repaint(); }) : null,
    legend(["correct", "correct", "dots"], ["wrong", "misclassified", "dots"]),
    html("div", { class: "grid2" }, columns.map(({ node }) => node)),
    html("p", { class: "soft small" }, label.length < total ? `Histograms, shares and density include all ${grouped(total)} test samples; ${grouped(label.length)} of them, chosen at random, are shown as points. ` : `All ${grouped(total)} test samples are shown. `, "Select a point to see the predictions of every exit."));
  state.repaintPoints = () => columns.forEach(({ parts }) => parts[1].repaint());
}

// One sample

function image(point) {
  if (!data.images) return null;
  const { columns, rows } = data.images, x = point % columns, y = Math.floor(point / columns);
  const at = (k, n) => (n > 1 ? (100 * k) / (n - 1) : 0);
  return html("span", { class: "image", role: "img", "aria-label": `image: ${className(data.points.label[point])}` },
    html("i", { style: `background-size:${100 * columns}% ${100 * rows}%;background-position:${at(x, columns)}% ${at(y, rows)}%` }));
}

function pick(point) {
  state.point = point;
  state.repaintPoints();
  showDetail();
}

function showDetail() {
  const point = state.point, { label, index } = data.points, panel = byId("detail");
  if (point === null) { panel.hidden = true; return; }
  const rows = [...Array(data.net.exits).keys()].map((k) => [String(k + 1), ...Object.keys(MODELS).map((model) => {
    const preds = data.points[model], isCorrect = preds.predicted[k][point] === label[point];
    return html("td", { class: isCorrect ? "better" : "worse" }, isCorrect ? "✓ " : "✗ ", named(preds.predicted[k][point]), html("br"),
      `confidence ${(preds.confidence[k][point] / 10).toFixed(0)} %, entropy ${(preds.entropy[k][point] / 1000).toFixed(2)}`, exitOf(model, point) === k ? html("strong", {}, " ← exits here") : "");
  })]);
  panel.replaceChildren(html("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => { state.point = null; showDetail(); state.repaintPoints(); } }, "×"),
    image(point) || "", html("h3", {}, named(label[point])), html("p", { class: "small soft" }, `true label; test sample ${grouped(index[point])}. At this budget, it exits at exit ${exitOf("vanilla", point) + 1} (vanilla) or ${exitOf("ours", point) + 1} (calibrated).`),
    table("Predictions of every exit", ["exit", ...Object.values(MODELS)], rows));
  panel.hidden = false;
}

// Examples

function galleries() {
  const groups = {
    easy: ["Easy", "low error, low uncertainty"], hard: ["Hard", "high error, high uncertainty"], tricky: ["Tricky", "high error, low uncertainty; some are mislabeled"],
    ...(hasEarlyExits ? { saved: ["Saved", "vanilla: early exit, wrong; calibrated: later exit, correct"], lost: ["Lost", "vanilla: later exit, correct; calibrated: early exit, wrong"] } : {}),
  };
  const lists = Object.keys(groups).map((kind) => html("ul", { class: "tiles", id: `tiles-${kind}` }));
  const counts = Object.keys(groups).map(() => html("span", { class: "soft" }));
  const last = data.net.exits - 1;
  section("examples", "Examples", "Examples",
    paragraph(hasEarlyExits ? "Easy, hard and tricky samples are chosen by the last exit of the calibrated model. Saved and lost samples depend on the budget." : "The samples are chosen by their error and uncertainty under the calibrated model."),
    data.images_note ? html("p", { class: "note" }, data.images_note) : null,
    Object.values(groups).map(([title, meaning], i) => [html("h3", {}, title, " ", html("span", { class: "soft" }, `${meaning} `), counts[i]), lists[i]]));
  const tile = (kind, point) => {
    const ours = data.points.ours, moved = kind === "saved" || kind === "lost";
    const exits = { ours: moved ? exitOf("ours", point) : last, vanilla: exitOf("vanilla", point) };
    const entropy = (ours.entropy[exits.ours][point] / 1000).toFixed(2), confidence = percent(ours.confidence[last][point] / 1000, 0);
    const prediction = moved
      ? [html("span", { class: "vanilla" }, "vanilla: ", named(data.points.vanilla.predicted[exits.vanilla][point])), html("span", { class: "ours" }, "calibrated: ", named(ours.predicted[exits.ours][point]))]
      : [html("span", {}, ours.predicted[last][point] === data.points.label[point] ? "correct" : ["predicted ", named(ours.predicted[last][point])], `, confidence ${confidence}`)];
    const badge = moved ? `exit ${exits.vanilla + 1} → ${exits.ours + 1}` : `exit ${exitOf("ours", point) + 1}`;
    return html("li", {}, html("button", { type: "button", class: "tile", onclick: () => pick(point) }, image(point), html("strong", {}, named(data.points.label[point])), prediction,
      data.images ? null : html("span", { class: "soft" }, `entropy ${entropy}`), hasEarlyExits ? html("span", { class: "badge" }, badge) : null));
  };
  follow(() => Object.keys(groups).forEach((kind, i) => {
    const moved = step()[kind], points = moved ? moved.points : data.galleries[kind];
    counts[i].textContent = moved ? `(${grouped(moved.samples)} of ${grouped(data.net.samples)} samples)` : "";
    lists[i].replaceChildren(...(points.length ? points.map((point) => tile(kind, point)) : [html("li", { class: "soft" }, "none among the samples shown")]));
  }));
}

// Calibration

function calibration() {
  const of = (model) => state.at === "taken" ? step()[model] : { ...data.uncertainty[model][state.at].metrics, reliability: data.uncertainty[model][state.at].reliability };
  const captions = Object.fromEntries(Object.keys(MODELS).map((model) => [model, html("p", { class: model, id: `calibration-${model}` })]));
  const eefpNote = html("p", { id: "eefp-models", class: "soft small" });
  const columns = Object.entries(MODELS).map(([model, name]) => {
    let targets = [];
    const diagram = figure(`${name} model: accuracy against confidence`, (width) => Math.min(320, width * 0.8), (drawing, width, height) => {
      const { count, confidence, accuracy } = of(model).reliability;
      const plot = axes(drawing, width, height, { x: [0, 1], y: [0, 1], title: "Accuracy in each bin", xTitle: "confidence", xFormat: short, yFormat: short, xTicks: ticks(0, 1, 5), yTicks: ticks(0, 1, 5) });
      targets = [];
      count.forEach((n, i) => {
        if (!n) return;
        const x = i / count.length, next = (i + 1) / count.length;
        bar(plot, x + 0.006, next - 0.006, 0, accuracy[i], model).classList.add("faint");
        bar(plot, x + 0.006, next - 0.006, accuracy[i], confidence[i], "gap");
        targets.push({ x: plot.sx((x + next) / 2), y: plot.sy(accuracy[i]), text: `${grouped(n)} samples\nconfidence ${percent(confidence[i])}\naccuracy ${percent(accuracy[i])}` });
      });
      plot.plane.append(svg("path", { class: "half", d: path([[0, 0], [1, 1]], plot) }));
    });
    hoverable(diagram, () => targets, 60);
    const histogram = figure(`${name} model: histogram of confidence`, 130, (drawing, width, height) => {
      const { count } = of(model).reliability, largest = Math.max(...Object.keys(MODELS).flatMap((either) => of(either).reliability.count)) / data.net.samples;
      const plot = axes(drawing, width, height, { x: [0, 1], y: [0, 105 * largest], title: "Samples, %", xTitle: "confidence", xFormat: short, yFormat: short, xTicks: ticks(0, 1, 5), yTicks: ticks(0, 100 * largest, 2) });
      count.forEach((n, i) => bar(plot, i / count.length + 0.006, (i + 1) / count.length - 0.006, 0, (100 * n) / data.net.samples, model));
    });
    return { parts: [diagram, histogram], node: html("div", {}, html("h3", {}, `${name} model`), captions[model], diagram, histogram) };
  });
  const auroc = (value) => value === null ? "undefined" : value.toFixed(3);
  const repaint = () => {
    for (const model of Object.keys(MODELS)) {
      const metrics = of(model);
      captions[model].textContent = `ECE ${metric("ece", metrics.ece)}; AUROC of correct against wrong predictions ${auroc(metrics.auroc)}${typeof metrics.eefp === "number" ? `; EEFP ${auroc(metrics.eefp)}` : ""}`;
    }
    eefpNote.textContent = state.at === "taken" ? step().eefp_note ?? "" : "";
    columns.forEach(({ parts }) => parts.forEach((part) => part.repaint()));
  };
  const options = [["taken", "the exits taken at this budget"], ...data.uncertainty.ours.map((_, k) => [k, `exit ${k + 1}`])];
  const rows = data.uncertainty.ours.map((ours, k) => {
    const vanilla = data.uncertainty.vanilla[k].metrics;
    return [String(k + 1), ...["top1", "nlpd", "ece"].flatMap((name) => [td(metric(name, vanilla[name]), "vanilla"), td(metric(name, ours.metrics[name]), "ours")]), td(auroc(vanilla.auroc), "vanilla"), td(auroc(ours.metrics.auroc), "ours")];
  });
  section("calibration", "Calibration", "Calibration",
    paragraph("A calibrated model is correct on 80 % of the samples that it predicts with 80 % confidence, so the bars end at the diagonal. The tinted part is the gap between confidence and accuracy. The ECE is the mean gap, weighted by the number of samples in each bin."),
    hasEarlyExits ? choice("At", "reliability", options, "taken", (value) => { state.at = value; repaint(); }) : null,
    html("div", { class: "grid2" }, columns.map(({ node }) => node)),
    hasEarlyExits ? paragraph("A small ECE does not make good decisions. The EEFP says how well the exit score detects where stopping is right: where an exit is correct, or every later exit is wrong.") : null, eefpNote,
    table("Each exit, if all samples exited there", ["exit", "top-1 %, vanilla", "calibrated", "NLPD, vanilla", "calibrated", "ECE, vanilla", "calibrated", "AUROC, vanilla", "calibrated"], rows));
  follow(repaint);
}

// Tables

function sortableTable(source) {
  const published = source.rows.some((row) => row.published);
  const columns = [{ title: "method", value: (row) => row.label ?? row.method }];
  for (const name of Object.keys(METRICS)) {
    const { short: title, factor } = METRICS[name], unit = factor === 100 ? " %" : "";
    columns.push({ title: title + unit, value: (row) => row.metrics[name], cell: (row) => metric(name, row.metrics[name]) });
    columns.push({ title: "±", label: `${title}, change`, value: (row) => row.change[name], cell: (row, i) => i ? td(signed(name, row.change[name]), verdict(name, row.change[name])) : "" });
    if (!published) continue;
    columns.push({ title: "paper", label: `${title}, published`, kind: "published", value: (row) => row.published?.[name], cell: (row) => row.published ? metric(name, row.published[name]) : "" });
    columns.push({ title: "±", label: `${title}, published change`, kind: "published", value: (row) => row.published_change?.[name],
      cell: (row, i) => i && row.published_change ? td(signed(name, row.published_change[name]), `published ${verdict(name, row.published_change[name])}`) : "" });
  }
  if (source.rows.some((row) => typeof row.eefp === "number")) columns.push({ title: "EEFP", value: (row) => row.eefp, cell: (row) => typeof row.eefp === "number" ? row.eefp.toFixed(3) : "" });
  const body = html("tbody", {}), order = { column: null, down: false };
  const heads = columns.map((column, j) => html("th", { class: column.kind, scope: "col" },
    html("button", { type: "button", "aria-label": `Sort by ${column.label || column.title}`, onclick: () => { order.down = order.column === j ? !order.down : j > 0; order.column = j; fill(); } }, column.title)));
  function fill() {
    const rows = source.rows.map((row, i) => ({ row, i }));
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
  const [low, high] = source.range.map((value) => amount(value, source.unit));
  return [html("h3", {}, source.title), html("p", { class: "soft small" }, source.range[0] ? `Means over budgets from ${low} to ${high}; ± is the change from vanilla.` : `One exit, which costs ${high}.`,
    published ? " Paper: published values for this architecture, trained far longer." : ""),
    html("div", { class: "buttons" }, copyButton("Copy as CSV", source.csv), copyButton("Copy as LaTeX", source.latex)),
    html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": source.title, id: `table-${source.name}` },
      html("table", { class: "dense" }, html("thead", {}, html("tr", {}, heads)), body))];
}

function copyButton(title, content) {
  return html("button", {
    type: "button", onclick: async (event) => {
      const button = event.currentTarget;
      const area = html("textarea", {}, content); // the Clipboard API is not available in local files
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      button.focus();
      button.textContent = done ? "Copied" : "Copying failed";
      setTimeout(() => { button.textContent = title; }, 1500);
    },
  }, title);
}

function disagreement(source) {
  return source.eefp_note ? html("p", { id: "eefp-methods", class: "soft small" }, source.eefp_note) : null;
}

function tables() {
  let withPaper = false;
  const kinds = ["vanilla", "middle", "ours"];
  const paper = { vanilla: "vanilla", middle: "vanilla predictions, our decisions", ours: "ours" };
  const charts = Object.keys(METRICS).map((name) => {
    const { factor, digits } = METRICS[name];
    let targets = [];
    const chart = figure(`Decision experiment: ${METRICS[name].name} against cost`, 220, (drawing, width, height) => {
      const measured = data.decisions.map((curve, i) => ({ kind: kinds[i], name: curve.label ?? curve.name, points: curve.metrics[name] }));
      const published = withPaper ? kinds.flatMap((kind) => data.published.filter((curve) => curve.own && curve.model === paper[kind] && curve.metrics[name]).map((curve) => ({ kind: `${kind} dashed`, name: `published: ${curve.name}`, points: curve.metrics[name] }))) : [];
      const all = [...published, ...measured].map((curve) => ({ ...curve, points: curve.points.map(([x, y]) => [x / size, y * factor]) }));
      const plot = axes(drawing, width, height, { x: range(all.flatMap((curve) => curve.points.map((p) => p[0])), 0.02), y: range(all.flatMap((curve) => curve.points.map((p) => p[1])), 0.05, factor === 100 ? 100 : Infinity), title: METRICS[name].name + (factor === 100 ? ", %" : ""), xTitle: `mean cost per sample, ${unitName}`, xFormat: short, yFormat: short });
      targets = [];
      for (const { kind, name: label, points } of all) {
        if (points.length > 1) line(plot, points, kind); else dot(plot, ...points[0], kind, 4);
        points.forEach(([x, y]) => targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${label}\n${METRICS[name].short} ${y.toFixed(digits)}${METRICS[name].unit}\nmean cost ${short(x)} ${unitName}` }));
      }
    });
    hoverable(chart, () => targets);
    return chart;
  });
  const unit = data.tables[0].unit, [size, unitName] = scaleOf(unit, data.decisions[0].metrics.top1.at(-1)[0]);
  const hasPublished = data.published.some((curve) => curve.own);
  if (!hasEarlyExits) return section("tables", "Tables", "Every method", sortableTable(data.tables[0]));
  section("tables", "Tables", "The paper's tables", sortableTable(data.tables[0]), disagreement(data.tables[0]), sortableTable(data.tables[1]),
    paragraph("The decision experiment separates better predictions from better decisions: the middle curve has the predictions of the vanilla model at the exits that the calibrated model chooses."),
    legend(["vanilla", "vanilla"], ["middle", "vanilla predictions, calibrated decisions"], ["ours", "calibrated"]),
    hasPublished ? html("fieldset", {}, html("label", {}, html("input", { type: "checkbox", id: "decisions-published", onchange: (event) => { withPaper = event.target.checked; charts.forEach((chart) => chart.repaint()); } }), "show the paper's curves (dotted)")) : null,
    html("div", { class: "grid2" }, charts));
}

// Cost of Laplace

function costs() {
  if (!data.laplace_costs.length) return;
  const KINDS = { vanilla: "vanilla", ours: "efficient", naive: "naive" };
  let net = data.laplace_costs[0];
  const bars = (title, value, label) => {
    let targets = [];
    const chart = figure(title, 240, (drawing, width, height) => {
      const numExits = net.vanilla.length, [size, unitName] = scaleOf("MACs", Math.max(...net.naive));
      const values = Object.values(KINDS).flatMap((kind) => net[kind].map((_, k) => value(kind, k, size)));
      const plot = axes(drawing, width, height, { x: [-0.5, numExits - 0.5], y: [0, Math.max(...values) * 1.08 || 1], title: label(unitName), xTitle: "exit", xTicks: [...Array(numExits).keys()], xFormat: (k) => String(k + 1), yFormat: short });
      targets = [];
      Object.entries(KINDS).forEach(([kind, name], j) => net[name].forEach((cost, k) => {
        const y = value(name, k, size);
        bar(plot, k - 0.39 + 0.26 * j, k - 0.15 + 0.26 * j, 0, y, kind);
        targets.push({ x: plot.sx(k - 0.27 + 0.26 * j), y: plot.sy(y), text: `exit ${k + 1}, ${name}\n${amount(cost, "MACs")}\n${(cost / net.vanilla[k]).toFixed(3)} times vanilla` });
      }));
    });
    hoverable(chart, () => targets, 60);
    return chart;
  };
  const charts = [bars("Cost up to each exit", (kind, k, size) => net[kind][k] / size, (unitName) => `Cost up to each exit, ${unitName}`), bars("Overhead over vanilla", (kind, k) => 100 * (net[kind][k] / net.vanilla[k] - 1), () => "Overhead over vanilla, %")];
  const costTable = html("div", {}), note = html("p", { class: "soft small" });
  const select = html("select", { id: "cost-net", onchange: (event) => { net = data.laplace_costs[event.target.selectedIndex]; update(); } }, data.laplace_costs.map((net) => html("option", {}, net.own ? net.name : `the paper's ${net.name}`)));
  function update() {
    charts.forEach((chart) => chart.repaint());
    costTable.replaceChildren(table("Multiply-adds up to each exit", ["exit", "vanilla", "efficient Laplace", "times vanilla", "naive Laplace", "times vanilla"],
      net.vanilla.map((cost, k) => [String(k + 1), amount(cost, "MACs"), amount(net.efficient[k], "MACs"), (net.efficient[k] / cost).toFixed(3), amount(net.naive[k], "MACs"), (net.naive[k] / cost).toFixed(3)])));
    note.textContent = net.own ? `Every exit on the way adds its overhead. Multiply-adds are the paper's FLOPs; ${net.draws} draws.` : "As published: the paper's figure multiplies the current exit's cost by the number of exits passed.";
  }
  section("cost", "Cost", "Cost of Laplace", paragraph("Logits are sampled directly, without sampling weights: one scalar per sample is enough, so the overhead is small."),
    html("p", {}, html("label", {}, "Network ", select)), legend(["vanilla", "vanilla", "bar"], ["ours", "efficient", "bar"], ["naive", "naive", "bar"]), html("div", { class: "grid2" }, charts), costTable, note);
  update();
}

// Prediction sets and abstention

function answers() {
  const found = data.answers, { sets, abstention, unit } = found;
  const chart = (title, series, xTitle, yTitle, describe) => {
    let targets = [];
    const node = figure(title, 260, (drawing, width, height) => {
      const points = series.flatMap((each) => each.points);
      const plot = axes(drawing, width, height, { x: range(points.map(([x]) => x), 0.02), y: range(points.map(([, y]) => y), 0.05), title: yTitle, xTitle, xFormat: short, yFormat: short });
      targets = [];
      for (const { kind, points } of series) {
        if (points.length > 1) line(plot, points, kind);
        points.forEach(([x, y]) => targets.push({ x: plot.sx(x), y: plot.sy(y), text: describe(x, y) }));
      }
    });
    hoverable(node, () => targets);
    return node;
  };
  const curve = chart("Errors among answered images", [{ kind: "ours", points: found.curve.answered.map((share, i) => [100 * share, 100 * found.curve.error[i]]) }],
    "answered images, the most confident first, %", "errors among answered images, %", (x, y) => `${x.toFixed(1)} % answered\n${y.toFixed(2)} % of them wrong`);
  const [size, unitName] = scaleOf(unit, Math.max(...found.trade_off.map((row) => row.cost), 0));
  const withSets = found.trade_off.filter((row) => row.mean_size !== null);
  const sizes = withSets.length ? chart("Size of prediction sets against cost", [{ kind: "ours", points: withSets.map((row) => [row.cost / size, row.mean_size]) }],
    `mean cost per sample, ${unitName}`, "mean number of classes in a set", (x, y) => `${short(x)} ${unitName}\n${y.toFixed(2)} classes`) : null;
  const groups = sets ? [["all", sets.test], ...sets.test.by_exit.map((group, k) => [`exit ${k + 1}`, group])] : [];
  const promise = sets && { all: "", exit: " at every exit", class: " of every class" }[sets.per];
  const tile = ({ point, exit, set }) => html("li", {}, html("button", { type: "button", class: "tile", onclick: () => pick(point) }, image(point), html("strong", {}, named(data.points.label[point])),
    html("span", { class: set.includes(data.points.label[point]) ? "better" : "worse" }, set.slice(0, 4).flatMap((label, i) => [i ? ", " : "", named(label)]), set.length > 4 ? ` and ${set.length - 4} more` : ""), html("span", { class: "badge" }, `exit ${exit + 1}`)));
  section("answers", "Answers", "When it is not sure",
    paragraph(`If the least confident images are left unanswered, fewer of the answers are wrong. The area under the curve (AURC) is ${found.curve.aurc.toFixed(4)} at ${amount(found.budget, unit)}. `,
      abstention ? `The run's classifier answers ${percent(abstention.test.answered)} of the test samples, and ${percent(abstention.test.error ?? 0, 2)} of these answers are wrong (${percent(abstention.test.error_all, 2)} if it answered all).` : "",
      abstention && abstention.risk !== null ? ` On ${grouped(abstention.samples)} held-out samples it was certified that at most ${short(100 * abstention.risk)} % are wrong, with a probability of ${short(100 * (1 - abstention.delta))} %.` : ""),
    html("div", { class: sizes ? "grid2" : "" }, curve, sizes),
    sets ? paragraph(`A prediction set holds the true class with a probability of ${short(100 * sets.coverage)} %${promise}, for images like the ${grouped(sets.samples)} held-out samples that it was fitted on. On the test split, the class that is covered least is `, named(sets.test.lowest_class), `, with ${percent(sets.test.lowest_class_coverage)}.`) : null,
    sets ? table("Prediction sets on the test split", ["samples of", "number", "coverage %", "mean size"], groups.map(([name, group]) => [name, grouped(group.samples), group.coverage === null ? "" : (100 * group.coverage).toFixed(2), group.mean_size === null ? "" : group.mean_size.toFixed(2)])) : null,
    found.trade_off.length ? table("Cost, answered images and errors among them, %", ["budget", "mean cost", ...found.shares.map((share) => `${100 * share} % answered`)], found.trade_off.map((row) => [amount(row.budget, unit), amount(row.cost, unit), ...row.error.map((error) => error === null ? "" : (100 * error).toFixed(2))])) : null,
    sets ? [html("h3", {}, "Sets of some test samples"), html("ul", { class: "tiles", id: "tiles-sets" }, sets.examples.map(tile))] : null);
}

// Cascades

function cascades() {
  const found = data.cascades;
  if (!found) return;
  const interval = ([low, high]) => `${metric("top1", low)} to ${metric("top1", high)}`;
  const cells = (row) => [row.networks.join(" > "), amount(row.cost, found.unit), row.milliseconds === null ? "" : short(row.milliseconds), metric("top1", row.top1), interval(row.interval), metric("nlpd", row.nlpd), metric("ece", row.ece)];
  const head = ["networks", "cost", "ms", "top-1 %", "95 %", "NLPD", "ECE"];
  const best = found.budgets.flatMap((budget, i) => found.best[i] ? [[amount(budget, found.unit), ...cells(found.best[i]), found.best[i].gain === null ? "" : signed("top1", found.best[i].gain)]] : []);
  section("cascades", "Cascades", "Chains of networks",
    paragraph(`Every chain of up to three networks in every order, cross-fitted on ${grouped(found.samples)} validation images. The gain is against the best network alone within the budget. The best of many chains looks better than it is: choosing in every fold by the others, top-1 is ${found.chosen_top1.map((value) => value === null ? "undefined" : metric("top1", value)).join(", ")} % at these budgets.`),
    table("Best networks at every budget", ["budget", ...head, "gain"], best),
    table("No other is better and cheaper, in MACs", head, found.front.map(cells)),
    found.front_milliseconds ? table("No other is better and cheaper, in measured milliseconds", head, found.front_milliseconds.map(cells)) : "");
}

// Training

function training() {
  const history = data.training;
  if (!history) return;
  const { epochs } = history, last = epochs.at(-1);
  const progress = last ? `${epochs.length}${history.of ? ` of ${history.of}` : ""} epochs. ` : "No epoch is complete yet. ";
  const remaining = last && history.of > epochs.length ? `About ${Math.ceil(((history.of - epochs.length) * epochs.reduce((sum, row) => sum + row.seconds, 0)) / epochs.length / 60)} minutes remain. ` : "";
  const describeKept = () => {
    if (!history.kept) return `The weights of epoch ${history.best} are kept.`;
    const heads = history.kept.map((epoch, k) => `exit ${k + 1} ${epoch ? `from epoch ${epoch}` : "unchanged"}`);
    return `Each head is kept from its best epoch: ${heads.join(", ")}.`;
  };
  const lines = (title, series, format) => {
    let targets = [];
    const chart = figure(title, 260, (drawing, width, height) => {
      const plot = axes(drawing, width, height, { x: [1, Math.max(2, history.of || epochs.length)], y: range(series.flatMap(({ values }) => values)), title, xTitle: "epoch", xFormat: short, yFormat: short, xTicks: ticks(0, Math.max(2, history.of || epochs.length), 6).filter((n) => n >= 1 && Number.isInteger(n)) });
      targets = [];
      for (const { kind, name, values } of series) {
        const points = values.map((value, i) => [epochs[i].epoch, value]);
        if (points.length > 1) line(plot, points, kind);
        points.forEach(([x, y]) => { targets.push({ x: plot.sx(x), y: plot.sy(y), text: `${name}, epoch ${x}\n${format(y)}` }); });
        dot(plot, ...points.at(-1), kind, 4);
      }
    });
    hoverable(chart, () => targets);
    return chart;
  };
  const exits = last ? last.val_top1.map((_, k) => ({ kind: `extra${k % 5}${k >= 5 ? " dashed" : ""}`, name: `exit ${k + 1}`, values: epochs.map((row) => 100 * row.val_top1[k]) })) : [];
  section("training", "Training", "Training", html("p", { id: "epochs" }, progress, remaining, last ? `${describeKept()} ` : "", data.live ? "This page reloads itself during training." : ""),
    last ? html("div", { class: "grid2" },
      html("div", {}, legend(["ours", "training"], ["vanilla", "validation"]), lines("Loss, summed over the exits", [{ kind: "ours", name: "training", values: epochs.map((row) => row.train_loss) }, { kind: "vanilla", name: "validation", values: epochs.map((row) => row.val_loss) }], (y) => y.toFixed(4))),
      html("div", {}, legend(...exits.map(({ kind, name }) => [kind, name])), lines("Validation top-1, %", exits, (y) => `${y.toFixed(2)} %`))) : null);
}

// Provenance

function provenance() {
  section("provenance", "Provenance", "Provenance", html("dl", {}, data.provenance.map(([name, value]) => [html("dt", {}, name), html("dd", {}, ["command", "reproduce with"].includes(name) ? html("code", {}, value) : value)])));
}

// Slider and start

function budget() {
  const slider = byId("budget"), unit = byId("unit");
  const update = () => {
    const { budget, ours, vanilla } = step(), name = explorer().unit;
    const label = `${amount(budget, name)} (${percent(budget / explorer().costs.at(-1), 0)})`;
    slider.max = explorer().steps.length - 1;
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", label);
    byId("amount").textContent = label;
    byId("short").textContent = `top-1 ${metric("top1", ours.top1)} %, vanilla ${metric("top1", vanilla.top1)} %`;
  };
  slider.addEventListener("input", () => { state.step = Number(slider.value); followers.forEach((update) => update()); });
  unit.append(...data.explorers.map(({ unit: name }) => html("option", {}, name)));
  unit.hidden = data.explorers.length < 2;
  unit.addEventListener("change", () => {
    const share = step().budget / explorer().costs.at(-1);
    state.unit = unit.selectedIndex;
    const gap = (candidate) => Math.abs(candidate.budget / explorer().costs.at(-1) - share);
    state.step = explorer().steps.reduce((best, candidate, i, all) => gap(candidate) < gap(all[best]) ? i : best, 0);
    followers.forEach((update) => update());
  });
  byId("bar").hidden = !hasEarlyExits;
  follow(update);
  follow(showDetail);
}

byId("title").textContent = `${data.net.name} on ${data.net.data}`;
byId("run").textContent = `exitwise report on the run ${data.net.run}`;
if (data.images && data.images.side < 24) document.documentElement.dataset.pixels = "large";
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.point !== null) { state.point = null; showDetail(); state.repaintPoints(); } });
const sectionBuilders = data.explorers ? [headline, ...(hasEarlyExits || data.other_runs.length ? [explore] : []), uncertainty, galleries, calibration, answers, tables, cascades, costs, training, provenance] : [training, provenance];
if (data.explorers) {
  state.step = data.explorers[0].chosen;
  sectionBuilders.splice(sectionBuilders.indexOf(uncertainty), 0, budget);
}
// Build the headline at once, and the other sections after the browser has painted it.
(function next() {
  const build = sectionBuilders.shift();
  if (!build) { document.documentElement.dataset.ready = "yes"; return; }
  build();
  if (build === headline) next(); else setTimeout(next);
})();
