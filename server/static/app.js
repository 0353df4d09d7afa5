"use strict";

import { button, cell, cells, draw, fill, headings, link, ms, plain, short } from "./drawing.js";
import { makeKey, showAudit, showKeys } from "./admin.js";
import { showOne } from "./one.js";
import { ask, find, guarded, reason, states } from "./service.js";

const VIEWS = ["sign-in", "plan", "plans", "one", "jobs", "models", "keys", "audit"];
let search = null;
let watched = null;
let running = null;
let listFields = [];
let compared = [];
/* Columns of the lists: fields of what they hold. */
let columns = {};

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

/* Fields by column, as chosen for the list that is shown; empty for a column to ignore. */
let chosenColumns = {};

/* Tables by name, the object of a tables.json, or a list for the service to read. */
async function givenTables() {
  const file = find("tables-file").files[0];
  const text = file ? await file.text() : find("tables-text").value.trim();
  if (!text) return find("tables").value;
  try {
    const document = JSON.parse(text);
    if (document && document.schema) return document;
  } catch { /* another syntax */ }
  const content = file ? { base64: await encoded(file) } : { text };
  const batch = find("batch").value;
  return { ...content, ...(batch ? { batch_size: Number(batch) } : {}), columns: chosenColumns };
}

async function encoded(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  return btoa(text);
}

/* How the service reads a list: a field for each column, which can be changed, and what is wrong or left open. */
const showList = guarded(async () => {
  const tables = await givenTables();
  find("list").hidden = typeof tables === "string" || "schema" in tables;
  if (find("list").hidden) return;
  const found = await ask("POST", "/v1/validations", { tables });
  const unread = found.faults.map((one) => /^tables\.column (".*")$/.exec(one.field || "")).filter(Boolean).map((one) => JSON.parse(one[1]));
  const read = { ...(found.columns || {}) };
  for (const column of [...unread, ...Object.keys(chosenColumns)]) read[column] = chosenColumns[column] ?? null;
  const rows = Object.entries(read).map(([column, field]) => [column, choice(column, field)]);
  fill("columns", [["column", "name"], ["read as"]], rows);
  const lines = found.is_valid ? [`${found.num_tables.toLocaleString("en")} tables.`, ...found.notes] : found.faults.map((one) => one.detail);
  find("list-notes").replaceChildren(...lines.map((line) => cell(line, "", "li")));
});

function choice(column, field) {
  const select = document.createElement("select");
  select.setAttribute("aria-label", `Field of column ${column}`);
  const options = [...listFields.map((name) => [name, name]), ["ignored", "-"]];
  select.replaceChildren(new Option("not known", "?"), ...options.map(([name, value]) => new Option(name, value)));
  select.value = field === null ? "?" : field || "-";
  select.addEventListener("change", () => {
    if (select.value === "?") delete chosenColumns[column];
    else chosenColumns[column] = select.value === "-" ? "" : select.value;
    showList();
  });
  return select;
}

const newList = () => {
  chosenColumns = {};
  showList();
};

async function task() {
  return { tables: await givenTables(), topology: await given("topology"), time_limit_s: Number(find("limit").value) };
}

function follow(job, done) {
  const points = [];
  const started = performance.now();
  running = job.id;
  find("search").hidden = false;
  find("best").textContent = "Waiting";
  draw(points, 0);
  if (search) search.close();
  search = states(job.id, async (state, isOver) => {
    const seconds = (performance.now() - started) / 1000;
    const best = /^best ([0-9.eE+-]+) ms/.exec(state.progress || "");
    if (best) {
      points.push([seconds, Number(best[1])]);
      find("best").textContent = `${ms(best[1])} ms`;
    }
    draw(points, seconds);
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
    if (!find("view-plan").hidden) location.hash = `#one/${state.plan_id}`;  // what else is looked at stays
  });
});

const comparePlanners = guarded(async () => {
  const found = await ask("POST", "/v1/comparisons", { ...(await task()), planners: compared });
  const step = (one) => one.predicted_step_ms ?? Infinity;
  const ranked = found.comparison.planners.sort((one, other) => (step(one) < step(other) ? -1 : 1));
  const rows = ranked.map((one) => {
    return [one.planner, ms(one.predicted_step_ms), ms(one.predicted_max_kernel_ms),
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
    return [choice, ...cells(columns.plans, plan, { id: () => link(short(plan.id), `#one/${plan.id}`) })];
  });
  fill("listed", headings(columns.plans, ["choose"]), rows);
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
    found.tables.map((one) => [one.table, one.change, one.before, one.after]));
  find("difference").hidden = false;
});

/* Jobs and models. */

async function showJobs() {
  const page = await ask("GET", "/v1/jobs?limit=50");
  const rows = page.jobs.map((job) => [
    ...cells(columns.jobs, job, { id: () => link(short(job.id), `#jobs/${job.id}`) }),
    ["queued", "running"].includes(job.state)
      ? button("Cancel", async () => { await ask("POST", `/v1/jobs/${job.id}/cancel`); await showJobs(); })
      : ["failed", "cancelled"].includes(job.state)
        ? button("Try again", async () => { await ask("POST", `/v1/jobs/${job.id}/retry`); await showJobs(); })
        : ""]);
  fill("worked", headings(columns.jobs, [], ["change"]), rows);
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
  const rows = found.models.map((one) => [...cells(columns.models, one), one.used ? "" : actions(one)]);
  fill("trained", headings(columns.models, [], ["change"]), rows);
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
  listFields = found.table_fields;
  compared = found.planners.filter((one) => one.is_compared).map((one) => one.name);
  columns = found.columns;
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
  if (!["sign-in", "one"].includes(view)) await catalogue();
  if (view === "plans") await list(true);
  if (view === "one") await showOne(id);
  if (view === "jobs") { await showJobs(); watch(id); }
  if (view === "models") await showModels();
  if (view === "keys") { find("made-key").hidden = true; await showKeys(columns); }
  if (view === "audit") await showAudit(columns, true);
});

addEventListener("hashchange", () => { go(); find("main").focus(); });
addEventListener("DOMContentLoaded", () => {
  find("skip").addEventListener("click", (event) => {  // the address names the view
    event.preventDefault();
    find("main").focus();
  });
  find("task").addEventListener("submit", makePlan);
  for (const id of ["tables-file", "tables-text"]) find(id).addEventListener("change", newList);
  find("batch").addEventListener("change", showList);
  find("compare").addEventListener("click", comparePlanners);
  find("cancel").addEventListener("click", guarded(async () => { if (running) await ask("POST", `/v1/jobs/${running}/cancel`); }));
  find("find").addEventListener("submit", guarded(() => list(true)));
  find("more").addEventListener("click", guarded(() => list(false)));
  find("diff").addEventListener("click", showDifference);
  find("new-key").addEventListener("submit", makeKey(() => columns));
  find("find-audit").addEventListener("submit", guarded(() => showAudit(columns, true)));
  find("more-audit").addEventListener("click", guarded(() => showAudit(columns, false)));
  find("sign-in").addEventListener("submit", guarded(async () => {
    await ask("POST", "/page/session", undefined, { Authorization: `Bearer ${find("key").value.trim()}` });
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
