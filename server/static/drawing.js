"use strict";

/* Drawing: tables, links, buttons and the curve of a search. */

import { find, guarded } from "./service.js";

/* Control, format and other invisible characters, such as those that turn the direction of what follows, as escapes. */
export const printable = (text) =>
  text.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, (one) => (/[\n\t]/.test(one) ? one : `\\u{${one.codePointAt(0).toString(16)}}`));

export function cell(content, kind, tag = "td") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (content instanceof Node) made.append(content);
  else made.textContent = content === null || content === undefined ? "" : printable(String(content));
  return made;
}

/* Fills a table: columns of title and kind, cells by row; without rows, a line that says what to do first. */
export function fill(id, columns, rows, empty = "") {
  const head = document.createElement("tr");
  for (const [title, kind] of columns) {
    const heading = cell(title, kind, "th");
    heading.scope = "col";
    head.append(heading);
  }
  const lines = rows.map((cells) => {
    const line = document.createElement("tr");
    cells.forEach((content, index) => line.append(cell(content, columns[index][1])));
    if (cells.isBest) line.className = "best";
    return line;
  });
  const header = document.createElement("thead");
  header.append(head);
  const body = document.createElement("tbody");
  body.append(...lines);
  const note = cell(empty, "", "caption");
  find(id).replaceChildren(...(rows.length === 0 && empty ? [note] : []), header, body);
}

/* A list of facts: pairs of name and value; those without a value are left out. */
export function state(id, facts) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  find(id).replaceChildren(...known.flatMap(([name, value]) => [cell(name, "", "dt"), cell(value, "", "dd")]));
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

/* The columns, those that are named first. */
export const inOrder = (columns, names) =>
  [...columns].sort((one, other) => (names.indexOf(one.name) + 1 || 99) - (names.indexOf(other.name) + 1 || 99));

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

/* Several buttons, or links, in a cell. */
export function several(parts) {
  const made = document.createElement("span");
  made.append(...parts.flatMap((part) => [part, " "]));
  return made;
}

export const short = (id) => id.replace("sha256:", "").slice(0, 12);
export const ms = (value) => (value === null || value === undefined ? "" : Number(value).toPrecision(4));
export const percent = (share) => `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)}%`;
export const share = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(1)}%`);

/* Bytes with a binary unit: 1.50 GiB. */
export function bytes(value) {
  let [left, unit] = [value, 0];
  for (; left >= 1024 && unit < 5; unit += 1) left /= 1024;
  return `${left.toFixed(unit === 0 || left >= 100 ? 0 : left >= 10 ? 1 : 2)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

const shown = {
  id: (value) => value,
  time: (value) => (value || "").slice(0, 19).replace("T", " "),
  number: (value) => (typeof value === "number" ? value.toLocaleString("en") : value),
  ms: (value) => ms(value),
  share: (value) => (value === null ? "" : `${(100 * value).toFixed(2)}%`),
  flag: (value) => (value ? "★" : ""),
  text: (value) => (Array.isArray(value) ? value.join(", ") : value),
};

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

/* The best plan over time: points of seconds and ms, up to now; the axis ends with the time limit or later. */
export function draw(points, seconds, limit) {
  const last = Math.max(1, limit, seconds);
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (at) => 110 + (at / last) * 470;
  const y = (value) => (high === low ? 70 : 20 + ((high - value) / (high - low)) * 100);
  const path = points.flatMap(([at, value], index) => [...(index ? [[x(at), y(points[index - 1][1])]] : []), [x(at), y(value)]]);
  if (points.length) path.push([x(seconds), y(values[values.length - 1])]);
  find("curve").replaceChildren(
    shape("line", { x1: 110, x2: 580, y1: 130, y2: 130 }),
    shape("line", { x1: x(seconds), x2: x(seconds), y1: 15, y2: 130, class: "now" }),
    shape("polyline", { points: path.map((one) => one.join(",")).join(" ") }),
    ...(points.length ? [shape("text", { x: 4, y: y(high) + 4 }, `${ms(high)} ms`)] : []),
    ...(points.length && high > low ? [shape("text", { x: 4, y: y(low) + 4 }, `${ms(low)} ms`)] : []),
    shape("text", { x: 110, y: 150 }, "0 s"),
    shape("text", { x: 580, y: 150, "text-anchor": "end" }, `${last.toFixed(0)} s`),
  );
}
