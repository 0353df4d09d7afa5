"use strict";

/* What admins see to: keys, and the audit log. */

import { button, cells, fill, headings, printable, short } from "./drawing.js";
import { ask, find, guarded } from "./service.js";

let audited = [];
let before = null;
/* Times that the log was asked for: of two answers, the one that was asked for last is shown. */
let asked = 0;

export async function showKeys(columns) {
  const found = await ask("GET", "/v1/keys");
  const rows = found.keys.map((key) => [...cells(columns.keys, key), key.revoked_at ? "" : button(`End ${key.id}`, async () => {
    if (!confirm(`End the key ${key.id} for ${printable(key.name)}? Its next request is refused.`)) return;
    await ask("DELETE", `/v1/keys/${key.id}`);
    await showKeys(columns);
  })]);
  fill("keys", headings(columns.keys, [], ["change"]), rows,
    "There are no keys: the service answers this machine only, and whoever uses it may do all. First run autoshard keys create NAME --scope admin here; with that key, more are made above.");
}

export const makeKey = (columns) => guarded(async () => {
  const scopes = [...document.querySelectorAll("#scopes input:checked")].map((one) => one.value);
  const team = find("key-team").value.trim();
  const made = await ask("POST", "/v1/keys", { name: find("key-name").value, scopes, ...(team ? { team } : {}) });
  find("secret").textContent = made.secret;
  find("made-key").hidden = false;
  find("made-key").focus();
  await showKeys(columns());
});

export async function showAudit(columns, again) {
  const query = new URLSearchParams({ limit: "50" });
  for (const name of ["actor", "action", "target"]) if (find(`audit-${name}`).value) query.set(name, find(`audit-${name}`).value.trim());
  if (!again && before) query.set("before", before);
  const number = ++asked;
  const page = await ask("GET", `/v1/audit?${query}`);
  if (number !== asked) return;
  audited = again ? page.entries : [...audited, ...page.entries];
  before = page.next;
  find("more-audit").hidden = !before;
  fill("audited", headings(columns.audit), audited.map((one) => cells(columns.audit, one, { target: () => short(one.target) })),
    query.size > 1 ? "No entry fits: search for less." : "Nothing was changed yet. Each plan, job, key or schedule that is made, changed or deleted is an entry.");
}
