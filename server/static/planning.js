"use strict";

/* The view that plans: what is asked, how far the search is, and planners side by side. */

import { bytes, cell, draw, fill, link, ms, share, short, state } from "./drawing.js";
import { ask, failure, find, guarded, reason, states, tell } from "./service.js";

/* Fields whose contents stay over a reload and a sign-in; files cannot. */
const KEPT = ["tables", "tables-text", "batch", "topology", "topology-text", "planner", "limit", "seed", "payload", "risk", "constraints", "start", "options"];
/* Milliseconds between two pictures of the clock. */
const TICK_MS = 200;

let listFields = [];
let planners = [];
/* Fields by column, as chosen for the list that is shown; empty for a column to ignore. */
let chosenColumns = {};
let search = null;
let clock = null;
let running = null;
let isSearching = false;
let checks = 0;

export function offer(found) {
  listFields = found.table_fields;
  planners = found.planners.filter((one) => one.is_compared);
  for (const [id, names, usual] of [["tables", found.tables, "criteo-kaggle"], ["topology", found.topologies, "a100-8"],
    ["planner", found.planners.map((one) => one.name), "auto"]]) {
    find(id).replaceChildren(...names.map((name) => new Option(name, name, name === usual, name === usual)));
  }
  for (const [id, value] of Object.entries(JSON.parse(sessionStorage.getItem("task") || "{}"))) {
    const { options } = find(id);
    if (!options || [...options].some((one) => one.value === value)) find(id).value = value;
  }
  if (["tables-text", "topology-text"].some((id) => find(id).value)) check();
  const job = sessionStorage.getItem("search");
  if (job) follow(job, Number(find("limit").value));
}

function keep() {
  try {
    sessionStorage.setItem("task", JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, find(id).value]))));
  } catch {
    sessionStorage.removeItem("task");  // more than a browser keeps
  }
}

/* What is asked. */

async function givenTopology() {
  const file = find("topology-file").files[0];
  const text = file ? await file.text() : find("topology-text").value.trim();
  return text ? parsed(text, "topology", "The topology") : find("topology").value;
}

function parsed(text, field, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw failure({ detail: `${name} cannot be read as JSON: ${error.message}`, field });
  }
}

/* Limits of tables; none where nothing is given. */
const givenConstraints = () => parsed(find("constraints").value.trim() || "{}", "constraints", "The constraints");

/* The plan to start from, if there is one. */
async function givenStart() {
  const text = find("start").value.trim();
  if (!text) return null;
  if (!text.startsWith("sha256:")) return parsed(text, "start", "The start");
  try {
    return (await ask("GET", `/v1/plans/${text}`)).plan;
  } catch (error) {
    throw failure({ detail: error.message, field: "start" });
  }
}

/* Tables by name, the object of a tables.json, or a list for the service to read. */
async function givenTables() {
  const file = find("tables-file").files[0];
  const text = file ? await file.text() : find("tables-text").value.trim();
  if (!text) return find("tables").value;
  try {
    const document = JSON.parse(text);
    if (document && document.schema) return document;
  } catch {
    // a list in another syntax, JSON lines too, which the service reads
  }
  const content = file ? { base64: await encoded(file) } : { text };
  const batch = find("batch").value;
  return { ...content, ...(batch ? { batch_size: Number(batch) } : {}), columns: chosenColumns };
}

async function encoded(file) {
  const content = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < content.length; start += 32768) text += String.fromCharCode(...content.subarray(start, start + 32768));
  return btoa(text);
}

/* A planner's own options: lines of NAME=VALUE. */
function givenOptions() {
  const lines = find("options").value.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => {
    const [, name, text] = /^([^=\s]+)\s*=\s*(.*)$/.exec(line) || [];
    if (!name) throw failure({ detail: `Planner options are lines of NAME=VALUE, got ${JSON.stringify(line)}`, field: "options" });
    return [name, /^(true|false|-?\d+(\.\d+)?(e-?\d+)?)$/i.test(text) ? JSON.parse(text.toLowerCase()) : text];
  }));
}

