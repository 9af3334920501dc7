// One image, exit by exit: sends it, shows the predictions one after the other, and where the selected policy stops.

const PAUSE = 500; // milliseconds between two exits
const SCORES = { confidence: "confidence", margin: "margin", entropy: "negative entropy", variance: "negative variance", patience: "agreeing exits", learned: "learned score" };
const moves = () => !matchMedia("(prefers-reduced-motion: reduce)").matches;
const explained = { answer: null, shown: 0, timer: 0, sending: null, announcing: 0 };
const decision = () => explained.answer && explained.answer.policies[state.policy];

function buildExits() {
  clearTimeout(explained.timer);
  explained.sending?.abort();
  Object.assign(explained, { answer: null, shown: 0 });
  byId("exits").replaceChildren(...state.service.costs.map((cost, k) => html("li", { class: "exit", id: `exit-${k}` })));
  byId("key-to-exits").replaceChildren(...[["answer", "answer at this budget"], ["other", "other classes"], ["threshold", "threshold of the policy"]].map(([kind, text]) =>
    html("li", {}, svg("svg", { "aria-hidden": "true" }, svg("rect", { class: `mark-${kind}`, x: kind === "threshold" ? 11 : 1, y: kind === "threshold" ? 0 : 3, width: kind === "threshold" ? 3 : 24, height: kind === "threshold" ? 12 : 6, rx: 2 })), text)),
    html("li", { class: "soft" }, `Score: ${SCORES[state.service.score]}. Costs are cumulative.`));
  byId("preview").hidden = true;
  show("file-name", ""); show("error", "");
  byId("replay").hidden = true;
}

// Send a file, and show its exits.
async function send(file) {
  const { image, max_body: limit } = state.service || {};
  if (!image || !file) return;
  show("error", file.size > limit ? `The file has ${megabytes(file.size)}, but the service accepts at most ${megabytes(limit)}.` : "");
  if (file.size > limit) return;
  showPreview(file);
  explained.sending?.abort();
  explained.sending = new AbortController();
  byId("drop").setAttribute("aria-busy", "true");
  try {
    const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
    explained.answer = await ask("explain", { method: "POST", body: file, headers: { "Content-Type": type }, signal: explained.sending.signal });
    play();
  } catch (error) {
    if (error.name === "AbortError") return;
    forget();
    if (error.status === 401) askForKey(); else show("error", error.message);
  }
  byId("drop").removeAttribute("aria-busy");
}
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

