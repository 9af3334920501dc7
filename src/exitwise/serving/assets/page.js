// The page of a service: what it asks the service for, the budget that is selected, and the start.

const state = { key: "", service: null, stats: null, policy: 0 };
const followers = []; // called whenever the policy that is selected, or the one in use, changes
const policies = () => state.service.policies;
const selected = () => policies()[state.policy];
const inUse = () => (state.stats ? state.stats.now.policy : state.service.allowed[1]);
const update = () => followers.forEach((follower) => follower());
const fullCost = () => state.service.costs.at(-1);
const share = (cost) => percent(cost / fullCost(), 0);
const accuracy = (policy) => policy.expected_accuracy === undefined ? null : percent(policy.expected_accuracy);

function show(id, text) {
  byId(id).hidden = !text;
  byId(id).textContent = text || "";
}

// Ask the service; errors have one line for people, and the status, 0 if there was no answer.
async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers: { ...options.headers, ...(state.key ? { "X-API-Key": state.key } : {}) } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("The service does not answer."), { status: 0 });
  }
  const answer = await response.json().catch(() => ({ error: `the answer is not JSON (status ${response.status})` }));
  if (response.ok && !answer.error) return answer;
  const retry = response.headers.get("Retry-After");
  const message = `${sentence(answer.error)}${retry ? ` Try again in ${retry} s.` : ""}`;
  throw Object.assign(new Error(message), { status: response.status });
}
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

// API key

function askForKey() {
  const again = Boolean(state.key);
  state.key = "";
  byId("key-form").hidden = false;
  byId("content").hidden = byId("bar").hidden = true;
  show("problem", again ? "The service does not accept this key." : "");
  show("summary", again ? "" : "This service needs an API key.");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  connect();
});

// Budget

// The policy that a request with this budget gets, when the service is not loaded.
function policyFor(budget) {
  const affordable = policies().reduce((best, policy, i) => (policy.budget <= budget * (1 + 1e-9) ? i : best), 0);
  return Math.min(affordable, state.service.allowed[1]);
}

function select(policy, budget = policies()[policy].budget) {
  state.policy = policy;
  byId("budget").value = budget;
  update();
}

function showBudget() {
  const { budget, cost } = selected(), known = accuracy(selected()), { unit } = state.service;
  const text = `${amount(budget, unit)} (${share(budget)})`;
  byId("budget").setAttribute("aria-valuetext", `${text}${known ? `, expected accuracy ${known}` : ""}`);
  byId("amount").textContent = text;
  byId("short").textContent = `${known ? `expected accuracy ${known}, ` : ""}mean cost ${amount(cost, unit)}; policy ${state.policy + 1} of ${policies().length}${state.policy === inUse() ? ", in use now" : ""}`;
}
followers.push(showBudget);

byId("budget").addEventListener("input", (event) => {
  byId("follow").checked = false;
  select(policyFor(Number(event.target.value)), Number(event.target.value));
});
byId("budget").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
  if (!step) return;
  event.preventDefault(); // a press is a policy, not a pixel
  byId("follow").checked = false;
  select(Math.max(0, Math.min(policies().length - 1, state.policy + step)));
});
byId("follow").addEventListener("change", () => { if (byId("follow").checked) select(inUse()); });

// Start

function describeService() {
  const { model, costs, num_classes: classes, method, image } = state.service, several = policies().length > 1;
  const budgets = policies().map((policy) => policy.budget);
  document.title = `${model} · exitwise serve`;
  byId("title").textContent = model;
  show("summary", `${costs.length} ${costs.length > 1 ? "exits" : "exit"}, ${grouped(classes)} classes, ${policies().length} ${several ? "policies" : "policy"}. Method: ${method}.`);
  Object.assign(byId("budget"), { min: Math.min(...budgets), max: Math.max(...budgets) });
  byId("budgets").replaceChildren(...budgets.map((value) => html("option", { value })));
  byId("bar").hidden = !several;
  byId("try").hidden = !image;
  show("image-note", image ? "" : `The bundle has no preprocessing for image files, so this page cannot send it an image. Send tensors to /v2/models/${model}/infer.`);
  byId("content").hidden = false;
}

async function connect() {
  try {
    state.service = await ask("explain");
    state.stats = await ask("stats");
  } catch (error) {
    if (error.status === 401) askForKey();
    else { show("problem", `${error.message} Trying again.`); setTimeout(connect, 3000); }
    document.documentElement.dataset.ready = "yes";
    return;
  }
  show("problem", "");
  describeService();
  buildExits();
  buildPolicies();
  select(inUse());
  buildLoad();
  document.documentElement.dataset.ready = "yes";
  setTimeout(poll, POLL);
}
