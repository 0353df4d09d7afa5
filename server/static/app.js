"use strict";

const find = (id) => document.getElementById(id);
const VIEWS = ["sign-in", "plan", "plans", "one", "jobs", "models"];
let search = null;
let watched = null;
let running = null;

/* Talking to the service. Names come from clients: they are only ever set as text. */

async function ask(method, path, body, headers = {}) {
  const answer = await fetch(path, {
    method,
    credentials: "same-origin",
    headers: { "X-Autoshard-Page": "1", ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.status === 401) {
    location.hash = "#sign-in";
    throw new Error("This service needs a key.");
  }
  const text = await answer.text();
  if (!answer.ok) throw new Error(reason(text, `The service answered with status ${answer.status}.`));
  return text ? JSON.parse(text) : null;
}

/* What a problem says, and the changes that would help. What stands between here and the service may answer otherwise. */
function reason(problem, otherwise) {
  let found = problem;
  try {
    if (typeof problem === "string") found = JSON.parse(problem);
  } catch {
    return otherwise;
  }
  if (!found) return otherwise;
  const remedies = (found.remedies || []).map((one) => `It would be feasible with ${one.field} = ${JSON.stringify(one.value)}.`);
  return [found.detail || found.title || otherwise, ...remedies].join("\n");
}

/* The states of a job until it has ended. A browser asks again by itself, unless it was refused. */
function states(id, take) {
  const stream = new EventSource(`/v1/jobs/${id}/events`);
  stream.addEventListener("job", guarded(async (event) => {
    const state = JSON.parse(event.data);
    const isOver = !["queued", "running"].includes(state.state);
    if (isOver) stream.close();
    await take(state, isOver);
  }));
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) tell(new Error("The job cannot be watched any more: sign in, or load the page again."));
  });
  return stream;
}

function tell(error) {
  find("message").textContent = error ? error.message : "";
  find("message").hidden = !error;
}

const guarded = (work) => async (event) => {
  if (event && event.preventDefault) event.preventDefault();
  tell(null);
  try {
    await work(event);
  } catch (error) {
    tell(error);
  }
};

/* Drawing. */

function cell(content, kind, tag = "td") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (content instanceof Node) made.append(content);
  else made.textContent = content === null || content === undefined ? "" : String(content);
  return made;
}

function fill(id, columns, rows) {
  const table = find(id);
  const head = document.createElement("tr");
  for (const [title, kind] of columns) {
    const heading = cell(title, kind, "th");
    heading.scope = "col";
    head.append(heading);
  }
  const lines = rows.map((cells) => {
    const line = document.createElement("tr");
    cells.forEach((content, index) => line.append(cell(content, columns[index][1])));
    return line;
  });
  const header = document.createElement("thead");
  header.append(head);
  const body = document.createElement("tbody");
  body.append(...lines);
  table.replaceChildren(header, body);
}

function link(text, target) {
  const made = document.createElement("a");
  made.textContent = text;
  made.href = target;
  return made;
}

function button(text, work) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", guarded(work));
  return made;
}

const plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? ms(value) : value === null ? "none" : String(value));
const short = (id) => id.replace("sha256:", "").slice(0, 12);
const ms = (value) => (value === null || value === undefined ? "" : Number(value).toPrecision(4));

function draw(points) {
  const svg = find("curve");
  const shape = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };
  if (points.length === 0) {
    svg.replaceChildren();
    return;
  }
  const last = Math.max(1, points[points.length - 1][0]);
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (seconds) => 60 + (seconds / last) * 520;
  const y = (value) => (high === low ? 70 : 20 + ((high - value) / (high - low)) * 110);
  const steps = points.flatMap((point, index) =>
    index === 0 ? [[x(point[0]), y(point[1])]] : [[x(point[0]), y(points[index - 1][1])], [x(point[0]), y(point[1])]]);
  svg.replaceChildren(
    shape("polyline", { points: steps.map((step) => step.join(",")).join(" ") }),
    shape("text", { x: 4, y: y(high) + 4 }, `${ms(high)} ms`),
    ...(high === low ? [] : [shape("text", { x: 4, y: y(low) + 4 }, `${ms(low)} ms`)]),
    shape("text", { x: 540, y: 154 }, `${last.toFixed(1)} s`),
  );
}

/* Planning. */