async function task() {
  const [tables, topology, start] = [await givenTables(), await givenTopology(), await givenStart()];
  return { tables, topology, constraints: givenConstraints(), ...(start ? { start } : {}), time_limit_s: Number(find("limit").value), seed: Number(find("seed").value), payload: find("payload").value };
}

/* Says what the service reads, as soon as it is given: sizes, columns of a list, and what is wrong. */
const check = guarded(async () => {
  const number = ++checks;
  const [tables, topology] = [await givenTables(), await givenTopology()];
  const isList = typeof tables === "object" && !("schema" in tables);
  const found = await ask("POST", "/v1/validations", { tables, topology, constraints: givenConstraints() });
  if (number !== checks) return;  // something else is given by now
  const unread = found.faults.map((one) => /^tables\.column (".*")$/.exec(one.field || "")).filter(Boolean).map((one) => JSON.parse(one[1]));
  const read = { ...(found.columns || {}) };
  for (const column of [...unread, ...Object.keys(chosenColumns)]) read[column] = chosenColumns[column] ?? null;
  find("list").hidden = !isList;
  fill("columns", [["column", "name"], ["read as"]], Object.entries(read).map(([column, field]) => [column, choice(column, field)]));
  const note = (id, lines) => find(id).replaceChildren(cell(lines.filter(Boolean).join("\n"), "", "span"));
  note("tables-notes", [found.num_tables && `${found.num_tables.toLocaleString("en")} tables, ${bytes(found.table_bytes)} with optimizer state.`, ...found.notes]);
  note("topology-notes", [found.num_ranks && `${found.num_ranks.toLocaleString("en")} ranks, ${bytes(found.hbm_bytes)} of device memory together.`]);
  if (!found.is_valid) throw failure({ faults: found.faults, field: found.faults[0].field });
  await givenStart();
});

function choice(column, field) {
  const select = document.createElement("select");
  select.setAttribute("aria-label", `Field of column ${column}`);
  const options = [...listFields.map((name) => [name, name]), ["ignored", "-"]];
  select.replaceChildren(new Option("not known", "?"), ...options.map(([name, value]) => new Option(name, value)));
  select.value = field === null ? "?" : field || "-";
  select.addEventListener("change", (event) => {
    event.stopPropagation();
    if (select.value === "?") delete chosenColumns[column];
    else chosenColumns[column] = select.value === "-" ? "" : select.value;
    check();
  });
  return select;
}

/* Something else is given. A chosen file goes before a text, and can be taken back. */
function given(event) {
  const { id } = event.target;
  tell(null);
  keep();
  if (/^tables/.test(id)) chosenColumns = {};
  for (const name of ["tables", "topology"]) {
    const has = find(`${name}-file`).files.length > 0;
    find(`${name}-remove`).hidden = !has;
    find(name).disabled = has || find(`${name}-text`).value.trim() !== "";
    find(`${name}-text`).disabled = has;
  }
  if (/^(tables|topology|batch|constraints|start)/.test(id)) check();
}

/* The search. */

function follow(id, limit) {
  const points = [];
  let begun = null;
  running = id;
  isSearching = false;
  sessionStorage.setItem("search", id);
  find("search").hidden = false;
  find("best").textContent = "Waiting for a worker";
  state("shape", []);
  find("spent").max = limit;
  if (search) search.close();
  clearInterval(clock);
  const tick = () => {
    const seconds = begun === null ? 0 : (performance.now() - begun) / 1000;
    find("spent").value = Math.min(seconds, limit);
    find("times").textContent = begun === null ? "" : `${seconds.toFixed(0)} s of ${limit} s, ${Math.max(0, limit - seconds).toFixed(0)} s left`;
    draw(points, seconds, limit);
    return seconds;
  };
  clock = setInterval(tick, TICK_MS);
  tick();
  search = states(id, async (job, isOver) => {
    isSearching = job.state === "running";
    if (isSearching && begun === null) {
      begun = performance.now() - Math.max(0, Date.parse(job.seen_at) - Date.parse(job.started_at));
      find("best").textContent = "Searching for a first plan";
    }
    const [, best, facts] = /^best ([0-9.eE+-]+) ms after \d+ steps; (.*)/.exec(job.progress) || [];
    if (best) {
      points.push([tick(), Number(best)]);
      find("best").textContent = `${ms(best)} ms`;
      state("shape", facts.split("; ").map((fact) => fact.split(": ")));
    }
    if (!isOver) return;
    running = null;
    clearInterval(clock);
    sessionStorage.removeItem("search");
    find("search").hidden = true;
    if (job.state === "cancelled") throw failure({ detail: "The job was stopped before its search began; there is no plan." });
    if (job.state !== "succeeded") throw failure(job.problem, `The job has ${job.state}: its log says more, under Jobs.`);
    if (!find("view-plan").hidden) location.hash = `#one/${job.plan_id}`;  // what else is looked at stays
  });
}

