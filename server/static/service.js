"use strict";

/* Talking to the service. Names come from clients: they are only ever set as text. */

export const find = (id) => document.getElementById(id);

export async function ask(method, path, body, headers = {}) {
  const answer = await fetch(path, {
    method,
    credentials: "same-origin",
    headers: { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers },
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
export function reason(problem, otherwise) {
  let found = problem;
  try {
    if (typeof problem === "string") found = JSON.parse(problem);
  } catch {
    return otherwise;
  }
  if (!found) return otherwise;
  const remedies = (found.remedies || []).map((one) => `It would be feasible with ${one.field} = ${JSON.stringify(one.value)}.`);
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
    if (stream.readyState === EventSource.CLOSED) tell(new Error("The job cannot be watched any more: sign in, or load the page again."));
  });
  return stream;
}

export function tell(error) {
  find("message").textContent = error ? error.message : "";
  find("message").hidden = !error;
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
