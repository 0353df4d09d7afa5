"use strict";

/* Getting about: which view is shown, and who is signed in. */

import { makeKey, showAudit, showKeys } from "./admin.js";
import { makeSchedule, showJobs, showModels, showMoreJobs, showSchedules, unwatch, watch } from "./jobs.js";
import * as one from "./one.js";
import * as planning from "./planning.js";
import * as plans from "./plans.js";
import { ask, enter, find, guarded, here, look } from "./service.js";

/* Columns of the lists: fields of what they hold. */
let columns = null;

const VIEWS = {
  "sign-in": () => {},
  plan: () => {},
  plans: () => plans.showPlans(columns.plans),
  compare: (ids) => plans.showCompared(ids),
  one: ([id]) => one.showOne(id),
  jobs: async ([id]) => {
    const isHere = here();
    await showJobs(columns.jobs);
    if (isHere()) watch(id, columns.jobs);
  },
  models: () => showModels(columns.models),
  schedules: () => showSchedules(columns.schedules),
  keys: async () => {
    find("made-key").hidden = true;
    await showKeys(columns);
  },
  audit: () => showAudit(columns, true),
};

async function catalogue() {
  find("leave").hidden = !(await ask("GET", "/page/session")).signed_in;
  if (columns) return;
  const found = await ask("GET", "/v1/catalogue");
  columns = found.columns;
  planning.offer(found);
}

const go = guarded(async () => {
  const isHere = enter();
  const [name, ...rest] = (location.hash.slice(1) || "plan").split("/");
  const ids = rest.filter(Boolean);
  const needed = { one: 1, compare: 2 }[name] || 0;
  const view = !(name in VIEWS) ? "plan" : ids.length < needed ? "plans" : name;
  unwatch();
  for (const other of Object.keys(VIEWS)) find(`view-${other}`).hidden = other !== view;
  const shown = { one: "plans", compare: "plans" }[view] || view;
  for (const tab of document.querySelectorAll("nav a")) {
    if (tab.getAttribute("href") === `#${shown}`) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  try {
    if (view !== "sign-in") await catalogue();
    if (isHere()) await VIEWS[view](ids);
  } catch (error) {
    if (isHere()) throw error;  // what was asked for another address is nothing to this one
  }
});

addEventListener("hashchange", () => { go(); find("main").focus(); });
addEventListener("DOMContentLoaded", () => {
  find("skip").addEventListener("click", (event) => {  // the address names the view
    event.preventDefault();
    find("main").focus();
  });
  planning.listen();
  plans.listen();
  one.listen();
  find("new-schedule").addEventListener("submit", makeSchedule(() => columns.schedules));
  find("new-key").addEventListener("submit", makeKey(() => columns));
  find("find-audit").addEventListener("submit", guarded(() => showAudit(columns, true)));
  find("more-audit").addEventListener("click", guarded(() => showAudit(columns, false)));
  find("more-jobs").addEventListener("click", guarded(() => showMoreJobs(columns.jobs)));
  find("sign-in").addEventListener("submit", guarded(async () => {
    await ask("POST", "/page/session", undefined, { Authorization: `Bearer ${find("key").value.trim()}` });
    find("key").value = "";
    location.hash = sessionStorage.getItem("wanted") || "#plan";
    sessionStorage.removeItem("wanted");
  }));
  find("leave").addEventListener("click", guarded(async () => {
    await ask("DELETE", "/page/session");
    find("leave").hidden = true;
    location.hash = "#sign-in";
  }));
  look(() => { if (find("view-plan").hidden) go(); });
  go();
});