const make = async (changes) =>
  ask("POST", "/v1/plans", { ...(await task()), risk: find("risk").value, ...changes }, { Prefer: "respond-async" });

const makePlan = guarded(async () => {
  keep();
  follow((await make({ planner: find("planner").value, options: givenOptions() })).id, Number(find("limit").value));
  find("search").scrollIntoView({ block: "nearest" });
});

/* Each planner's plan is a job of its own, and stored; options and the start go to the planners that take them. */
const comparePlanners = guarded(async () => {
  keep();
  const options = Object.entries(givenOptions());
  const hasStart = find("start").value.trim() !== "";
  find("compare").disabled = true;
  try {
    const rows = planners.map(({ name, options: known, takes_start: takesStart }) => {
      const isOwn = ([option]) => known.includes(option);
      const others = options.filter((one) => !isOwn(one)).map(([option]) => option);
      const lacks = [others.length && `has no option ${others.join(", ")}`, hasStart && !takesStart && "takes no start"];
      const request = { planner: name, options: Object.fromEntries(options.filter(isOwn)), ...(takesStart ? {} : { start: null }) };
      return { planner: name, request, remark: "asked for", lacks: lacks.filter(Boolean).join("; ") };
    });
    find("comparison").hidden = false;
    find("all-compared").replaceChildren();
    showPlanners(rows);
    await Promise.all(rows.map((row) => planned(row, rows)));
    const made = rows.filter((row) => row.id);
    if (made.length > 1) find("all-compared").replaceChildren(link("Compare these plans", `#compare/${made.map((row) => row.id).join("/")}`));
  } finally {
    find("compare").disabled = false;
  }
});

async function planned(row, rows) {
  const job = await make(row.request);
  await new Promise((done) => states(job.id, async (found, isOver) => {
    row.remark = isOver ? reason(found.problem, "") : found.progress || found.state;
    if (isOver && found.plan_id) Object.assign(row, { id: found.plan_id, predicted: (await ask("GET", `/v1/plans/${found.plan_id}`)).plan.predicted });
    showPlanners(rows);
    if (isOver) done();
  }));
}

function showPlanners(rows) {
  const step = (one) => (one.predicted ? one.predicted.step_ms.value : Infinity);
  const ranked = [...rows].sort((one, other) => step(one) - step(other) || 0);
  const best = step(ranked[0]);
  const remark = (one) => [step(one) === best && one.predicted ? "★ shortest step" : one.remark, one.lacks].filter(Boolean).join("; ");
  fill("compared", [["planner"], ["predicted step, ms", "number"], ["remark", "name"], ["plan"], ["slowest kernel, ms", "number"], ["balance", "number"]],
    ranked.map((one) => Object.assign(one.predicted
      ? [one.planner, ms(step(one)), remark(one), link(short(one.id), `#one/${one.id}`), ms(one.predicted.max_kernel_ms), share(one.predicted.balance)]
      : [one.planner, "", remark(one), "", "", ""], { isBest: step(one) === best && best < Infinity })));
}

export function listen() {
  const form = find("task");
  form.addEventListener("submit", makePlan);
  form.addEventListener("change", given);
  form.addEventListener("input", () => tell(null));
  for (const name of ["tables", "topology"]) {
    find(`${name}-remove`).addEventListener("click", () => {
      find(`${name}-file`).value = "";
      given({ target: find(name) });
    });
  }
  find("compare").addEventListener("click", comparePlanners);
  find("stop").addEventListener("click", guarded(async () => { if (running) await ask("POST", `/v1/jobs/${running}/${isSearching ? "stop" : "cancel"}`); }));
}
