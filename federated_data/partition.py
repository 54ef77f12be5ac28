"""Who holds which examples: pure functions of (labels, clients, seed).

Every partition returns one array of int64 example numbers a client, sorted, and no example is given twice. Examples
that cannot be dealt out evenly, or whose class no client was dealt, stay with no client. Being client 3 rather than client 90
decides nothing by itself, so a fleet may give memory by client number.
"""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PARTITIONS = ("iid", "dirichlet", "pathological", "skewed", "natural")

# What a stream of random numbers is for. Changing one changes every partition of that kind.
_IID, _DIRICHLET, _PATHOLOGICAL, _VALIDATION, _SKEWED, _NATURAL = 11, 12, 13, 14, 15, 16

_MAX_DRAWS = 2000


def make_shares(
    kind: str,
    labels: NDArray[Any],
    clients: int,
    seed: int,
    *,
    alpha: float,
    balanced: bool,
    classes_per_client: int,
    skew: float,
    groups: NDArray[Any] | None = None,
    groups_per_client: int = 0,
    min_examples: int = 10,
) -> list[Ints]:
    """The shares of all clients under the partition `kind`; each reads only the settings that concern it."""
    if kind == "iid":
        return iid(labels, clients, seed)
    if kind == "dirichlet":
        return dirichlet(labels, clients, seed, alpha, balanced, min_examples=min_examples)
    if kind == "pathological":
        return pathological(labels, clients, seed, classes_per_client)
    if kind == "skewed":
        return skewed(labels, clients, seed, classes_per_client, skew)
    if kind == "natural":
        return natural(labels, clients, seed, groups, groups_per_client)
    raise ValueError(f"unknown partition {kind!r}; known: {', '.join(PARTITIONS)}")


def iid(labels: NDArray[Any], clients: int, seed: int) -> list[Ints]:
    """Every example to a client drawn at random; sizes differ by at most one."""
    labels = _check(labels, clients)
    order = _rng(seed, _IID).permutation(len(labels))
    return _sorted(np.array_split(order, clients))


def dirichlet(
    labels: NDArray[Any], clients: int, seed: int, alpha: float, balanced: bool, *, min_examples: int = 10
) -> list[Ints]:
    """Label skew of concentration `alpha` > 0: the smaller, the fewer classes a client sees.

    Balanced (FeDepth's alpha(lambda)): each client draws p ~ Dirichlet(alpha * 1_K) and takes exactly
    floor(n / clients) examples, each of a class drawn from p; a class that has run out is drawn no more. The last
    take what the others left, so clients draw in shuffled order.

    Unbalanced (FeDepth's alpha_u): each class is shared by p ~ Dirichlet(alpha * 1_clients), where those who have
    n / clients examples already get nothing; drawn again until every client has `min_examples`, ValueError when that
    does not come about in a bounded number of draws. `min_examples` says nothing about balanced shares.
    """
    labels = _check(labels, clients)
    if not 0 < alpha <= 1e6:
        raise ValueError(
            f"partition-alpha is {alpha}; allowed are numbers above 0 up to 1e6 (0.1 is strong skew, 100 nearly none)"
        )
    rng = _rng(seed, _DIRICHLET)
    sizes = np.unique(labels, return_counts=True)[1]
    if balanced:
        counts = _balanced_counts(sizes, clients, alpha, rng)
    else:
        counts = _unbalanced_counts(sizes, clients, alpha, min_examples, rng)
    return _deal(labels, counts, rng)


