"use strict";

/* Stored plans: the list, and several beside each other. */

import { bytes, button, cell, cells, fill, headings, inOrder, link, ms, percent, printable, share, short, state } from "./drawing.js";
import { ask, find, guarded, here } from "./service.js";

const NONE = "No plan is stored that fits. Make one under Plan, or search for less.";

/* Columns that come first; the others follow as the service lists them. */
const ORDER = ["id", "step_ms", "name", "planner", "num_tables", "topology", "num_ranks", "device"];

let columns = [];
let listed = [];
let next = null;
/* Times that the list was asked for: of two answers, the one that was asked for last is shown. */
let asked = 0;
/* The column by which the list is sorted, and 1 or -1. */
let order = { name: "created_at", sign: -1 };

export async function showPlans(described) {
  if (columns.length === 0) {
    columns = inOrder(described, ORDER);
    offerFilters();
  }
  await list(true);
}

function offerFilters() {
  const fields = columns.filter(({ name, kind }) => ["text", "number"].includes(kind) && !["name", "tags"].includes(name)).flatMap(({ name, title, kind }) => {
    const label = cell(title, "", "label");
    label.htmlFor = `by-${name}`;
    const input = document.createElement("input");
    Object.assign(input, { id: label.htmlFor, name, type: kind === "number" ? "number" : "text", maxLength: 200 });
    return [label, input];
  });
  find("filters").replaceChildren(...fields);
}

async function list(again) {
  const query = new URLSearchParams({ limit: "50" });
  for (const one of [find("text"), ...find("filters").querySelectorAll("input")]) if (one.value.trim()) query.set(one.name, one.value.trim());
  if (find("deleted").checked) query.set("is_deleted", "true");
  if (!again && next) query.set("cursor", next);
  const number = ++asked;
  const page = await ask("GET", `/v1/plans?${query}`);
  if (number !== asked) return;
  listed = again ? page.plans : [...listed, ...page.plans];
  next = page.next;
  find("more").hidden = !next;
  show();
}

function show() {
  const value = (plan) => plan[order.name] ?? "";
  listed.sort((one, other) => (value(one) < value(other) ? -order.sign : value(one) > value(other) ? order.sign : 0));
  fill("listed", [["choose"], ...headings(columns).map(([title, kind], index) => [sorter(title, columns[index].name), kind])],
    listed.map((plan) => [find("deleted").checked ? restorer(plan) : box(plan), ...cells(columns, plan, { id: () => (find("deleted").checked ? short(plan.id) : link(short(plan.id), `#one/${plan.id}`)) })]), NONE);
  for (const heading of find("listed").querySelectorAll("th:has(button)")) {
    const isOrder = heading.firstChild.value === order.name;
    heading.setAttribute("aria-sort", isOrder ? (order.sign > 0 ? "ascending" : "descending") : "none");
  }
  find("diff").disabled = true;
}

function sorter(title, name) {
  const made = button(title, () => {
    order = { name, sign: order.name === name ? -order.sign : 1 };
    show();
  });
  made.value = name;
  return made;
}

const restorer = (plan) => button(`Restore ${short(plan.id)}`, async () => {
  await ask("POST", `/v1/plans/${plan.id}/restore`);
  await list(true);
});

function box(plan) {
  const made = document.createElement("input");
  made.type = "checkbox";
  made.value = plan.id;
  made.setAttribute("aria-label", `Choose plan ${short(plan.id)}`);
  made.addEventListener("change", () => { find("diff").disabled = chosen().length < 2; });
  return made;
}

const chosen = () => [...find("listed").querySelectorAll("input:checked")].map((one) => one.value);

/* Plans beside each other, the shortest step first, and what differs between two. */
export async function showCompared(ids) {
  const isHere = here();
  find("difference").hidden = true;
  fill("side-by-side", [], [], "Reading the plans");
  const plans = await Promise.all(ids.map(async (id) => ({ id, plan: (await ask("GET", `/v1/plans/${id}`)).plan })));
  if (!isHere()) return;
  const step = (one) => (one.plan.predicted ? one.plan.predicted.step_ms.value : Infinity);
  const best = Math.min(...plans.map(step));
  const rows = [...plans].sort((one, other) => step(one) - step(other) || 0).map(({ id, plan }) => {
    const { predicted, provenance, tables, topology } = plan;
    const download = link("Export", `/v1/plans/${id}`);
    download.download = `plan-${short(id)}.json`;
    download.setAttribute("aria-label", `Export plan ${short(id)}`);
    return Object.assign([
      link(short(id), `#one/${id}`), ms(step({ plan })), step({ plan }) === best ? "★ shortest step" : percent(step({ plan }) / best - 1),
      provenance ? provenance.planner : "", tables.tables.length, `${topology.world_size} of ${topology.device}`,
      ms(predicted && predicted.max_kernel_ms), share(predicted && predicted.balance),
      predicted ? bytes(Math.max(...predicted.ranks.map((rank) => rank.hbm_bytes))) : "",
      id === ids[0] ? "the first" : link("Differences", `#compare/${ids[0]}/${id}`), download,
    ], { isBest: step({ plan }) === best });
  });
  fill("side-by-side", [["plan"], ["predicted step, ms", "number"], ["step over the shortest", "number"], ["planner"], ["tables", "number"], ["ranks"],
    ["slowest kernel, ms", "number"], ["balance", "number"], ["most weights of a rank", "number"], ["from the first"], ["plan.json"]], rows);
  if (ids.length === 2) await showDifference(...ids);
}

