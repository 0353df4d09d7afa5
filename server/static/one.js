"use strict";

/* One stored plan: its report, what its step waits for, and what would help. */

import { bytes, fill, link, ms, percent, several, short, state } from "./drawing.js";
import { offerLabels, offerNothing, offerOthers } from "./plans.js";
import { ask, find, guarded, here } from "./service.js";

/* Tables that are listed as those for which the step waits. */
const MOST_BINDING = 10;
/* Ranks that are named one by one. */
const MOST_RANKS = 6;
/* Gains below this share are too small to advise a change. */
const LEAST_GAIN = 0.001;

const words = (name) => name.replaceAll("_", " ");

/* Fields of changes that are none of the hardware. */
const isHardware = (one) => one.field.startsWith("topology.");

export async function showOne(id) {
  const isHere = here();
  find("drawn").removeAttribute("src");
  find("one-title").textContent = `Plan ${short(id)}`;
  find("download").href = `/v1/plans/${id}`;
  find("download").download = `plan-${short(id)}.json`;
  find("report").href = `/v1/plans/${id}/report`;
  for (const part of ["explained", "trying", "improved"]) find(part).hidden = true;
  find("made-by").textContent = "";
  find("improve").disabled = false;
  fill("runs", [], []);
  offerNothing();
  const address = `${location.origin}/v1/plans/${id}`;
  copies("copy-id", id);
  copies("copy-curl", `curl -H "Authorization: Bearer $AUTOSHARD_API_KEY" ${address}`);
  copies("copy-python", `from autoshard.client import open_client\n\nwith open_client("${location.origin}") as client:\n    plan = client.read_plan("${id}")\n`);
  const { runs } = await ask("GET", `/v1/plans/${id}/runs`);  // no report of a plan that is not there
  if (!isHere()) return;
  find("drawn").src = find("report").href;
  fill("runs", [["reported, UTC"], ["measured step, ms", "number"], ["predicted step, ms", "number"], ["plan anew"]],
    runs.map((one) => [one.reported_at.slice(0, 19).replace("T", " "), ms(one.measured_ms), ms(one.predicted_ms), one.is_drifted ? "yes: it has drifted" : ""]),
    "No run is reported yet: training jobs send theirs to POST /v1/plans/{id}/runs.");
  const { jobs } = await ask("GET", `/v1/jobs?plan_id=${id}&limit=5`);
  if (!isHere()) return;
  find("made-by").replaceChildren(...(jobs.length ? ["Made by job ", several(jobs.map((job) => link(short(job.id), `#jobs/${job.id}`)))] : []));
  await offerLabels(id);
  if (isHere()) await offerOthers(id);
}

/* Copies a text; where a browser does not let pages do that, shows it to be copied. */
function copies(button, text) {
  find(button).onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      prompt("To be copied:", text);
    }
  };
}

/* The plan that the address names. */
const shownId = () => location.hash.split("/")[1];
const isShown = (id) => shownId() === id;

export function listen() {
  find("explain").addEventListener("click", guarded(() => explain(shownId())));
  find("improve").addEventListener("click", guarded(() => improve(shownId())));
  find("delete").addEventListener("click", guarded(async () => {
    const id = shownId();
    if (!confirm(`Delete the plan ${short(id)}? For a day, Plans, Filters brings it back.`)) return;
    await ask("DELETE", `/v1/plans/${id}`);
    if (isShown(id)) location.hash = "#plans";
  }));
}

async function explain(id) {
  const found = await ask("GET", `/v1/plans/${id}/explanation?most=0`);
  if (!isShown(id)) return;
  showBounds(found);
  const rows = found.tables.map((one) => {
    const best = one.alternatives.find((other) => other.step_ms !== null);
    return [one.table, one.option, one.reason, best ? best.option : "", best ? ms(best.step_ms) : ""];
  });
  fill("alternatives", [["table", "name"], ["held", "name"], ["why", "name"], ["best alternative", "name"], ["step then, ms", "number"]], rows);
  find("explained").hidden = false;
  find("explained").focus();
}