def pathological(labels: NDArray[Any], clients: int, seed: int, classes_per_client: int) -> list[Ints]:
    """Exactly `classes_per_client` classes a client, dealt from shuffled decks; holders of a class share it evenly.

    Every class is used where clients * classes_per_client allows it. ValueError where a class has fewer examples than
    holders.
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
                    "use fewer clients or smaller partition-classes"
                )
            counts[client, card] = each + (seen[card] < over)
            seen[card] += 1
    return _deal(labels, counts, rng)


def skewed(labels: NDArray[Any], clients: int, seed: int, classes_per_client: int, skew: float) -> list[Ints]:
    """`skew` (in [0, 1]) of each client's floor(n / clients) examples are of its own classes, the others of any class.

    FedProphet's section 7.1: on each client 80 % of the data belong to about 20 % of the classes, 20 % to the others. As in
    its authors' code, that part of all data is laid out class by class and cut into clients * classes_per_client shards,
    classes_per_client for each client; what is left is dealt out evenly. So every client has as many examples, however
    classes differ in size, and some of its own classes among the others too: two of ten make 84 % of its data where 80 % are
    asked for.

    Ours: the part is the same of every class, the classes lie in random order, and a client gets one shard of each stretch of
    `clients` shards, not any. Where a stretch is a number of whole classes (CIFAR-10: five), that is exactly
    `classes_per_client` classes; by the authors' draw about one client in ten has one class instead of two. Elsewhere
    (Caltech-256) a shard across a border has two classes.
    """
    labels = _check(labels, clients)
    classes, sizes = _classes(labels, classes_per_client)
    if not 0 <= skew <= 1:
        raise ValueError(f"partition-skew is {skew}; it must be at least 0 (as iid) and at most 1 (own classes only)")
    quota = len(labels) // clients
    own = round(skew * quota)
    if 0 < own < classes_per_client:
        raise ValueError(
            f"partition-skew {skew} makes {own} of a client's {quota} examples those of its {classes_per_client} classes, too "
            "few for one of each; use fewer clients, smaller partition-classes or larger partition-skew"
        )
    rng = _rng(seed, _SKEWED)
    order = rng.permutation(len(classes))
    # Rounding the running sum down takes clients * own in all, and never more of a class than there is.
    takes = np.diff(np.cumsum(sizes[order]) * (clients * own) // len(labels), prepend=0)
    queues = [rng.permutation(np.flatnonzero(labels == classes[k])) for k in order]
    line = np.concatenate([queue[:take] for queue, take in zip(queues, takes, strict=True)])
    rest = rng.permutation(np.concatenate([queue[take:] for queue, take in zip(queues, takes, strict=True)]))
    lengths = [own // classes_per_client + (shard < own % classes_per_client) for shard in range(classes_per_client)]
    holders = np.concatenate([np.repeat(rng.permutation(clients), length) for length in lengths])
    parts = np.split(rest[: clients * (quota - own)], clients)
    return _sorted([np.concatenate([line[holders == client], part]) for client, part in enumerate(parts)])


def natural(
    labels: NDArray[Any], clients: int, seed: int, groups: NDArray[Any] | None, groups_per_client: int
) -> list[Ints]:
    """Whole groups of examples, such as what a writer wrote: `groups_per_client` drawn for each client, or, where that is 0,
    all of them, as evenly as their number allows. PriSM's FEMNIST: ten writers a client; what is left stays with no client.
    """
    labels = _check(labels, clients)
    if groups is None:
        raise ValueError(
            "partition = natural: these data do not say whose an example is; npz data say so by group_train"
        )
    known = np.unique(groups)
    wanted = clients * max(1, groups_per_client)
    if wanted > len(known):
        raise ValueError(
            f"partition-groups is {groups_per_client}: {clients} clients need {wanted} groups, these data have {len(known)}; "
            "use fewer clients or fewer groups for each"
        )
    order = _rng(seed, _NATURAL).permutation(known)
    hands = np.array_split(order[:wanted] if groups_per_client else order, clients)
    return _sorted([np.flatnonzero(np.isin(groups, hand)) for hand in hands])


def split(indices: NDArray[Any], validation_share: float, seed: int, client: int) -> tuple[Ints, Ints]:
    """One client's examples as (train, validation), both sorted.

    Validation gets the nearest whole number to `validation_share` (in [0, 1)) of them, and never the last one.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(f"validation-share is {validation_share}; it must be at least 0 and below 1")
    size = max(0, min(round(validation_share * len(indices)), len(indices) - 1))
    order = _rng(seed, client, _VALIDATION).permutation(np.asarray(indices, dtype=np.int64))
    return np.sort(order[size:]), np.sort(order[:size])


