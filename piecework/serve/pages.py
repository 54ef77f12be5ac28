"""The pages' HTML: what stands still. Their scripts fetch what moves, and put it in as text."""

from html import escape

# Everything comes from this server, but for what plotly writes into its own pictures: styles, and images of them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
BACK = '<nav aria-label="Pages"><a href="/">All runs</a></nav>'
AWAY = '<p id="away" role="alert" hidden></p><noscript><p role="alert">This page needs JavaScript.</p></noscript>'
COLUMNS = ("Compare", "Run", "State", "Strategy", "Data set", "Rounds", "Accuracy", "Time left", "Report")


def document(title: str, body: str, *scripts: str) -> str:
    """Return a page of its own style and scripts."""
    sources = "".join(
        f'<script src="/{name}" defer></script>'
        if name == "plotly.js"
        else f'<script type="module" src="/{name}"></script>'
        for name in scripts
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<link rel="stylesheet" href="/assets/style.css">{sources}</head>\n<body>\n{body}\n</body></html>\n'
    )


def table(kind: str, *columns: str) -> str:
    """Return an empty table, which a narrow window shows as cards."""
    head = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in columns)
    return (
        f'<table class="{kind} cards" role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        '<tbody role="rowgroup"></tbody></table>'
    )


def list_page(root: str) -> str:
    """Return the page with all runs of a folder."""
    body = f"""<main><h1>Runs</h1>
<p>In <code>{escape(root)}</code></p>{AWAY}
<p id="counts" role="status" aria-live="polite">Reading the runs …</p>
<form action="/compare" method="get">
<div class="bar"><label>Filter <input type="search" id="filter" autocomplete="off"></label>
<button type="submit" id="compare" disabled>Compare</button></div>
{table("runs", *COLUMNS)}
</form><p id="left-out" hidden></p></main>"""
    return document("Runs: Piecework", body, "assets/list.js")


def run_page(name: str, report: str) -> str:
    """Return the page of a run; `report` is the address of its report."""
    body = f"""<nav aria-label="Pages"><a href="/">All runs</a> <a href="{escape(report)}">Report</a></nav>
<main data-run="{escape(name)}"><h1>{escape(name)} <small id="state"></small></h1>{AWAY}
<p id="says" class="says" role="status" aria-live="polite">Reading the run …</p>
<progress id="rounds" aria-label="rounds done" hidden></progress>
<pre id="why" hidden></pre>
<section id="now" hidden><h2>Now</h2><p id="now-says"></p>
<progress id="now-bar" aria-label="clients done in this round" hidden></progress></section>
<dl id="facts"></dl>
<div id="figures"></div>
<section id="failures" hidden><h2>Failures</h2><p>Clients that were asked, and whose answer did not enter the model.</p>
{table("devices", "Device", "Failed")}
{table("reasons", "Status", "Count", "Reason (the first of its kind)")}</section>
<section id="clients" hidden><h2>Clients</h2>
<p>Budget and measured peak of training memory, of the round in which the peak came closest to the budget.</p>
{table("clients", "Client", "Device", "Budget", "Peak", "Of budget", "Failed", "Last answer")}
<button type="button" id="all-clients" hidden></button></section>
</main>"""
    return document(f"{name}: Piecework", body, "plotly.js", "assets/run.js")


def message_page(title: str, text: str) -> str:
    """Return a page that says why there is nothing else to show."""
    return document(title, f"{BACK}<main><h1>{escape(title)}</h1><pre>{escape(text)}</pre></main>")