function showPreview(file) {
  const preview = byId("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = "The image that was sent";
  preview.hidden = false;
  show("file-name", file.name);
  byId("choose").textContent = "Choose another image";
}
byId("preview").addEventListener("load", ({ target }) => target.classList.toggle("small", target.naturalWidth < 100));
byId("preview").addEventListener("error", (event) => { event.target.hidden = true; });

// Remove the predictions of an image, whose successor was refused.
function forget() {
  clearTimeout(explained.timer);
  Object.assign(explained, { answer: null, shown: 0 });
  byId("replay").hidden = true;
  showExits();
}

// Show the exits one after the other; those that are not computed at this budget come all at once, at the end.
function play() {
  clearTimeout(explained.timer);
  explained.shown = moves() ? 0 : state.service.costs.length;
  byId("replay").hidden = !moves();
  const next = () => {
    const first = explained.shown;
    explained.shown = first > decision().exit ? state.service.costs.length : first + 1;
    showExits();
    for (let k = first; k < explained.shown; k++) byId(`exit-${k}`).classList.add("fresh");
    if (explained.shown < state.service.costs.length) explained.timer = setTimeout(next, PAUSE);
  };
  showExits();
  explained.timer = setTimeout(next, moves() ? PAUSE / 2 : 0);
}
byId("replay").addEventListener("click", play);

// Where a score lies between the least and the greatest that it can be, or that occurs.
function scorePosition(value) {
  const { score, costs } = state.service;
  const low = ["entropy", "variance"].includes(score)
    ? Math.min(...explained.answer.policies.flatMap(({ scores, thresholds }) => [...scores, ...thresholds].filter(Number.isFinite))) * 1.05
    : 0;
  const high = { entropy: 0, variance: 0, patience: Math.max(1, costs.length - 1) }[score] ?? 1;
  return Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
}

const precise = (value) => (value && Math.abs(value) < 0.001 ? value.toPrecision(3) : value.toFixed(3));

// Two numbers with as many digits as show which is larger.
function compared(a, b) {
  for (let digits = 3; digits < 9; digits++) {
    if (a.toFixed(digits) !== b.toFixed(digits)) return [a.toFixed(digits), b.toFixed(digits)];
  }
  return [a.toFixed(3), b.toFixed(3)];
}

function track(position, mark) {
  const fill = html("i"), line = mark === undefined ? null : html("b");
  fill.style.width = `${100 * position}%`;
  if (line) line.style.left = `${100 * mark}%`;
  return html("span", { class: "track", "aria-hidden": "true" }, fill, line);
}

const labelOf = ({ label, class: number }) => label ?? `class ${number}`;
const isLast = (k) => k === state.service.costs.length - 1;

function showClasses(k) {
  if (k >= explained.shown) return [...Array(5).keys()].map(() => html("li", { class: "empty", "aria-hidden": "true" }, html("bdi", {}, "–"), html("span"), track(0)));
  const answer = explained.answer.exits[decision().exit].top[0].class;
  return explained.answer.exits[k].top.map((entry) => html("li", { class: entry.class === answer ? "answer" : "" },
    html("bdi", { title: labelOf(entry) }, labelOf(entry)), html("span", {}, percent(entry.probability)), track(entry.probability)));
}

function showScore(k) {
  const threshold = selected().thresholds[k];
  const known = k < explained.shown, score = known ? decision().scores[k] : null;
  if (!Number.isFinite(threshold)) {
    const all = isLast(k) ? "all remaining exit" : threshold === "-inf" ? "all exit here" : "none exit here";
    return html("p", { class: `meter${known && threshold === "-inf" ? " reached" : ""}` },
      html("span", {}, html("span", {}, known ? `score ${precise(score)}` : "score"), html("span", { class: "soft" }, all)), track(known ? scorePosition(score) : 0));
  }
  const [shown, limit] = known ? compared(score, threshold) : ["", String(Number(threshold.toFixed(4)))];
  const position = explained.answer ? scorePosition(threshold) : ["entropy", "variance"].includes(state.service.score) ? undefined : scorePosition(threshold);
  return html("p", { class: `meter${known && score >= threshold ? " reached" : ""}` },
    html("span", {}, html("span", {}, `score ${shown}`), html("span", { class: "threshold" }, `threshold ${limit}`)), track(known ? scorePosition(score) : 0, position));
}

function showExit(k) {
  const cost = state.service.costs[k], exit = explained.answer ? decision().exit : null, known = k < explained.shown;
  const status = !known ? "" : k < exit ? "passed" : k === exit ? "taken" : "beyond";
  const mark = { passed: "continues", taken: "exits here", beyond: "not needed" }[status];
  const card = byId(`exit-${k}`);
  card.className = `exit ${status}`;
  card.replaceChildren(
    html("header", {}, html("h3", {}, `Exit ${k + 1}`), mark ? html("span", { class: "mark" }, mark) : null),
    html("ul", { class: "classes", "aria-label": `Most probable classes at exit ${k + 1}` }, showClasses(k)),
    showScore(k),
    html("p", { class: "meter cost" }, html("span", {}, html("span", {}, `cost ${amount(cost, state.service.unit)}`), html("span", {}, share(cost))), track(cost / fullCost())));
}

// The lead says where the image is, or what the result is; only the result is announced.
function describeExit() {
  const { costs, unit, score } = state.service, lead = byId("lead");
  if (!explained.answer) { lead.textContent = "Every exit predicts the class. The image stops at the first exit that is certain enough for the budget, and the exits after it are not computed."; return; }
  const { exit, scores } = decision(), done = explained.shown >= costs.length;
  const at = done ? exit : Math.max(0, explained.shown - 1), { top } = explained.answer.exits[at];
  const best = [html("strong", {}, html("bdi", {}, labelOf(top[0]))), `, ${percent(top[0].probability)}`];
  if (!explained.shown) lead.replaceChildren("Running exit 1.");
  else if (!done) lead.replaceChildren(`Exit ${at + 1} predicts `, ...best, at < exit ? `. Its ${SCORES[score]} of ${precise(scores[at])} is below the threshold, so the image continues.` : ".");
  else {
    const answers = explained.answer.exits.map(({ top: [first] }) => first.class), last = answers.at(-1);
    const later = exit === costs.length - 1 ? [] : answers.slice(exit).every((each) => each === last) ? [" The later exits predict the same."]
      : [" The last exit predicts ", html("bdi", {}, labelOf(explained.answer.exits.at(-1).top[0])), "."];
    lead.replaceChildren(`At a budget of ${amount(selected().budget, unit)}, the image exits at `, html("strong", { class: "ours" }, `exit ${exit + 1} of ${costs.length}`), " with ", ...best,
      `. It costs ${amount(costs[exit], unit)}, `, html("strong", { class: "ours" }, `${share(costs[exit])} of the full cost`), ".", ...later);
    clearTimeout(explained.announcing);
    explained.announcing = setTimeout(() => { byId("announce").textContent = lead.textContent; }, 400);
  }
}

function showExits() {
  state.service.costs.forEach((_, k) => showExit(k));
  describeExit();
}
followers.push(showExits);

// File, drop and paste

byId("file").addEventListener("change", (event) => { send(event.target.files[0]); event.target.value = ""; });
addEventListener("dragover", (event) => { event.preventDefault(); byId("drop").classList.add("over"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) byId("drop").classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  if (event.dataTransfer.files.length) send(event.dataTransfer.files[0]);
  else if (state.service) show("error", "That is not a file. Save the image first, then drop the file.");
});
addEventListener("paste", (event) => { if (event.clipboardData.files.length) send(event.clipboardData.files[0]); });