async function given(name) {
  const file = find(`${name}-file`).files[0];
  const text = file ? await file.text() : find(`${name}-text`).value.trim();
  if (!text) return find(name).value;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: is not JSON: ${error.message}`);
  }
}

async function task() {
  return { tables: await given("tables"), topology: await given("topology"), time_limit_s: Number(find("limit").value) };
}

function follow(job, done) {
  const points = [];
  const started = performance.now();
  running = job.id;
  find("search").hidden = false;
  find("best").textContent = "Waiting";
  draw(points);
  if (search) search.close();
  search = states(job.id, async (state, isOver) => {
    const best = /^best ([0-9.eE+-]+) ms/.exec(state.progress || "");
    if (best) {
      points.push([(performance.now() - started) / 1000, Number(best[1])]);
      find("best").textContent = `${ms(best[1])} ms`;
      draw(points);
    }
    if (!isOver) return;
    running = null;
    find("search").hidden = true;
    if (state.state === "succeeded") await done(state);
    else throw new Error(reason(state.problem, `The job was ${state.state}.`));
  });
}

const makePlan = guarded(async () => {
  const body = { ...(await task()), planner: find("planner").value };
  const job = await ask("POST", "/v1/plans", body, { Prefer: "respond-async" });
  follow(job, (state) => {
    location.hash = `#one/${state.plan_id}`;
  });
});

const comparePlanners = guarded(async () => {
  const planners = ["cost-greedy", "neo", "flexshard", "auto"].filter((name) =>
    [...find("planner").options].some((option) => option.value === name));
  const found = await ask("POST", "/v1/comparisons", { ...(await task()), planners });
  const rows = found.comparison.planners.map((one) => {
    const predicted = (found.plans[one.planner] || {}).predicted;
    return [one.planner, ms(predicted && predicted.step_ms.value), ms(one.predicted_max_kernel_ms),
      one.predicted_balance === null ? "" : `${(100 * one.predicted_balance).toFixed(1)}%`, one.failure || ""];
  });
  fill("compared", [["planner"], ["predicted step, ms", "number"], ["slowest kernel, ms", "number"], ["balance", "number"],
    ["remark", "name"]], rows);
  find("comparison").hidden = false;
});

/* Stored plans. */

let listed = [];
let next = null;

async function list(again) {
  const query = new URLSearchParams({ limit: "50" });
  if (find("text").value) query.set("text", find("text").value);
  if (!again && next) query.set("cursor", next);
  const page = await ask("GET", `/v1/plans?${query}`);
  listed = again ? page.plans : [...listed, ...page.plans];
  next = page.next;
  find("more").hidden = !next;
  const rows = listed.map((plan) => {
    const choice = document.createElement("input");
    choice.type = "checkbox";
    choice.value = plan.id;
    choice.setAttribute("aria-label", `Choose plan ${short(plan.id)}`);
    choice.addEventListener("change", () => { find("diff").disabled = chosen().length !== 2; });
    return [choice, link(short(plan.id), `#one/${plan.id}`), plan.created_at.slice(0, 19).replace("T", " "), plan.planner,
      plan.device, plan.num_tables, plan.num_ranks, ms(plan.step_ms)];
  });
  fill("listed", [["choose"], ["plan"], ["made, UTC"], ["planner"], ["device"], ["tables", "number"], ["ranks", "number"],
    ["predicted step, ms", "number"]], rows);
  find("diff").disabled = true;
}

const chosen = () => [...find("listed").querySelectorAll("input:checked")].map((one) => one.value);

const showDifference = guarded(async () => {
  const [other, one] = chosen();
  const found = await ask("GET", `/v1/plans/${one}/diff/${other}`);
  const facts = [
    ["step before", found.step_ms_before && `${ms(found.step_ms_before.value)} ms`],
    ["step after", found.step_ms_after && `${ms(found.step_ms_after.value)} ms`],
    ["within the 90% intervals", found.is_within_intervals === null ? null : found.is_within_intervals ? "yes" : "no"],
    ["tables held alike", found.num_alike],
    ["MiB to move", (found.received_bytes / 2 ** 20).toFixed(1)],
    ...[...found.task, ...found.parts].map((one) => [one.name.replaceAll("_", " "), `${plain(one.before)} → ${plain(one.after)}`]),
  ].filter(([, value]) => value !== null);
  find("changes").replaceChildren(...facts.flatMap(([name, value]) => [cell(name, "", "dt"), cell(value, "", "dd")]));
  fill("moved", [["table", "name"], ["change"], ["before", "name"], ["after", "name"]],
    found.tables.slice(0, 500).map((one) => [one.table, one.change, one.before, one.after]));
  find("difference").hidden = false;
});

