// Policies of the bundle, and the load of the service: numbers and charts that are asked for every second.

const POLL = 1000, RETRY = 3000; // milliseconds
const live = { charts: [], turn: 0 }; // `turn` numbers the polls, so that only the last one goes on

function buildPolicies() {
  const { unit } = state.service, [size, unitName] = scaleOf(unit, fullCost());
  const known = policies().every((policy) => policy.expected_accuracy !== undefined), several = policies().length > 1;
  const isAllowed = (k) => k >= state.service.allowed[0] && k <= state.service.allowed[1];
  const limited = policies().some((_, k) => !isAllowed(k));
  let targets = [];
  const chart = figure("Expected accuracy of every policy against its mean cost", 260, (drawing, width, height) => {
    const points = policies().map(({ cost, expected_accuracy: value }) => [cost / size, 100 * value]);
    const plot = axes(drawing, width, height, { x: range([0, ...points.map((p) => p[0])], 0.04), y: range(points.map((p) => p[1]), 0.12, 100), title: "Expected accuracy, %", xTitle: `mean cost per image, ${unitName}`, xFormat: short, yFormat: short });
    line(plot, points, "ours");
    points.forEach(([x, y], k) => dot(plot, x, y, isAllowed(k) ? "ours" : "unused", 5));
    dot(plot, ...points[inUse()], "use", 9);
    plot.plane.append(svg("circle", { class: "ring", cx: plot.sx(points[state.policy][0]), cy: plot.sy(points[state.policy][1]), r: 12 }));
    targets = points.map(([x, y], k) => ({ x: plot.sx(x), y: plot.sy(y), text: `policy ${k + 1}: ${accuracy(policies()[k])}\n${amount(policies()[k].cost, unit)} on average` }));
  });
  hoverable(chart, () => targets, 30);
  const marks = html("ul", { class: "legend" },
    html("li", {}, svg("svg", { "aria-hidden": "true" }, svg("circle", { class: "dot use", cx: 13, cy: 6, r: 5 })), "in use now"),
    html("li", {}, svg("svg", { "aria-hidden": "true" }, svg("circle", { class: "ring", cx: 13, cy: 6, r: 5 })), "selected"),
    limited ? html("li", {}, svg("svg", { "aria-hidden": "true" }, svg("circle", { class: "dot unused", cx: 13, cy: 6, r: 4 })), "outside the limits of this service") : null);
  const rows = html("tbody");
  const head = ["policy", "budget", "mean cost", "expected accuracy", ...state.service.costs.map((_, k) => `threshold ${k + 1}`)];
  const table = html("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Policies" },
    html("table", { class: "dense" }, html("thead", {}, html("tr", {}, head.map((name) => html("th", { scope: "col" }, name)))), rows));
  const limit = (value) => value === "inf" ? "none exit" : value === "-inf" ? "all exit" : String(Number(value.toFixed(4)));
  byId("policies").replaceChildren(byId("policies-title"),
    html("p", {}, several ? "A policy has a threshold for every exit. The service uses the most expensive policy that the load allows." : "The bundle has one policy, which the service uses at any load. Export it again to get a family of them: then the budget can follow the load.",
      known ? " Accuracies are those on validation samples." : several ? " Their accuracies are not known, as the bundle was exported without labels." : ""),
    ...(several && known ? [marks, chart] : []), html("details", several && known ? {} : { open: true }, html("summary", {}, "Thresholds of all policies"), table));
  live.policies = () => {
    chart.repaint();
    rows.replaceChildren(...policies().map((policy, k) => html("tr", { class: k === state.policy ? "selected" : null },
      [`${k + 1}${k === inUse() ? ", in use" : ""}`, amount(policy.budget, unit), amount(policy.cost, unit), accuracy(policy) ?? "not known", ...policy.thresholds.map(limit)].map((value) => html("td", {}, value)))));
  };
}
followers.push(() => live.policies?.());

// Load

const when = { xTicks: [-120, -90, -60, -30, 0], xFormat: (value) => (value ? `${value} s`.replace("-", "−") : "now") };

