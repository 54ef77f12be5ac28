"""The first sentence about a run: what it showed, from its records alone.

It says who trained what, how accurate the model is on which data, and whether the clients stayed within their budgets. A run
that failed, was stopped or goes on, was not evaluated, or trained parts of the model only, is said to be that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from piecework.device_profiles.profile import format_percent
from piecework.planning.coverage import consecutive
from piecework.report.display import UnderAttack, is_enforced, under_attack
from piecework.report.participation import accepted, participation
from piecework.server_app.run_folder import COMPLETED, STOPPED
from piecework.server_app.summary import peak_over_budget, trained_parts
from piecework.training.methods import METHODS

Record = dict[str, Any]
ENDINGS = {"failed": "the run failed", STOPPED: "the run was stopped", "unfinished": "the run has not ended"}


def first_sentence(settings: Record, rounds: Sequence[Record], final: Record | None, status: str) -> str:
    """Return what a run showed. `final` is the evaluation of the trained model, `status` that of `how_it_ended`."""
    strategy, model = settings.get("strategy", "-"), settings.get("model", "-")
    total, ended = settings.get("num-rounds", 0), ENDINGS.get(status, ENDINGS["unfinished"])
    if not rounds:
        return f"{strategy} has not trained {model}: {ended} before its first round was finished."
    failed = refusals(rounds)
    clients = participation(rounds)
    if not clients.trained:
        told = [f"{strategy} could not train {model}: no client's update entered the model", failed]
        return f"{'; '.join(filter(None, told))}; {ended} in round {rounds[-1]['round']} of {total}."
    of_all = f"{clients.trained} of {clients.clients} clients"
    who = of_all if clients.partial else count(clients.trained, "client")
    so_far = f"in {len(rounds)} of {total} rounds"
    when = {COMPLETED: f"in {count(len(rounds), 'round')}", "unfinished": f"{so_far} until now"}.get(
        status, f"{so_far} before {ended}"
    )
    told = [f"{strategy} trained {model} on {who}{wholly(rounds)} {when}: {accuracy_text(settings, rounds, final)}"]
    told += [part for part in (budget_text(rounds), untrained_text(rounds)) if part]
    if failed:
        told.append(failed)
    return "; ".join(told) + "."


def wholly(rounds: Sequence[Record]) -> str:
    """Return that no client trained all atoms in one piece; empty where one did, or records do not say."""
    pieces = [piece for row in accepted(rounds) for piece in row.get("pieces", [])]
    atoms = {atom for piece in pieces for atom in piece}
    if len(atoms) < 2 or any(len(piece) == len(atoms) for piece in pieces):
        return ""
    return ", none of which trained it whole at once,"


def accuracy_text(settings: Record, rounds: Sequence[Record], final: Record | None) -> str:
    """Return how accurate the model is, on which data, and under attack where that was tried."""
    if final:
        said = f"{format_percent(final['accuracy'], 1)} of the test data right at the end"
        return said + "".join(f", {attacked(each)}" for each in under_attack(final).values())
    data = own_data(settings) if rounds[-1].get("personal") else "the test data"
    for clean, under, where in (
        ("accuracy", "adversarial_accuracy", data),
        ("client_accuracy", "client_adversarial_accuracy", "the clients' validation data"),
    ):
        if evaluated := [r for r in rounds if r.get(clean) is not None]:
            last = evaluated[-1]
            who = whose_text(settings) if last.get("personal") else ""
            robust = f", {format_percent(last[under], 1)} under attack" if last.get(under) is not None else ""
            return f"{who}{format_percent(last[clean], 1)} of {where} right after round {last['round']}{robust}"
    return "its accuracy was not evaluated"


def whose_text(settings: Record) -> str:
    """Return which model a personal evaluation is of: each client's own, or one for all, which clients may fine-tune for it."""
    if keeps_own_models(settings):
        return "each client's own model gets a mean of "
    epochs = next((value for key, value in settings.items() if key.endswith(".fine-tuning-epochs")), 0)
    tuned = f", fine-tuned by each client for {count(epochs, 'epoch')}," if epochs else ""
    return f"the model{tuned} gets a mean of "


def own_data(settings: Record) -> str:
    """Return the test data of a personal evaluation."""
    return "its own client's test data" if keeps_own_models(settings) else "each client's own test data"


def keeps_own_models(settings: Record) -> bool:
    """Return whether clients have models of their own."""
    entry = METHODS.get(settings.get("strategy", ""))
    return entry is None or entry.can.personal


def attacked(result: UnderAttack) -> str:
    """Return a result under attack: `31.2% under PGD-20 (of 500)`."""
    return f"{format_percent(result.accuracy, 1)} under {result.attack} (of {result.images})"


def budget_text(rounds: Sequence[Record]) -> str:
    """Return whether the clients that trained stayed within their budgets; empty if none of them had a limit."""
    if not is_enforced(rounds):
        return "budgets were not enforced"
    peak = peak_over_budget(rounds)
    if peak is None:
        return ""
    share = format_percent(peak, 1)
    return (
        f"every client stayed within its memory budget (largest peak {share} of it)"
        if peak <= 1
        else f"not every client stayed within its memory budget (largest peak {share} of it)"
    )


def untrained_text(rounds: Sequence[Record]) -> str:
    """Return which parts of the model were never trained; empty if all were, or records do not say."""
    parts = trained_parts(rounds)
    never = [row["part"] for row in parts if not row["rounds"]]
    return f"never trained: {consecutive(never, [row['part'] for row in parts])}" if never else ""


def refusals(rounds: Sequence[Record]) -> str:
    """Return how many requests failed, and why: `3 of 200 requests failed (memory 2, timeout 1)`; empty if none did."""
    found = Counter(c["status"] for r in rounds for c in r["clients"] if c["status"] != "ok")
    if not found:
        return ""
    asked, failed = sum(r["asked"] for r in rounds), found.total()
    how_many = f"{failed} of {count(asked, 'request')}" if failed < asked else f"all {count(asked, 'request')}"
    why = ", ".join(f"{status} {n}" for status, n in sorted(found.items(), key=lambda item: (-item[1], item[0])))
    return f"{how_many if asked > 1 else 'the only request'} failed ({why})"


def count(number: int, name: str) -> str:
    """Format as `1 client`, `20 clients`."""
    return f"{number} {name}{'' if number == 1 else 's'}"