/* A value of a diff, with its unit. */
function quantity(name, value) {
  if (value === null) return "none";
  if (name.endsWith("bytes")) return bytes(value);
  return typeof value === "number" ? value.toLocaleString("en") : String(value);
}

async function showDifference(first, second) {
  const isHere = here();
  const found = await ask("GET", `/v1/plans/${first}/diff/${second}`);
  if (!isHere()) return;
  const apart = found.is_within_intervals === null ? null : found.is_within_intervals ? "no: the 90% intervals of both steps overlap" : "yes: the 90% intervals do not overlap";
  state("changes", [
    ["predicted step", found.step_ms_before && found.step_ms_after && `${ms(found.step_ms_before.value)} ms → ${ms(found.step_ms_after.value)} ms`],
    ["more than the models' error", apart],
    ["tables held alike", found.num_alike.toLocaleString("en")],
    ["to move between ranks", found.received_bytes === null ? "unknown: row orders differ" : bytes(found.received_bytes)],
    ...found.task.map((one) => [one.name.replaceAll("_", " ").replace(/ bytes$/, ""), `${quantity(one.name, one.before)} → ${quantity(one.name, one.after)}`]),
    ...found.parts.map((one) => [one.name.replaceAll("_", " "), `${ms(one.before)} ms → ${ms(one.after)} ms`]),
  ]);
  fill("moved", [["table", "name"], ["change"], ["before", "name"], ["after", "name"]],
    found.tables.map((one) => [one.table, one.change, one.before, one.after]), "All tables are held alike.");
  find("difference").hidden = false;
}

const inputs = () => Object.entries({ name: find("plan-name"), tags: find("plan-tags") });

/* Shows what a plan is called, and lets it be changed; null while that is not known. */
function label(own) {
  for (const [name, input] of inputs()) input.value = input.defaultValue = own ? own[name] : "";
  for (const part of find("labels").elements) part.disabled = !own;
  find("labelled").textContent = "";
}

/* Leaves nothing of the plan before where one's labels and others are offered. */
export function offerNothing() {
  label(null);
  find("other").replaceChildren(new Option("another plan", ""));
}

/* What a plan is called, to be changed. */
export async function offerLabels(id) {
  const isHere = here();
  const [own] = (await ask("GET", `/v1/plans?id=${id}`)).plans;
  if (!isHere()) return;
  label(own || null);
  find("labels").onsubmit = guarded(async () => {
    const changed = inputs().map(([name, input]) => [name, input, input.value]).filter(([, input, value]) => value !== input.defaultValue);
    await ask("PATCH", `/v1/plans/${id}`, Object.fromEntries(changed.map(([name, , value]) => [name, value.trim()])));
    if (!isHere()) return;
    for (const [, input, value] of changed) input.defaultValue = value;
    find("labelled").textContent = "Kept.";
  });
}

/* Plans that one may be compared with, the latest first. */
export async function offerOthers(id) {
  const isHere = here();
  const page = await ask("GET", "/v1/plans?limit=50");
  if (!isHere()) return;
  const others = page.plans.filter((one) => one.id !== id);
  const text = (one) => `${one.created_at.slice(0, 16).replace("T", " ")} ${printable(one.name)} ${one.planner}, ${one.num_tables} tables, ${one.num_ranks} ranks of ${one.device}, ${ms(one.step_ms)} ms`;
  const older = new Option("older ones: choose them under Plans", "");
  older.disabled = true;
  find("other").replaceChildren(new Option("another plan", ""), ...others.map((one) => new Option(text(one), one.id)), ...(page.next ? [older] : []));
  find("other").onchange = () => { if (find("other").value) location.hash = `#compare/${find("other").value}/${id}`; };
}

export function listen() {
  find("find").addEventListener("submit", guarded(() => list(true)));
  find("more").addEventListener("click", guarded(() => list(false)));
  find("diff").addEventListener("click", () => { location.hash = `#compare/${chosen().reverse().join("/")}`; });
}
