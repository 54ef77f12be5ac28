"""The page of a claim, docs/claims/NAME.md, from its definition and its records alone."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.claims.definition import Case, Claim
from benchmarks.claims.drawing import draw
from benchmarks.claims.jobs import searches
from benchmarks.claims.pictures import Picture, case_pictures, headline, overview
from benchmarks.claims.records import DOCS, Records
from benchmarks.claims.standings import Standing, current, current_searches, reason_of, standings
from benchmarks.claims.tables import accuracies, costs, equal_time, judgements, rates, row_settings, settings
from benchmarks.claims.verdicts import MARGIN, RULE, Judgement, as_good_with_more_rounds, difference, judge
from benchmarks.tables.shared import prose

COMMAND = "python -m benchmarks.claims"
Found = dict[str, list[Standing]]


def write_pages(claim: Claim, folder: Path = DOCS) -> list[Path]:
    """Write the page and the pictures of a claim beside its records, and return the files: none without a record."""
    records = Records.read(claim.name, folder)
    if not records.runs and not records.searches:
        return []
    found = standings(claim, current(claim, records))
    page = folder / f"{claim.name}.md"
    page.write_text(document(claim, records, found), encoding="utf-8")
    drawn = pictures(claim, found)
    for picture in drawn:
        draw(picture, folder / picture.file)
    return [page, *(folder / picture.file for picture in drawn)]


def pictures(claim: Claim, found: Found) -> list[Picture]:
    """Return all pictures of a claim."""
    of_cases = (each for case in claim.cases for each in case_pictures(claim, case, found))
    return [*headline(claim, found), *overview(claim, found), *of_cases]


def document(claim: Claim, records: Records, found: Found) -> str:
    """Return the text of the page. `found` are the standings by the records."""
    judged = [
        judgement
        for order in claim.orders
        for case in claim.cases
        if (judgement := judge(claim, order, case.name, found[case.name])) is not None
    ]
    blocks = [
        f"# {claim.title}",
        f"<!-- Written by `{COMMAND} table {claim.name}` from {claim.name}.json and\n"
        f"benchmarks/claims/{claim.name}.toml. Do not edit: a test compares it. -->",
        claim.question.strip(),
        f"**What is claimed.** {claim.paper.strip()}",
        in_short(claim, found, judged),
        *shown([*headline(claim, found), *overview(claim, found)]),
        *how_to_read(claim),
        *(block for case in claim.cases for block in of_case(claim, case, found)),
        *of_orders(judged, found),
        *of_rates(claim, records),
        f"## What differs from the paper's setting\n\n{claim.gap.strip()}",
        *of_settings(claim),
        *provenance(claim, records, found),
    ]
    return "\n\n".join(blocks) + "\n"


def in_short(claim: Claim, found: Found, judged: Sequence[Judgement]) -> str:
    """Return the findings in a few lines: who is first in each case, how many orders hold, how many runs are missing."""
    lines = [
        f"- {case.name}: {leader(found[case.name])}{of_longer(claim, case, found[case.name])}" for case in claim.cases
    ]
    if judged:
        begun = cases_begun(found)
        counts = Counter(each.verdict if each.case in begun else "later" for each in judged)
        said = f"hold: {counts['holds']}, do not hold: {counts['does not hold']}, undecided: {counts['undecided']}"
        said += f", without a run: {counts['later']}" * bool(counts["later"])
        lines.append(f"- Claimed orders, counted in each of their cases, that {said}.")
    missing = sum(len(each.missing) for there in found.values() for each in there)
    total = missing + sum(len(each.runs) + len(each.failed) for there in found.values() for each in there)
    lines.append(
        f"- {missing} of {total} runs {'is' if missing == 1 else 'are'} missing."
        if missing
        else f"- All {total} runs are done."
    )
    return "## In short\n\n" + "\n".join(lines)


def cases_begun(found: Found) -> list[str]:
    """Return the cases that have a record."""
    return [case for case, there in found.items() if any(each.recorded for each in there)]


def leader(there: Sequence[Standing]) -> str:
    """Return which candidate is first in a case, and how far the next one is behind."""
    ranked = [each for each in there if each.candidate and each.runs]
    if not ranked:
        return "no candidate has trained." if any(each.recorded for each in there) else "no run yet."
    first = ranked[0]
    said = f"**{first.row.name}** has the highest accuracy, {first.mean:.1f} %"
    if len(ranked) == 1:
        return f"{said}, and no other candidate has trained."
    behind = difference(first, ranked[1])
    if behind.points is None:
        return f"{said}; {ranked[1].row.name} has the next one, {ranked[1].mean:.1f} %."
    far = f"{abs(behind.points):.1f} points {'behind' if behind.points >= 0 else 'ahead'}"
    verdict = {"behind": "ahead"}.get(behind.verdict, behind.verdict)
    return (
        f"{said}; {ranked[1].row.name} is next, {far} with the seeds that both have ({verdict} by the rule for orders)."
    )


def of_longer(claim: Claim, case: Case, there: Sequence[Standing]) -> str:
    """Return which way to train is ahead of the first candidate by having more rounds, or as good; empty if none is."""
    for each, found in as_good_with_more_rounds(claim, case, there)[:1]:
        near = {"ahead": "is ahead of it", "level": "is level with it"}.get(
            found.verdict, f"is within {MARGIN:g} points of it"
        )
        return f" With more rounds *{each.row.name}* {near}, {each.mean:.1f} %."
    return ""


def how_to_read(claim: Claim) -> list[str]:
    """Return what the figures of all cases are."""
    what = "accuracy" if claim.measure == "accuracy" else "accuracy on adversarial examples (PGD)"
    mean = f"the mean of the last {claim.last} evaluations" if claim.last > 1 else "that of the last evaluation"
    return [
        "## How to read the tables",
        prose(
            f"""Rows are sorted by their {what} on the test split in percent: {mean}, of which the mean over the seeds is
            taken, and ± is the standard deviation over the seeds. Rows in italics are bounds, which are not realistic on
            these devices, or experiments, which show why an order does not hold. Density is the percentage of the
            clients' weights that is not pruned in the last round. Participation is the percentage of asked clients that
            answered with an update: it is 100 for systems that do not ask clients without a task, however many these are.
            The peak is the largest one of all clients and seeds, as a fraction of the client's budget. Megabytes (10^6
            bytes) are those of all messages of training in a run, down and up. TFLOPs are those of all clients'
            training. Simulated seconds are those of the fleet's devices, if all of them have this storage; core seconds
            are the processor time that the run took here. All are means over the seeds."""
        ),
        prose(
            """Simulated time is compared at two moments: when the first candidate is through all its rounds, and when half of
            the candidates are. Neither is fair to all. At the first, slow systems are judged by their first rounds, in which
            their rate has not fallen yet; at the second, quick systems count with their final accuracy, although they could
            have trained on. A figure is that of the row's last evaluation by that time, or at most a hundredth of it later,
            of at most 20 that the records keep."""
        ),
    ]


def of_case(claim: Claim, case: Case, found: Found) -> list[str]:
    """Return the tables and pictures of a case."""
    there = found[case.name]
    heading = [
        f"## {case.name[0].upper()}{case.name[1:]}",
        *([f"Settings of this case: {settings(case.settings)}."] if case.settings else []),
    ]
    if not any(each.recorded for each in there):
        return [
            *heading,
            f"None of its {len(there)} rows is recorded yet. They are run by {command_of(claim, case)}.",
        ]
    return [
        *heading,
        accuracies(claim, case, there),
        *absent(claim, case, there),
        *shown(case_pictures(claim, case, found)),
        *([f"What it costs:\n\n{costs(there)}"] if any(each.runs for each in there) else []),
        *([f"Accuracy at equal simulated time:\n\n{table}"] if (table := equal_time(there)) else []),
    ]


def command_of(claim: Claim, case: Case) -> str:
    """Return the command that runs what is missing of a case."""
    return f'`{COMMAND} run {claim.name} --case "{case.name}" --data-dir FOLDER`'


def absent(claim: Claim, case: Case, there: Sequence[Standing]) -> list[str]:
    """Return which runs of a case failed, with the reason, and which are missing, with the command that runs them."""
    lines = [f"- {each.row.name}, seed {run.seed}: {reason_of(run)}" for each in there for run in each.failed]
    missing = [f"{each.row.name} ({seeds(each.missing)})" for each in there if each.missing]
    command = f"{command_of(claim, case)} (with `--only ROW` those of one row)"
    return (["\n".join(lines)] if lines else []) + (
        [f"Missing: {'; '.join(missing)}. Run by {command}."] if missing else []
    )


def seeds(numbers: Sequence[int]) -> str:
    """Return seeds in words."""
    return f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def shown(drawn: Sequence[Picture]) -> list[str]:
    """Return the lines that show pictures."""
    return [f"![{picture.title}]({picture.file})" for picture in drawn]


def of_orders(judged: Sequence[Judgement], found: Found) -> list[str]:
    """Return what became of the claimed orders, with the causes of those that do not hold."""
    if not judged:
        return []
    begun = cases_begun(found)
    known = [each for each in judged if each.case in begun]
    later = dict.fromkeys(each.case for each in judged if each.case not in begun)
    causes = dict.fromkeys(each.order.cause.strip() for each in known if each.verdict == "does not hold")
    return [
        "## The claimed orders",
        prose(RULE),
        *([judgements(known)] if known else []),
        *([f"Not judged before there is a record: {'; '.join(later)}."] if later else []),
        *(f"**Why not.** {cause}" for cause in causes if cause),
    ]


def of_rates(claim: Claim, records: Records) -> list[str]:
    """Return the searches of the rates."""
    if claim.search is None:
        return []
    table, missing = rates(claim, records), len(searches(claim)) - len(current_searches(claim, records))
    return [
        "## The rates",
        prose(
            f"""Every row gets the same search: its rates with one seed, in runs with 1/{claim.search.fraction} of the rounds
            unless the definition says otherwise. The figure is the last accuracy in percent, by which the rate is chosen.
            While the best one is the lowest or the highest that was tried, the next one is tried too, as far as the search
            reaches. A chosen rate that is marked as the lowest or the highest is one beyond which none was tried yet."""
        ),
        *([table] if table else []),
        *(
            [f"{missing} of {len(searches(claim))} searches {'is' if missing == 1 else 'are'} missing."]
            if missing
            else []
        ),
    ]


def of_settings(claim: Claim) -> list[str]:
    """Return the settings of all rows, and of each."""
    common = [f"All runs: {settings(claim.settings)}."] if claim.settings else []
    return ["## Settings", *common, row_settings(claim)]


def provenance(claim: Claim, records: Records, found: Found) -> list[str]:
    """Return the commands that gave all this, and where the runs were made."""
    made = Counter((run.commit, run.machine) for there in found.values() for each in there for run in each.runs)
    where = [f"- {count} run{'s' * (count > 1)} at {commit} on {machine}" for (commit, machine), count in made.items()]
    old = len(records.runs) - sum(len(each.runs) + len(each.failed) for there in found.values() for each in there)
    commands = {
        f"run {claim.name}": "starts what is missing, goes on with what was interrupted",
        f"status {claim.name}": "what is missing, and how long it will take",
        "collect FOLDER": f"copies the figures of the runs below a folder to {claim.name}.json",
        f"table {claim.name}": "writes this page and its pictures",
    }
    width = max(map(len, commands))
    return [
        "## How these figures were made",
        "\n".join(f"    {COMMAND} {words:{width}}    # {what}" for words, what in commands.items()),
        *(["\n".join(where)] if where else []),
        *([f"{old} recorded run{'s' * (old > 1)} of other settings than the definition's left out."] if old else []),
    ]
