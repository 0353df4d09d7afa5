"use strict";

/* What the service works on by itself: jobs, schedules that make them, and the models and samples that come of it. */

import { button, cells, fill, headings, inOrder, link, several, short, state } from "./drawing.js";
import { ask, find, guarded, reason, states } from "./service.js";

/* Columns that come first; the others follow as the service lists them. */
const ORDER = ["id", "state", "progress", "kind", "tables", "topology", "planner", "limit_s", "begins_in_s"];
const UNFINISHED = ["queued", "running"];
/* Kinds of jobs that can end early with what they have found. */
const SEARCHING = ["plan", "compare"];
/* Jobs that are listed at first, and by More; and most that the service lists at once. */
const PAGE = 50;
const LARGEST_PAGE = 200;

/* What one may do with a job, in words and as the service names it. */
const changes = ({ kind, state }) =>
  state === "running" && SEARCHING.includes(kind) ? [["Stop and keep", "stop"], ["Cancel", "cancel"]]
    : UNFINISHED.includes(state) ? [["Cancel", "cancel"]]
    : state === "succeeded" ? [] : [["Try again", "retry"]];

let watched = null;
let numListed = 0;
/* Times that the list was asked for: of two answers, the one that was asked for last is shown. */
let asked = 0;

/* The latest jobs, so many if there are, and whether there are others. */
async function latest(count) {
  const jobs = [];
  let next = null;
  do {
    const query = new URLSearchParams({ limit: Math.min(LARGEST_PAGE, count - jobs.length), ...(next ? { cursor: next } : {}) });
    const page = await ask("GET", `/v1/jobs?${query}`);
    jobs.push(...page.jobs);
    next = page.next;
  } while (next && jobs.length < count);
  return { jobs, hasMore: next !== null };
}

/* Jobs that run and wait, then the latest of all others, as they are now. */
export async function showJobs(columns, count = PAGE) {
  const number = ++asked;
  const [listed, ...unfinished] = await Promise.all([latest(count), ...["running", "queued"].map((state) => ask("GET", `/v1/jobs?limit=${LARGEST_PAGE}&state=${state}`))]);
  if (number !== asked) return;
  numListed = listed.jobs.length;
  find("more-jobs").hidden = !listed.hasMore;
  const first = unfinished.flatMap((one) => one.jobs);
  const shown = [...first, ...listed.jobs.filter((one) => !first.some((other) => other.id === one.id))];
  const act = (id, change) => async () => {
    await ask("POST", `/v1/jobs/${id}/${change}`);
    await showJobs(columns);
  };
  const ordered = inOrder(columns, ORDER);
  const rows = shown.map((job) => cells(ordered, job, {
    id: () => link(short(job.id), `#jobs/${job.id}`),
    state: () => several([job.state, ...changes(job).map(([text, change]) => button(text, act(job.id, change)))]),
    progress: () => (job.state === "succeeded" ? "" : job.progress.split(";")[0]),
  }));
  fill("worked", headings(ordered), rows, "There are no jobs yet. A search under Plan is one; schedules make others.");
}

export const showMoreJobs = (columns) => showJobs(columns, numListed + PAGE);

export function watch(id, columns) {
  if (watched) watched.close();
  find("watched").hidden = !id;
  if (!id) return;
  watched = states(id, async (job, isOver) => {
    const values = cells(columns, job);
    state("job", [
      ...columns.map(({ title }, index) => [title, values[index]]).filter(([title]) => title !== "progress"),
      ["begun, UTC", job.started_at && job.started_at.slice(0, 19).replace("T", " ")],
      ["ended, UTC", job.finished_at && job.finished_at.slice(0, 19).replace("T", " ")],
      ["made", job.plan_id ? link(`plan ${short(job.plan_id)}`, `#one/${job.plan_id}`)
        : job.state === "succeeded" && /^(train|calibrate)/.test(job.kind) ? link("a trained model", "#models")
        : job.state === "succeeded" && job.kind === "collect" ? link("samples", "#models")
        : job.state === "succeeded" ? link("its result", `/v1/jobs/${id}/result`) : ""],
      ["why it has none", job.problem ? reason(job.problem, "") : ""],
    ]);
    find("log").textContent = job.log || (isOver ? "It has written nothing." : "Nothing is written yet.");
    if (isOver) await showJobs(columns);
  });
}

export const unwatch = () => { if (watched) watched.close(); };

export async function showModels(columns) {
  const found = await ask("GET", "/v1/models");
  const actions = (model) => {
    const change = (alias) => async () => {
      if (!confirm(`Make ${model.id} the ${alias} version of ${model.name}? Plans ${alias === "production" ? "are priced by it from now on" : "are priced by it in the shadow"}.`)) return;
      await ask("POST", `/v1/models/${model.kind}/${model.name}/promotions`, { version: model.id, alias });
      await showModels(columns);
    };
    return several([button("Try", change("candidate")), button("Promote", change("production"))]);
  };
  fill("trained", headings(columns, [], ["change"]), found.models.map((one) => [...cells(columns, one), one.used ? "" : actions(one)]),
    "No model is trained here: plans are priced by those that come with autoshard. A job of the kind calibrate fits one to this machine.");
  const samples = await ask("GET", "/v1/samples");
  fill("samples", [["kind"], ["device"], ["samples", "number"]], samples.samples.map((one) => [one.kind, one.device, one.num_samples.toLocaleString("en")]),
    "There are no samples yet. A job of the kind collect measures some, and autoshard collect sends those of another machine.");
  find("refused").hidden = samples.quarantined.length === 0;
  fill("quarantined", [["file"], ["from"], ["what is wrong", "name"]], samples.quarantined.map((one) => [short(one.id), one.owner, one.detail]));
}

export async function showSchedules(columns) {
  const found = await ask("GET", "/v1/schedules");
  const rows = found.schedules.map((one) => {
    const path = `/v1/schedules/${one.name}`;
    const both = several([
      button(one.is_paused ? "Resume" : "Pause", async () => {
        await ask("POST", `${path}/${one.is_paused ? "resume" : "pause"}`);
        await showSchedules(columns);
      }),
      button("Delete", async () => {
        if (!confirm(`Delete the schedule ${one.name}? It makes no more jobs.`)) return;
        await ask("DELETE", path);
        await showSchedules(columns);
      })]);
    return [...cells(columns, one, { is_paused: () => (one.is_paused ? "paused" : "") }), both];
  });
  fill("schedules", headings(columns, [], ["change"]), rows, "There are no schedules yet: make the first above.");
}

export const makeSchedule = (columns) => guarded(async () => {
  const seconds = find("schedule-seconds").value;
  const timed = ["collect", "calibrate", "train-policy"].includes(find("schedule-kind").value) && seconds;
  await ask("POST", "/v1/schedules", {
    name: find("schedule-name").value.trim(), cron: find("schedule-cron").value.trim(), kind: find("schedule-kind").value,
    body: timed ? { seconds: Number(seconds) } : {},
  });
  await showSchedules(columns());
});
