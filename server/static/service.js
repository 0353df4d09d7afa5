"use strict";

/* Talking to the service. Names come from clients: they are only ever set as text. */

/* Milliseconds between two looks whether the service is there, and for which one waits. */
const LOOK_MS = 1300;

export const find = (id) => document.getElementById(id);

let visits = 0;

/* Tells, after a wait, whether the page still shows what it shows now: answers may come when the address has changed. */
export function here() {
  const visit = visits;
  return () => visit === visits;
}

/* The same, of what is shown from now on. */
export function enter() {
  visits += 1;
  return here();
}

/* What went wrong, and the field of the request that it is about, if it is one's. */
class Failure extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export async function ask(method, path, body, headers = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      credentials: "same-origin",
      headers: { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Failure(`The service at ${location.host} does not answer. What you entered is kept: try again when it is back.`);
  }
  const text = await answer.text();
  if (answer.status === 401 && location.hash !== "#sign-in") {
    sessionStorage.setItem("wanted", location.hash);
    location.hash = "#sign-in";
    throw new Failure("This service needs a key: sign in to go on.");
  }
  if (!answer.ok) throw failure(text, `The service answered with status ${answer.status}.`);
  return text ? JSON.parse(text) : null;
}

/* The error of a problem, an object or its text; of what is no problem, such as a proxy's page, `otherwise`. */
export function failure(problem, otherwise) {
  let found = problem;
  try {
    if (typeof problem === "string") found = JSON.parse(problem);
  } catch {
    return new Failure(otherwise);
  }
  return new Failure(reason(found, otherwise), found && found.field);
}

/* What a problem says, and the changes that would help. */
export function reason(found, otherwise) {
  if (!found) return otherwise;
  const remedies = (found.remedies || []).map((one) => `It would be feasible with ${one.text}.`);
  const faults = (found.faults || []).map((one) => one.detail);
  return [...(faults.length ? faults : [found.detail || found.title || otherwise]), ...remedies].join("\n");
}

/* The states of a job until it has ended. A browser asks again by itself, unless it was refused. */
export function states(id, take) {
  const stream = new EventSource(`/v1/jobs/${id}/events`);
  stream.addEventListener("job", guarded(async (event) => {
    const state = JSON.parse(event.data);
    const isOver = !["queued", "running"].includes(state.state);
    if (isOver) stream.close();
    await take(state, isOver);
  }));
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) tell(new Failure("The job cannot be watched any more: sign in, or load the page again."));
  });
  return stream;
}

/* Says while the service does not answer, and goes on when it is back. */
export function look(back) {
  let isThere = true;
  setInterval(async () => {
    if (document.hidden) return;
    const was = isThere;
    isThere = await fetch("/livez", { cache: "no-store", signal: AbortSignal.timeout(LOOK_MS) }).then(() => true, () => false);
    find("gone").hidden = isThere;
    if (isThere && !was) back();
  }, LOOK_MS);
}

/* Shows an error beside the field that caused it, or else above the view; null shows none. */
export function tell(error) {
  const message = find("message");
  for (const one of document.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
  message.textContent = error ? error.message : "";
  message.hidden = !error;
  const part = error && error.field && error.field.split(/[.[]/)[0];
  const field = part && find("task").elements[part];
  if (field && field.closest("details")) field.closest("details").open = true;
  if (!field || !field.offsetHeight) {
    find("main").prepend(message);
    return;
  }
  field.closest("fieldset").querySelector("legend").after(message);
  field.setAttribute("aria-invalid", "true");
  for (const other of [`${field.id}-file`, `${field.id}-text`].map(find)) {
    if (other && other.value) other.setAttribute("aria-invalid", "true");
  }
}

export const guarded = (work) => async (event) => {
  if (event && event.preventDefault) event.preventDefault();
  tell(null);
  try {
    await work(event);
  } catch (error) {
    tell(error);
  }
};