/* The step, its collectives, the fullest rank, and the tables without which the step would be shortest. */
function showBounds(found) {
  const collectives = Object.entries(found.collectives).filter(([, time]) => time.serialised_ms > 0)
    .map(([name, time]) => [words(name), `${ms(time.serialised_ms)} ms, of which the step waits ${ms(time.exposed_ms)} ms`]);
  const facts = [
    ["predicted step", `${ms(found.step_ms)} ms`],
    ...collectives,
    [`fullest rank, ${found.fullest_rank}`, `${bytes(found.used_bytes)} of ${bytes(found.capacity_bytes)} of device memory`],
  ];
  state("bounds", facts);
  const binding = found.tables.filter((one) => one.without_ms < found.step_ms)
    .sort((one, other) => one.without_ms - other.without_ms).slice(0, MOST_BINDING)
    .map((one) => [one.table, one.option, ranks(one.ranks), parts(one.binds),
      ms(one.without_ms), percent(one.without_ms / found.step_ms - 1)]);
  fill("binding", [["table", "name"], ["held", "name"], ["ranks"], ["on the slowest rank of", "name"],
    ["step without it, ms", "number"], ["change", "number"]], binding);
}

/* Names of parts; a part that is there forward and backward is named once. */
function parts(names) {
  const isBoth = (end) => names.includes(`forward_${end}`) && names.includes(`backward_${end}`);
  const shown = names.map((name) => {
    const [, end] = /^(?:forward|backward)_(.*)$/.exec(name) || [];
    return words(end && isBoth(end) ? end : name);
  });
  return [...new Set(shown)].join(", ");
}

function ranks(held) {
  if (held.length <= MOST_RANKS) return held.join(", ");
  const isRange = held[held.length - 1] - held[0] === held.length - 1;
  return isRange ? `${held[0]} to ${held[held.length - 1]}` : `${held.length} ranks`;
}

/* Planning takes seconds, and how many is not known before. */
async function improve(id) {
  const started = performance.now();
  const clock = setInterval(() => {
    if (isShown(id)) find("elapsed").textContent = `${Math.floor((performance.now() - started) / 1000)} s`;
  }, 1000);
  find("elapsed").textContent = "";
  find("improve").disabled = true;
  find("improved").hidden = true;
  find("trying").hidden = false;
  try {
    const found = await ask("GET", `/v1/plans/${id}/improvements?most=0`);
    if (isShown(id)) showImprovements(found);
  } finally {
    clearInterval(clock);
    if (isShown(id)) {
      find("trying").hidden = true;
      find("improve").disabled = false;
    }
  }
}

/* What would help most, and what planning anew would do without it: the plan need not be the best of its task. */
function advice(found) {
  const more = (one) => `${(100 * one.gain).toFixed(1)}% more samples per second`;
  const [best] = found.improvements.filter((one) => one.field !== "tables.batch_size");
  if (found.num_groups > 1) return "Single changes are not tried for plans of several replica groups.";
  if (!best || best.gain < LEAST_GAIN) return "None of the changes that were planned makes training faster.";
  const another = found.improvements.find((one) => one.field === "plan" && one !== best && one.gain >= LEAST_GAIN);
  const alone = another ? ` Another plan alone: ${more(another)}.` : "";
  return `Most would be gained by ${best.text}: ${more(best)}.${alone}`;
}

function showImprovements(found) {
  find("advice").textContent = advice(found);
  const show = (id, title, changes) => fill(id, [[title, "name"], ["step, ms", "number"], ["samples per second", "number"], ["gain", "number"]],
    changes.map((one) => [one.text, ms(one.step_ms), Math.round(one.samples_per_s).toLocaleString("en"), percent(one.gain)]), "None was planned.");
  show("hardware", "other hardware", found.improvements.filter(isHardware));
  show("settings", "other settings, or another plan", found.improvements.filter((one) => !isHardware(one)));
  find("improved").hidden = false;
  find("improved").focus();
}
