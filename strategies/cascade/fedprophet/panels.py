"""FedProphet in a run's page: how each stage was attacked, what it builds on, and which clients trained which part."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from piecework.device_profiles.profile import format_percent
from piecework.strategies.panels import Cells, Curve, Panel, Plot, Record, atom_range, by_stage, from_to

NORMS = {"l2": "L2", "linf": "L-infinity"}
STAGE_COLUMNS = ("stage", "rounds", "attacked from", "distance", "alpha", "epsilon", "builds on")
DEPTH_COLUMNS = ("stage", "trained", "updates", "fraction", "clients", "devices")


def panels(rounds: Sequence[Record], settings: Record) -> list[Panel]:
    """Return a panel of each stage's perturbation, and one of which clients trained which part; none for a single module."""
    if not any(r.get("modules", 1) > 1 for r in rounds):
        return []
    norm = NORMS.get(str(settings["fedprophet.feature-norm"]), str(settings["fedprophet.feature-norm"]))
    validators = "all clients" if settings.get("fedprophet.validation-clients") == "all" else "the clients of a round"
    return [
        Panel(
            "Adaptive perturbation",
            "Epsilon: radius of the ball in which a module's inputs are attacked in training. Those of the first module are "
            f"images (L-infinity, fixed); those of later ones are features ({norm}): alpha times the mean distance by which an "
            "attack moves the output of the module before. Rounds without attack have no point. A stage builds on the modules "
            f"before it, as accurate as they were on what {validators} held back as validation data.",
            perturbation_plots(rounds, norm),
            STAGE_COLUMNS,
            stage_rows(rounds),
            stages=True,
        ),
        Panel(
            "Modules trained",
            "Fraction of a stage's accepted updates in which an atom was trained: the stage's module by all, further ones by "
            "the clients whose memory and speed allowed.",
            [depth_cells(rounds)],
            DEPTH_COLUMNS,
            depth_rows(rounds),
        ),
    ]


def perturbation_plots(rounds: Sequence[Record], norm: str) -> tuple[Plot, Plot]:
    """Return epsilon and alpha below each other; the ball around images has another norm and its own curve."""
    radii = [
        Curve(f"epsilon, features ({norm})", points(rounds, "epsilon", images=False)),
        Curve("epsilon, images (L-infinity)", points(rounds, "epsilon", images=True)),
    ]
    alphas = [Curve("alpha", points(rounds, "alpha", images=False))]
    # a stage may have been attacked in a single round, which is a point and no curve
    return Plot("epsilon", radii, marked=True), Plot("alpha", alphas, marked=True)


def points(rounds: Sequence[Record], key: str, *, images: bool) -> list[tuple[float, float | None]]:
    """Return a figure over the rounds in which images, or features, were attacked, interrupted where a stage ended."""
    found: list[tuple[float, float | None]] = []
    for _, records in by_stage(rounds):
        attacked = [r for r in records if not r["clean_round"] and (r["distance"] is None) == images]
        found += [*((r["round"], r[key]) for r in attacked), (records[-1]["round"] + 0.5, None)]
    return found


def stage_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a stage's rounds, first and last alpha and epsilon, and the accuracies of the modules before it."""
    rows: list[tuple[str, ...]] = []
    for stage, records in by_stage(rounds):
        attacked = [r for r in records if not r["clean_round"]]
        fixed = [records[0][key] for key in ("fixed_accuracy", "fixed_adversarial_accuracy")]
        features = records[0]["distance"] is not None
        rows.append(
            (
                stage,
                from_to(records[0]["round"], records[-1]["round"]),
                str(attacked[0]["round"]) if attacked else "-",
                f"{records[0]['distance']:.4g}" if features else "images",
                first_and_last(attacked, "alpha") if features else "-",
                first_and_last(attacked, "epsilon"),
                "-" if fixed[0] is None else f"{format_percent(fixed[0], 1)}, attacked {format_percent(fixed[1], 1)}",
            )
        )
    return rows


def first_and_last(records: Sequence[Record], key: str) -> str:
    """Format a figure of the first and the last round; `-` without rounds."""
    return from_to(f"{records[0][key]:.4g}", f"{records[-1][key]:.4g}") if records else "-"


def depth_cells(rounds: Sequence[Record]) -> Cells:
    """Return atoms by stages, darker the more of the stage's updates include them."""
    fractions: list[dict[int, float]] = []
    for _, records in by_stage(rounds):
        counts, updates = defaultdict[int, float](float), trained_atoms(records)
        for _, atoms in updates:
            for atom in atoms:
                counts[atom] += 1 / len(updates)
        fractions.append(counts)
    last = max((atom for counts in fractions for atom in counts), default=0)
    rows = [[counts.get(atom) for counts in fractions] for atom in range(last + 1)]
    return Cells([stage for stage, _ in by_stage(rounds)], rows, "atom")


def depth_rows(rounds: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return, by stage and range of atoms, the updates, their fraction of the stage's, and their devices."""
    rows: list[tuple[str, ...]] = []
    for stage, records in by_stage(rounds):
        updates, found = trained_atoms(records), defaultdict[tuple[int, ...], list[Record]](list)
        for client, atoms in updates:
            found[atoms].append(client)
        for atoms, of_these in sorted(found.items()):
            count, clients = len(of_these), len({c["client"] for c in of_these})
            devices = ", ".join(sorted({c["device"] for c in of_these}))
            fraction = format_percent(count / len(updates), 1)
            rows.append((stage, atom_range(atoms), str(count), fraction, str(clients), devices))
    return rows


def trained_atoms(records: Iterable[Record]) -> list[tuple[Record, tuple[int, ...]]]:
    """List the clients whose updates entered the model, with the atoms they trained."""
    return [
        (client, tuple(sorted(atom for piece in client["pieces"] for atom in piece)))
        for record in records
        for client in record["clients"]
        if client["status"] == "ok" and client["pieces"]
    ]
