// The page of a run: curves that grow, its clients, its failures, and what it does now.

import { fill, find, make, poll, put } from "./live.js";

const name = find("main").dataset.run;
const FEW = 20; // clients that are shown at first
let version = "", clients = [], all = false;

function showNow(now) {
  find("#now").hidden = !now;
  if (!now) return;
  put(find("#now-says"), now.details ? `${now.says}, ${now.details}` : now.says);
  showBar(find("#now-bar"), now.done, now.asked);
}

function showBar(bar, done, of) {
  bar.hidden = of === 0;
  bar.max = Math.max(of, 1);
  bar.value = Math.min(done, of);
}

function showFacts(facts) {
  const place = find("#facts");
  facts.forEach(([name, value], at) => {
    if (!place.children[at]) {
      const made = make("div");
      made.append(make("dt"), make("dd"));
      place.append(made);
    }
    put(place.children[at].firstElementChild, name);
    put(place.children[at].lastElementChild, value);
  });
  while (place.children.length > facts.length) place.lastElementChild.remove();
}

function showFigures(pictures, problem) {
  const place = find("#figures");
  pictures.forEach((picture, at) => {
    if (!place.children[at]) {
      const made = make("section");
      made.append(make("h2"), make("p"), make("div", "", { role: "img", class: "picture" }));
      place.append(made);
    }
    const [heading, caption, figure] = place.children[at].children;
    put(heading, picture.heading);
    put(caption, picture.caption);
    figure.setAttribute("aria-label", picture.alternative);
    Plotly.react(figure, picture.figure.data, picture.figure.layout, { displayModeBar: false, responsive: true });
  });
  while (place.children.length > pictures.length) place.lastElementChild.remove();
  if (problem) place.append(make("p", problem));
}

function bar(client) {
  const outside = make("span", "", { class: "share", "aria-hidden": "true" }), inside = make("span");
  inside.style.width = `${100 * Math.min(client.share ?? 0, 1)}%`;
  outside.append(inside);
  const both = make("span", "", { class: "shared" });
  if (client.share !== null) both.append(outside);
  both.append(client.of);
  return both;
}

function showClients() {
  const shown = all ? clients : clients.slice(0, FEW), button = find("#all-clients");
  find("#clients").hidden = clients.length === 0;
  fill(find(".clients tbody"), shown.map((client) => {
    const last = make("span", client.last, { class: client.ok ? "" : "failed" });
    return [client.client, client.device, client.budget, client.peak, bar(client), client.failed, last];
  }));
  button.hidden = clients.length <= FEW;
  button.textContent = all ? `Show the first ${FEW} clients` : `Show all ${clients.length} clients`;
}

function showFailures(found) {
  find("#failures").hidden = found.failures.length === 0;
  fill(find(".devices tbody"), found.devices);
  fill(find(".reasons tbody"), found.failures);
}

function update(found) {
  put(find("#state"), found.state);
  find("#state").className = found.state;
  put(find("#says"), found.says);
  put(find("#why"), found.why);
  showBar(find("#rounds"), found.rounds.done, found.rounds.of);
  showNow(found.now);
  showFacts(found.facts);
  if (found.figures) {
    showFigures(found.figures, found.no_figures ?? "");
    clients = found.clients;
    showClients();
    showFailures(found);
    version = found.version;
  }
  return found.state === "running" ? 1000 : 4000;
}

find("#all-clients").addEventListener("click", () => { all = !all; showClients(); });
const path = name.split("/").map(encodeURIComponent).join("/");
poll(() => `/api/run/${path}?have=${encodeURIComponent(version)}`, update);