async function showOne(id) {
  find("one-title").textContent = `Plan ${short(id)}`;
  find("download").href = `/v1/plans/${id}`;
  find("download").download = `plan-${short(id)}.json`;
  find("report").href = find("drawn").src = `/v1/plans/${id}/report`;
  find("explained").hidden = true;
  find("explain").onclick = guarded(async () => {
    const found = await ask("GET", `/v1/plans/${id}/explanation`);
    const rows = found.tables.map((one) => {
      const best = one.alternatives.find((other) => other.step_ms !== null);
      return [one.table, one.option, one.reason, best ? best.option : "", best ? ms(best.step_ms) : ""];
    });
    fill("alternatives", [["table", "name"], ["held", "name"], ["why", "name"], ["best alternative", "name"], ["step then, ms", "number"]], rows);
    find("explained").hidden = false;
    find("explained").focus();
  });
  find("delete").onclick = guarded(async () => {
    await ask("DELETE", `/v1/plans/${id}`);
    location.hash = "#plans";
  });
}

/* Jobs and models. */

async function showJobs() {
  const page = await ask("GET", "/v1/jobs?limit=50");
  const rows = page.jobs.map((job) => [
    link(job.id.slice(0, 12), `#jobs/${job.id}`), job.kind, job.state, job.created_at.slice(0, 19).replace("T", " "), job.progress,
    ["queued", "running"].includes(job.state)
      ? button("Cancel", async () => { await ask("POST", `/v1/jobs/${job.id}/cancel`); await showJobs(); })
      : ["failed", "cancelled"].includes(job.state)
        ? button("Try again", async () => { await ask("POST", `/v1/jobs/${job.id}/retry`); await showJobs(); })
        : ""]);
  fill("worked", [["job"], ["kind"], ["state"], ["made, UTC"], ["progress", "name"], [""]], rows);
}

function watch(id) {
  if (watched) watched.close();
  find("watched").hidden = !id;
  if (!id) return;
  watched = states(id, async (state, isOver) => {
    const problem = state.problem ? reason(state.problem, "") : "";
    find("log").textContent = [state.state, state.log, problem].filter(Boolean).join("\n");
    if (isOver) await showJobs();
  });
}

async function showModels() {
  const found = await ask("GET", "/v1/models");
  const rows = found.models.map((one) => [
    one.used ? "★" : "", one.kind, one.name, one.id, one.aliases.join(", "),
    one.relative_error === null ? "" : `${(100 * one.relative_error).toFixed(2)}%`, one.shipped ? "shipped" : one.published_at,
    one.used ? "" : actions(one)]);
  fill("trained", [["in use"], ["kind"], ["device"], ["version"], ["aliases"], ["held-out error", "number"], ["published"], [""]], rows);
}

function actions(model) {
  const change = (alias) => async () => {
    await ask("POST", `/v1/models/${model.kind}/${model.name}/promotions`, { version: model.id, alias });
    await showModels();
  };
  const both = document.createElement("span");
  both.append(button("Try", change("candidate")), " ", button("Promote", change("production")));
  return both;
}

/* Getting about. */

async function catalogue() {
  find("leave").hidden = !(await ask("GET", "/page/session")).signed_in;
  if (find("planner").options.length) return;
  const found = await ask("GET", "/v1/catalogue");
  for (const [id, names, usual] of [["tables", found.tables, "criteo-kaggle"], ["topology", found.topologies, "a100-8"],
    ["planner", found.planners.map((one) => one.name), "auto"]]) {
    find(id).replaceChildren(...names.map((name) => new Option(name, name, name === usual, name === usual)));
  }
}

const go = guarded(async () => {
  const [name, id] = (location.hash.slice(1) || "plan").split("/");
  const view = VIEWS.includes(name) ? name : "plan";
  if (watched) watched.close();
  for (const other of VIEWS) find(`view-${other}`).hidden = other !== view;
  for (const one of document.querySelectorAll("nav a")) {
    if (one.getAttribute("href") === `#${view}`) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  if (view === "plan") await catalogue();
  if (view === "plans") await list(true);
  if (view === "one") await showOne(id);
  if (view === "jobs") { await showJobs(); watch(id); }
  if (view === "models") await showModels();
});

addEventListener("hashchange", () => { go(); find("main").focus(); });
addEventListener("DOMContentLoaded", () => {
  find("task").addEventListener("submit", makePlan);
  find("compare").addEventListener("click", comparePlanners);
  find("cancel").addEventListener("click", guarded(async () => { if (running) await ask("POST", `/v1/jobs/${running}/cancel`); }));
  find("find").addEventListener("submit", guarded(() => list(true)));
  find("more").addEventListener("click", guarded(() => list(false)));
  find("diff").addEventListener("click", showDifference);
  find("sign-in").addEventListener("submit", guarded(async () => {
    await ask("POST", "/page/session", { key: find("key").value });
    find("key").value = "";
    location.hash = "#plan";
  }));
  find("leave").addEventListener("click", guarded(async () => {
    await ask("DELETE", "/page/session");
    find("leave").hidden = true;
    location.hash = "#sign-in";
  }));
  go();
});