def share_class_counts(labels: NDArray[Any], shares: list[Ints], num_classes: int) -> Ints:
    """How many examples of each class each share holds: [clients, num_classes]."""
    counts = [np.bincount(labels[share], minlength=num_classes) for share in shares]
    return np.array(counts, dtype=np.int64).reshape(len(shares), num_classes)


def _classes(labels: NDArray[Any], classes_per_client: int) -> tuple[NDArray[Any], Ints]:
    """The classes present and their sizes; a client has to be able to have so many."""
    classes, sizes = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_client <= len(classes):
        raise ValueError(f"partition-classes is {classes_per_client}; these data allow 1 to {len(classes)}")
    return classes, sizes


def _balanced_counts(sizes: Ints, clients: int, alpha: float, rng: np.random.Generator) -> Ints:
    """Examples of each class for each client, [clients, classes]; every row sums to floor(n / clients)."""
    left = sizes.copy()
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    quota = int(sizes.sum()) // clients
    weights = rng.dirichlet(np.full(len(sizes), alpha), size=clients)
    for client in rng.permutation(clients):
        # A multinomial draw cut at what is left, and the deficit drawn again from the other classes, has the same
        # distribution as drawing one by one and skipping classes that ran out.
        while need := quota - int(counts[client].sum()):
            draw = np.minimum(rng.multinomial(need, _normalised(weights[client], left > 0, rng)), left)
            counts[client] += draw
            left -= draw
    return counts


def _unbalanced_counts(sizes: Ints, clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> Ints:
    """Examples of each class for each client, [clients, classes]; every column sums to the class's size."""
    total = int(sizes.sum())
    if clients * minimum > total:
        raise ValueError(
            f"{clients} clients with at least {minimum} examples each need {clients * minimum}, there are {total}; "
            "use fewer clients or less data a client must have (min-examples)"
        )
    best = 0
    for _ in range(_MAX_DRAWS):
        held = np.zeros(clients, dtype=np.int64)
        counts = np.zeros((clients, len(sizes)), dtype=np.int64)
        for k, weights in enumerate(rng.dirichlet(np.full(clients, alpha), size=len(sizes))):
            shares = _normalised(weights, held * clients < total, rng)
            # Rounding the running sum, which ends at the class's size, gives every example to somebody.
            cuts = np.rint(np.cumsum(shares) * sizes[k]).astype(np.int64)
            counts[:, k] = np.diff(cuts, prepend=0)
            held += counts[:, k]
        if held.min() >= minimum:
            return counts
        best = max(best, int(held.min()))
    raise ValueError(
        f"partition-alpha {alpha}: in {_MAX_DRAWS} draws the poorest of {clients} clients got at most {best} of {total}, "
        f"min-examples is {minimum}; use a larger partition-alpha, fewer clients, or partition-balanced = true"
    )


def _normalised(weights: Floats, allowed: NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """`weights` on the allowed entries, summing to one."""
    kept = np.where(allowed, weights, 0.0)
    if (
        not kept.sum() > 0
    ):  # a small alpha leaves no weight there that a float can hold: the limit is one entry at random
        kept = np.zeros(len(weights))
        kept[rng.choice(np.flatnonzero(allowed))] = 1.0
    return np.asarray(kept / kept.sum(), dtype=np.float64)


def _deal_classes(classes: int, clients: int, hand_size: int, rng: np.random.Generator) -> list[list[int]]:
    """`hand_size` distinct classes for each client, from one shuffled deck of all classes after another."""
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


def _deal(labels: NDArray[Any], counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """The examples themselves: `counts[client, k]` of the k-th class present, at random."""
    dealt: list[list[Ints]] = [[] for _ in counts]
    for k, label in enumerate(np.unique(labels)):
        queue = rng.permutation(np.flatnonzero(labels == label))
        for share, part in zip(dealt, np.split(queue, np.cumsum(counts[:, k])), strict=False):
            share.append(part)
    return _sorted([np.concatenate(share) for share in dealt])


def _sorted(shares: list[Any]) -> list[Ints]:
    return [np.sort(share).astype(np.int64) for share in shares]


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
