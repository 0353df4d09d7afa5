"use strict";

/* Drawing: tables, links, buttons and the curve of a search. */

import { find, guarded } from "./service.js";

export function cell(content, kind, tag = "td") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (content instanceof Node) made.append(content);
  else made.textContent = content === null || content === undefined ? "" : String(content);
  return made;
}

export function fill(id, columns, rows) {
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

const NUMBERS = ["number", "ms", "share"];
/* Fields with lines of text, which wrap. */
const LINES = ["progress"];

/* Columns of a list's table, as the service describes the list, and others that the page adds before and after. */
export const headings = (columns, before = [], after = []) => [
  ...before.map((title) => [title]),
  ...columns.map(({ name, title, kind }) => [title, NUMBERS.includes(kind) ? "number" : LINES.includes(name) ? "name" : ""]),
  ...after.map((title) => [title]),
];

/* Cells of one row, but those that `own` draws, by the column's name. */
export const cells = (columns, one, own = {}) =>
  columns.map(({ name, kind }) => (own[name] ? own[name](one) : shown[kind](one[name])));

export function link(text, target) {
  const made = document.createElement("a");
  made.textContent = text;
  made.href = target;
  return made;
}

export function button(text, work) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", guarded(work));
  return made;
}

export const plain = (value) => (typeof value === "number" && !Number.isInteger(value) ? ms(value) : value === null ? "none" : String(value));
export const short = (id) => id.replace("sha256:", "").slice(0, 12);
export const ms = (value) => (value === null || value === undefined ? "" : Number(value).toPrecision(4));

const shown = {
  id: (value) => value,
  time: (value) => (value || "").slice(0, 19).replace("T", " "),
  number: (value) => value,
  ms: (value) => ms(value),
  share: (value) => (value === null ? "" : `${(100 * value).toFixed(2)}%`),
  flag: (value) => (value ? "★" : ""),
  text: (value) => (Array.isArray(value) ? value.join(", ") : value),
};

export const percent = (share) => `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)}%`;

/* The best plan over time: points of seconds and ms, up to now. */
export function draw(points, seconds) {
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
  const last = Math.max(1, seconds);
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (seconds) => 60 + (seconds / last) * 520;
  const y = (value) => (high === low ? 70 : 20 + ((high - value) / (high - low)) * 110);
  const steps = points.flatMap((point, index) =>
    index === 0 ? [[x(point[0]), y(point[1])]] : [[x(point[0]), y(points[index - 1][1])], [x(point[0]), y(point[1])]]);
  steps.push([x(last), y(values[values.length - 1])]);
  svg.replaceChildren(
    shape("polyline", { points: steps.map((step) => step.join(",")).join(" ") }),
    shape("text", { x: 4, y: y(high) + 4 }, `${ms(high)} ms`),
    ...(high === low ? [] : [shape("text", { x: 4, y: y(low) + 4 }, `${ms(low)} ms`)]),
    shape("text", { x: 540, y: 154 }, `${last.toFixed(1)} s`),
  );
}