// Draw values of every second as lines that are interrupted where there is none.
function series(plot, values, kind) {
  let run = [];
  const flush = () => {
    if (run.length > 1) line(plot, run, kind);
    else if (run.length) dot(plot, ...run[0], kind, 3);
    run = [];
  };
  values.forEach((value, i) => { if (value === null) flush(); else run.push([i - values.length, value]); });
  flush();
}

function liveChart(label, draw) {
  let targets = [];
  const chart = figure(label, 190, (drawing, width, height) => { targets = draw(drawing, width, height) || []; });
  hoverable(chart, () => targets, 60);
  live.charts.push(chart);
  return chart;
}
const upTo = (values, least) => [0, 1.08 * Math.max(least, ...values.filter((value) => value !== null))];
const ago = (i, count) => `${count - i} s ago`;
const points = (plot, values, text) => values.flatMap((value, i) => value === null ? [] : [{ x: plot.sx(i - values.length), y: plot.sy(value), text: `${ago(i, values.length)}\n${text(i)}` }]);

function requestChart() {
  return liveChart("Requests per second in the last two minutes", (drawing, width, height) => {
    const { requests, rejected } = state.stats;
    const plot = axes(drawing, width, height, { x: [-requests.length, 0], y: upTo(requests, 4), title: "Requests per second", yFormat: short, ...when });
    series(plot, requests, "ours");
    if (rejected.some(Boolean)) series(plot, rejected, "vanilla");
    return points(plot, requests, (i) => `${requests[i]} requests, ${rejected[i]} rejected`);
  });
}

function latencyChart() {
  return liveChart("Latency of requests in the last two minutes", (drawing, width, height) => {
    const { p50_ms: median, p99_ms: late } = state.stats, slo = state.service.slo_ms;
    const plot = axes(drawing, width, height, { x: [-median.length, 0], y: upTo([...median, ...late], slo), title: "Latency, ms", yFormat: short, ...when });
    line(plot, [[-median.length, slo], [0, slo]], "limit");
    series(plot, late, "late");
    series(plot, median, "ours");
    return points(plot, late, (i) => `p50 ${short(median[i])} ms, p99 ${short(late[i])} ms`);
  });
}

function budgetChart() {
  return liveChart("Budget in use in the last two minutes", (drawing, width, height) => {
    const { policy } = state.stats, [size, unitName] = scaleOf(state.service.unit, fullCost());
    const budgets = policy.map((k) => (k === null || k >= policies().length ? null : policies()[k].budget / size));
    const plot = axes(drawing, width, height, { x: [-policy.length, 0], y: [0, (1.08 * fullCost()) / size], title: `Budget in use, ${unitName}`, yFormat: short, ...when });
    const steps = budgets.flatMap((value, i) => (value === null ? [] : [[i - policy.length, value], [i - policy.length + 1, value]]));
    if (steps.length) line(plot, steps, "ours");
    return points(plot, budgets, (i) => `policy ${policy[i] + 1}, ${short(budgets[i])} ${unitName}`);
  });
}

const shade = (k) => (state.service.costs.length > 1 ? 0.25 + (0.75 * k) / (state.service.costs.length - 1) : 1);
const WIDTH = 5; // seconds of a bar

function exitChart() {
  return liveChart("Share of images that exited at every exit, in the last two minutes", (drawing, width, height) => {
    const { exits } = state.stats, targets = [];
    const plot = axes(drawing, width, height, { x: [-exits.length, 0], y: [0, 100], yTicks: [0, 50, 100], title: "Images by exit, %", ...when });
    for (let start = 0; start < exits.length; start += WIDTH) {
      const counts = exits.slice(start, start + WIDTH).reduce((sum, row) => sum.map((n, k) => n + row[k]), state.service.costs.map(() => 0));
      const total = counts.reduce((sum, n) => sum + n, 0);
      let low = 0;
      counts.forEach((n, k) => {
        if (!n) return;
        const high = low + (100 * n) / total;
        bar(plot, start - exits.length + 0.4, start + WIDTH - exits.length - 0.4, low, high, "exit-share").setAttribute("fill-opacity", shade(k).toFixed(2));
        targets.push({ x: plot.sx(start + WIDTH / 2 - exits.length), y: plot.sy((low + high) / 2), text: `exit ${k + 1}: ${percent(n / total, 0)} of ${grouped(total)} images` });
        low = high;
      });
    }
    return targets;
  });
}

