// The list of runs: rows are changed where they stand, so that the focus and what was chosen stay.

import { find, make, poll, put } from "./live.js";

const CELLS = ["strategy", "dataset", "rounds", "accuracy", "left"];
const LABELS = ["Strategy", "Data set", "Rounds", "Accuracy", "Time left"];
const rows = new Map();
const body = find(".runs tbody"), filter = find("#filter"), compare = find("#compare");

function makeRow(run) {
  const row = make("tr", "", { role: "row" });
  const cell = (label, ...inside) => {
    const made = make("td", "", { role: "cell", "data-label": label });
    made.append(...inside);
    row.append(made);
    return made;
  };
  const box = make("input", "", { type: "checkbox", name: "run", value: run.name, "aria-label": `compare ${run.name}` });
  const state = make("span"), why = make("small");
  cell("Compare", box);
  cell("Run", make("a", run.name, { href: run.page }));
  cell("State", state, why);
  const texts = CELLS.map((_, at) => cell(LABELS[at]));
  cell("Report", make("a", "Report", { href: run.report, "aria-label": `report of ${run.name}` }));
  return { row, state, why, texts, box, run };
}

function showRow(made, run) {
  made.run = run;
  put(made.state, run.state);
  made.state.className = `state ${run.state}`;
  put(made.why, run.why);
  CELLS.forEach((key, at) => {
    if (made.texts[at].textContent !== run[key]) made.texts[at].textContent = run[key];
    made.texts[at].classList.toggle("empty", run[key] === "-");
  });
}

function choose() {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const { row, box, run } of rows.values()) {
    const text = [run.name, run.state, run.strategy, run.dataset].join(" ").toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) && !box.checked;
  }
  const chosen = [...rows.values()].filter(({ box }) => box.checked).length;
  compare.disabled = chosen === 0;
  compare.textContent = chosen ? `Compare ${chosen} ${chosen === 1 ? "run" : "runs"}` : "Compare: choose runs";
}

function order(names) {
  const focused = document.activeElement;
  if (names.some((name, at) => body.children[at] !== rows.get(name).row)) {
    body.append(...names.map((name) => rows.get(name).row));
    focused?.focus();
  }
}

function update(found) {
  const names = found.runs.map((run) => run.name);
  for (const [name, { row }] of rows) if (!names.includes(name)) { row.remove(); rows.delete(name); }
  for (const run of found.runs) {
    if (!rows.has(run.name)) rows.set(run.name, makeRow(run));
    showRow(rows.get(run.name), run);
  }
  order(names);
  const counts = new Map();
  for (const { state } of found.runs) counts.set(state, (counts.get(state) ?? 0) + 1);
  const said = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  put(find("#counts"), said || "There is no run here yet. A run appears as soon as it begins.");
  put(find("#left-out"), found.left_out);
  choose();
  return counts.has("reading") ? 200 : 2000;
}

filter.addEventListener("input", choose);
body.addEventListener("change", choose);
poll(() => "/api/runs", update);
