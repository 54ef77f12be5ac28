// What the pages share: texts put into elements, and asking the server again and again. All texts come ready from the server,
// and are put in as text, never as HTML.

const WAIT_HIDDEN = 15000, WAIT_LONGEST = 8000; // milliseconds

export const find = (selector) => document.querySelector(selector);

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text; // or a screen reader would read it again
  element.hidden = text === "";
}

export function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Rows of texts or elements, in a table that a narrow window shows without its head: each cell knows its column. Roles keep it a
// table for screen readers where it is not laid out as one.
export function fill(body, rows) {
  const labels = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  body.replaceChildren(...rows.map((cells) => {
    const row = make("tr", "", { role: "row" });
    row.append(...cells.map((cell, at) => {
      const made = make("td", "", { role: "cell", "data-label": labels[at] });
      made.append(cell);
      return made;
    }));
    return row;
  }));
}

// Ask at `address()` and hand the answer to `update`, which returns the milliseconds until the next time.
export function poll(address, update) {
  let timer, asking = false, failures = 0, since = null;
  const away = find("#away");

  async function ask() {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    let found = null, wait = 1000;
    try {
      const answer = await fetch(address(), { cache: "no-store", signal: AbortSignal.timeout(60000) });
      found = await answer.json();
    } catch {
      since ??= new Date().toLocaleTimeString();
      failures += 1;
      wait = Math.min(1000 * 2 ** failures, WAIT_LONGEST);
      put(away, `The server has not answered since ${since}. What you see is from then; the page goes on when it is back.`);
    }
    asking = false;
    if (found !== null) {
      failures = 0;
      since = null;
      put(away, found.problem ?? "");
      if (!found.problem) wait = update(found);
    }
    timer = setTimeout(ask, document.hidden ? WAIT_HIDDEN : wait);
  }

  document.addEventListener("visibilitychange", () => document.hidden || ask());
  ask();
}