function loadCards() {
  const { now } = state.stats, { slo_ms: slo, unit } = state.service;
  const card = (id, title, number, text) => html("div", { class: "card", id }, html("h3", {}, title), html("div", { class: "number" }, number), html("p", { class: "soft" }, text));
  const milliseconds = (value) => value === null ? "–" : `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
  const policy = policies()[now.policy];
  return [
    card("now-requests", "Requests / s", short(now.requests_per_second), now.rejected_per_second ? `${short(now.rejected_per_second)} of them rejected; ${now.queued} images in the queues` : `${now.queued} ${now.queued === 1 ? "image" : "images"} in the queues`),
    card("now-latency", "Latency, p99", milliseconds(now.p99_ms), `p50 ${milliseconds(now.p50_ms)}; objective ${short(slo)} ms`),
    card("now-budget", "Budget in use", share(now.budget), `${amount(now.budget, unit)}${policy && accuracy(policy) ? `; expected accuracy ${accuracy(policy)}` : ""}`),
    card("now-exits", "Mean exit", now.exit_shares ? (1 + now.exit_shares.reduce((sum, part, k) => sum + k * part, 0)).toFixed(1) : "–", `of ${state.service.costs.length}; ${now.exit_shares ? `${percent(now.exit_shares[0], 0)} exit at the first` : "no image in the last seconds"}`),
  ];
}

function buildLoad() {
  live.charts = [];
  const cards = html("div", { class: "cards", id: "cards" }), quiet = html("p", { class: "note", id: "quiet" });
  const shades = html("ul", { class: "legend" }, state.service.costs.map((_, k) =>
    html("li", {}, svg("svg", { "aria-hidden": "true" }, svg("rect", { class: "exit-share", "fill-opacity": shade(k).toFixed(2), x: 6, y: 0, width: 14, height: 12 })), `exit ${k + 1}`)));
  byId("load").replaceChildren(byId("load-title"),
    html("p", {}, "Requests that classify, from all clients. Images that this page explains are not counted. Numbers are means over the last ten seconds."),
    quiet, cards,
    html("div", { class: "grid2" },
      html("div", {}, requestChart(), legend(["ours", "requests"], ["vanilla", "rejected"])), html("div", {}, latencyChart(), legend(["ours", "p50"], ["late", "p99"], ["limit", "objective"])),
      html("div", {}, budgetChart()), html("div", {}, exitChart(), shades)));
  live.load = () => {
    cards.replaceChildren(...loadCards());
    const idle = !state.stats.requests.some(Boolean);
    show("quiet", idle ? `No request in the last two minutes. Send image files to /classify, or tensors to /v2/models/${state.service.model}/infer.` : "");
    live.charts.forEach((chart) => chart.repaint());
  };
  live.load();
}

async function poll() {
  if (document.hidden) return; // asked again when the page is shown
  const turn = ++live.turn;
  let wait = POLL;
  try {
    const former = inUse(), stats = await ask("stats");
    if (turn !== live.turn) return;
    state.stats = stats;
    show("problem", "");
    if (state.stats.reloads !== state.service.reloads) { connect(); return; } // another bundle
    if (former !== inUse() && byId("follow").checked) select(inUse());
    else if (former !== inUse()) update();
    live.load();
  } catch (error) {
    if (turn !== live.turn) return;
    if (error.status === 401) { askForKey(); return; }
    show("problem", `${error.message} Trying again.`);
    wait = RETRY;
  }
  live.timer = setTimeout(poll, wait);
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden || !live.load || !byId("key-form").hidden) return;
  clearTimeout(live.timer);
  poll();
});

connect();
