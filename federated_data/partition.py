"""Partitions of examples among clients: pure functions of (labels, clients, seed).

Every partition returns one sorted array of int64 example numbers per client, and gives no example twice. Examples that cannot
be divided evenly, or whose class no client was given, go to no client. The client number alone has no influence on the data, so
a fleet may assign memory by client number.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTITIONS = ("iid", "dirichlet", "pathological", "skewed", "natural")

# The purpose of each stream of random numbers. A change of a number changes every partition of its kind.
_IID, _DIRICHLET, _PATHOLOGICAL, _VALIDATION, _SKEWED, _NATURAL = 11, 12, 13, 14, 15, 16

_MAX_DRAWS = 2000


def partition_rows(
    kind: str,
    labels: NDArray[Any],
    clients: int,
    seed: int,
    *,
    alpha: float,
    balanced: bool,
    classes_per_client: int,
    skew: float,
    capped: bool = False,
    groups: NDArray[Any] | None = None,
    groups_per_client: int = 0,
    min_examples: int = 10,
) -> list[Ints]:
    """Return the rows of all clients under the partition `kind`, which reads only the settings that concern it."""
    if kind == "iid":
        return iid(labels, clients, seed)
    if kind == "dirichlet":
        return dirichlet(labels, clients, seed, alpha, balanced, capped=capped, min_examples=min_examples)
    if kind == "pathological":
        return pathological(labels, clients, seed, classes_per_client)
    if kind == "skewed":
        return draw_skewed(labels, clients, seed, classes_per_client, skew)
    if kind == "natural":
        return natural(labels, clients, seed, groups, groups_per_client)
    raise ValueError(f"unknown partition {kind!r}; known: {', '.join(PARTITIONS)}")


def iid(labels: NDArray[Any], clients: int, seed: int) -> list[Ints]:
    """Give every example to a random client; sizes differ by at most one."""
    labels = _check(labels, clients)
    order = _rng(seed, _IID).permutation(len(labels))
    return _sort(np.array_split(order, clients))


def dirichlet(
    labels: NDArray[Any],
    clients: int,
    seed: int,
    alpha: float,
    balanced: bool,
    *,
    capped: bool = False,
    min_examples: int = 10,
) -> list[Ints]:
    """Draw label skew of concentration `alpha` > 0: the smaller, the fewer classes a client has.

    Balanced (FeDepth's alpha(lambda)): each client draws p ~ Dirichlet(alpha * 1_K) and takes exactly floor(n / clients)
    examples, each of a class drawn from p; an exhausted class is not drawn any more. The last clients take what is left, so
    clients draw in shuffled order. `min_examples` does not apply.

    Unbalanced (FeDepth's alpha_u, SpaFL): each class is divided by p ~ Dirichlet(alpha * 1_clients). With `capped`, clients
    that already have n / clients examples get nothing of later classes. The draw is repeated until every client has
    `min_examples`. Raises ValueError if that takes too many draws.
    """
    labels = _check(labels, clients)
    if not 0 < alpha <= 1e6:
        raise ValueError(
            f"data.partition-alpha is {alpha}; allowed are numbers above 0 up to 1e6 (0.1 is strong skew, 100 nearly none)"
        )
    rng = _rng(seed, _DIRICHLET)
    sizes = np.unique(labels, return_counts=True)[1]
    if balanced:
        counts = _balanced_counts(sizes, clients, alpha, rng)
    else:
        counts = _unbalanced_counts(sizes, clients, alpha, min_examples, rng, capped=capped)
    return _draw_rows(labels, counts, rng)


def pathological(labels: NDArray[Any], clients: int, seed: int, classes_per_client: int) -> list[Ints]:
    """Give each client exactly `classes_per_client` classes, drawn from shuffled decks; a class is divided evenly.

    Every class is used if clients * classes_per_client allows it. Raises ValueError if a class has fewer examples than clients.
    """
    labels = _check(labels, clients)
    classes, sizes = _classes(labels, classes_per_client)
    rng = _rng(seed, _PATHOLOGICAL)
    hands = _deal_classes(len(classes), clients, classes_per_client, rng)
    holders = Counter(card for hand in hands for card in hand)
    counts = np.zeros((clients, len(classes)), dtype=np.int64)
    seen: Counter[int] = Counter()
    for client, hand in enumerate(hands):
        for card in hand:
            each, over = divmod(int(sizes[card]), holders[card])
            if each == 0:
                raise ValueError(
                    f"class {classes[card]} has {sizes[card]} examples for {holders[card]} clients; "
                    "use fewer clients or smaller data.partition-classes"
                )
            counts[client, card] = each + (seen[card] < over)
            seen[card] += 1
    return _draw_rows(labels, counts, rng)


def draw_skewed(labels: NDArray[Any], clients: int, seed: int, classes_per_client: int, skew: float) -> list[Ints]:
    """Draw a fraction `skew` (in [0, 1]) of each client's floor(n / clients) examples from its own classes, the rest from any.

    FedProphet, section 7.1: on each client 80 % of the data belong to about 20 % of the classes, 20 % to the others. As in its
    authors' code, the skewed part of all data is ordered by class and cut into clients * classes_per_client shards,
    classes_per_client for each client; the rest is divided evenly. So every client has the same number of examples, whatever
    the sizes of classes. The rest also contains examples of a client's own classes: two of ten classes make 84 % of its data if
    80 % are requested.

    Our variant takes the same fraction of every class, orders the classes randomly, and gives a client one shard of each run of
    `clients` shards, not any shards. If a run is a whole number of classes (CIFAR-10: five), that is exactly
    `classes_per_client` classes; with the authors' draw about one client in ten has one class instead of two. Otherwise
    (Caltech-256) a shard across a border has two classes.
    """
    labels = _check(labels, clients)
    classes, sizes = _classes(labels, classes_per_client)
    if not 0 <= skew <= 1:
        raise ValueError(
            f"data.partition-skew is {skew}; it must be at least 0 (as iid) and at most 1 (own classes only)"
        )
    quota = len(labels) // clients
    own = round(skew * quota)
    if 0 < own < classes_per_client:
        raise ValueError(
            f"data.partition-skew {skew} makes {own} of a client's {quota} examples those of its {classes_per_client} "
            "classes, too few for one of each; use fewer clients, smaller data.partition-classes or larger "
            "data.partition-skew"
        )
    rng = _rng(seed, _SKEWED)
    order = rng.permutation(len(classes))
    # Rounding the running sum down takes clients * own in total, and never more of a class than it has.
    takes = np.diff(np.cumsum(sizes[order]) * (clients * own) // len(labels), prepend=0)
    queues = [rng.permutation(np.flatnonzero(labels == classes[k])) for k in order]
    line = np.concatenate([queue[:take] for queue, take in zip(queues, takes, strict=True)])
    rest = rng.permutation(np.concatenate([queue[take:] for queue, take in zip(queues, takes, strict=True)]))
    lengths = [own // classes_per_client + (shard < own % classes_per_client) for shard in range(classes_per_client)]
    holders = np.concatenate([np.repeat(rng.permutation(clients), length) for length in lengths])
    parts = np.split(rest[: clients * (quota - own)], clients)
    return _sort([np.concatenate([line[holders == client], part]) for client, part in enumerate(parts)])


def natural(
    labels: NDArray[Any], clients: int, seed: int, groups: NDArray[Any] | None, groups_per_client: int
) -> list[Ints]:
    """Give each client whole groups of examples, such as those of a writer: `groups_per_client` drawn for each client.

    If that is 0, all groups are given, as evenly as their number allows. PriSM's FEMNIST has ten writers per client; the
    remaining writers go to no client.
    """
    labels = _check(labels, clients)
    if groups is None:
        raise ValueError(
            "data.partition = natural: these data have no groups; npz data have them as group_train, and of a table or a hub's "
            "data set data.group-column names them"
        )
    known = np.unique(groups)
    wanted = clients * max(1, groups_per_client)
    if wanted > len(known):
        raise ValueError(
            f"data.partition-groups is {groups_per_client}: {clients} clients need {wanted} groups, these data have "
            f"{len(known)}; use fewer clients or fewer groups for each"
        )
    order = _rng(seed, _NATURAL).permutation(known)
    hands = np.array_split(order[:wanted] if groups_per_client else order, clients)
    return _sort([np.flatnonzero(np.isin(groups, hand)) for hand in hands])


def split(indices: NDArray[Any], fraction: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """Split one client's examples into (train, validation), both sorted.

    Validation gets the nearest whole number to `fraction` (in [0, 1)) of them, but never all.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"data.validation-fraction is {fraction}; it must be at least 0 and below 1")
    size = max(0, min(round(fraction * len(indices)), len(indices) - 1))
    order = _rng(seed, client, _VALIDATION).permutation(np.asarray(indices, dtype=np.int64))
    return np.sort(order[size:]), np.sort(order[:size])


def client_class_counts(labels: NDArray[Any], client_rows: list[Ints], num_classes: int) -> Ints:
    """Return the number of examples per client and class: [clients, num_classes]."""
    counts = [np.bincount(labels[rows], minlength=num_classes) for rows in client_rows]
    return np.array(counts, dtype=np.int64).reshape(len(client_rows), num_classes)


def _classes(labels: NDArray[Any], classes_per_client: int) -> tuple[NDArray[Any], Ints]:
    """Return the classes present and their sizes. Raises ValueError unless a client can have that many."""
    classes, sizes = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_client <= len(classes):
        raise ValueError(f"data.partition-classes is {classes_per_client}; these data allow 1 to {len(classes)}")
    return classes, sizes


def _balanced_counts(sizes: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Return the examples per client and class, [clients, classes]; every row sums to floor(n / clients)."""
    left = sizes.copy()
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    quota = int(sizes.sum()) // clients
    weights = rng.dirichlet(np.full(len(sizes), alpha), size=clients)
    for client in rng.permutation(clients):
        # A multinomial draw cut at what is left, with the deficit drawn again from the other classes, has the same distribution
        # as drawing one by one and skipping exhausted classes.
        while need := quota - int(counts[client].sum()):
            draw = np.minimum(rng.multinomial(need, _normalise(weights[client], left > 0, rng)), left)
            counts[client] += draw
            left -= draw
    return counts


def _unbalanced_counts(
    sizes: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator, *, capped: bool
) -> Ints:
    """Return the examples per client and class, [clients, classes]; every column sums to the class's size."""
    total = int(sizes.sum())
    if clients * minimum > total:
        raise ValueError(
            f"{clients} clients with at least {minimum} examples each need {clients * minimum}, there are {total}; "
            "use fewer clients, or data.partition-balanced = true, which has no such limit"
        )
    best = 0
    for _ in range(_MAX_DRAWS):
        held = np.zeros(clients, dtype=np.int64)
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        for k, weights in enumerate(rng.dirichlet(np.full(clients, alpha), size=len(sizes))):
            fractions = _normalise(weights, (held * clients < total) | (not capped), rng)
            # Rounding the running sum, which ends at the class's size, gives away every example.
            cuts = np.rint(np.cumsum(fractions) * sizes[k]).astype(np.int64)
            counts[:, k] = np.diff(cuts, prepend=0)
            held += counts[:, k]
        if held.min() >= minimum:
            return counts
        best = max(best, int(held.min()))
    raise ValueError(
        f"data.partition-alpha {alpha}: in {_MAX_DRAWS} draws the poorest of {clients} clients got at most {best} of {total}, "
        f"and each needs {minimum}; use a larger data.partition-alpha, fewer clients, or data.partition-balanced = true"
    )


def _normalise(weights: Floats, allowed: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """Return `weights` on the allowed entries, summing to one."""
    kept = np.where(allowed, weights, 0.0)
    if not kept.sum() > 0:  # a small alpha leaves only zeros there: the limit is one random entry
        kept = np.zeros(len(weights))
        kept[rng.choice(np.flatnonzero(allowed))] = 1.0
    return np.asarray(kept / kept.sum(), dtype=np.float64)


def _deal_classes(classes: int, clients: int, hand_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Deal `hand_size` distinct classes to each client, from one shuffled deck of all classes after another."""
    deck: list[int] = []
    hands: list[list[int]] = [[] for _ in range(clients)]
    for hand in hands:
        while len(hand) < hand_size:
            card = next((card for card in deck if card not in hand), None)
            if card is None:  # what is left of the deck goes first to the next client
                deck += rng.permutation(classes).tolist()
                continue
            deck.remove(card)
            hand.append(card)
    return hands


def _draw_rows(labels: NDArray[Any], counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Draw the examples: `counts[client, k]` of the k-th class present, at random."""
    drawn: list[list[Ints]] = [[] for _ in counts]
    for k, label in enumerate(np.unique(labels)):
        queue = rng.permutation(np.flatnonzero(labels == label))
        for own, part in zip(drawn, np.split(queue, np.cumsum(counts[:, k])), strict=False):
            own.append(part)
    return _sort([np.concatenate(own) for own in drawn])


def _sort(client_rows: list[Any]) -> list[Ints]:
    return [np.sort(rows).astype(np.int64) for rows in client_rows]


def _rng(*key: int) -> np.random.Generator:
    if min(key) < 0:
        raise ValueError(f"seed and client are {key[:-1]}; they must not be negative")
    return np.random.default_rng(np.random.SeedSequence(key))


def _check(labels: NDArray[Any], clients: int) -> NDArray[Any]:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels are {labels.dtype} of shape {labels.shape}; they must be integers of shape (n,)")
    if not 1 <= clients <= len(labels):
        raise ValueError(f"{clients} clients for {len(labels)} examples; allowed are 1 to {len(labels)}")
    return labels
