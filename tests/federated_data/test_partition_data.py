import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.federated_data.partition import (
    client_class_counts,
    dirichlet,
    draw_skewed,
    iid,
    natural,
    partition_rows,
    pathological,
    split,
)

TEN_CLASSES = np.repeat(np.arange(10), 600)


def shares_of(
    kind, labels=TEN_CLASSES, clients=20, seed=0, *, alpha=0.5, balanced=True, classes_per_client=2, skew=0.8
):
    return partition_rows(
        kind, labels, clients, seed, alpha=alpha, balanced=balanced, classes_per_client=classes_per_client, skew=skew
    )


KINDS = [("iid", True), ("dirichlet", True), ("dirichlet", False), ("pathological", True), ("skewed", True)]


@pytest.mark.parametrize(("kind", "balanced"), KINDS)
def test_client_rows_are_sorted_disjoint_int64_and_a_function_of_the_seed(kind, balanced):
    shares = shares_of(kind, balanced=balanced)
    again = shares_of(kind, balanced=balanced)
    other = shares_of(kind, balanced=balanced, seed=1)
    together = np.concatenate(shares)
    assert len(shares) == 20
    assert all(share.dtype == np.int64 and (np.diff(share) > 0).all() for share in shares)
    assert sorted(together) == list(range(6000))  # all of these divide evenly, so nothing is left over
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(shares, other, strict=True))


@pytest.mark.parametrize(("kind", "balanced"), KINDS)
def test_labels_of_any_order_integer_type_and_gaps_are_served(kind, balanced):
    labels = np.random.default_rng(3).permutation(np.repeat([2, 5, 9], 100)).astype(np.uint8)
    shares = shares_of(kind, labels, 5, balanced=balanced)
    counts = client_class_counts(labels, shares, 10)
    assert counts.sum(0).tolist() == [0, 0, 100, 0, 0, 100, 0, 0, 0, 100]


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    clients=st.integers(1, 60),
    seed=st.integers(0, 2**40),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e6]),
)
def test_balanced_client_data_are_disjoint_and_exactly_equal_for_any_input(labels, clients, seed, alpha):
    clients = min(clients, len(labels))
    shares = dirichlet(np.array(labels), clients, seed, alpha, balanced=True)
    together = np.concatenate(shares)
    assert {len(share) for share in shares} == {len(labels) // clients}
    assert len(set(together.tolist())) == len(together)
    assert set(together.tolist()) <= set(range(len(labels)))


@settings(max_examples=60, deadline=None)
@given(classes=st.integers(1, 7), clients=st.integers(1, 12), hand=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_pathological_deals_distinct_classes_and_uses_all_it_can(classes, clients, hand, seed):
    hand = min(hand, classes)
    labels = np.repeat(np.arange(classes), clients)
    counts = client_class_counts(labels, pathological(labels, clients, seed, hand), classes)
    assert ((counts > 0).sum(1) == hand).all()
    assert (counts.sum(0) > 0).sum() == min(classes, clients * hand)
    assert set(counts.sum(0).tolist()) <= {0, clients}  # a class is given out whole or not at all


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    clients=st.integers(1, 60),
    hand=st.integers(1, 6),
    seed=st.integers(0, 2**40),
    skew=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
def test_skewed_client_data_are_disjoint_and_exactly_equal_for_any_input(labels, clients, hand, seed, skew):
    clients = min(clients, len(labels))
    hand = min(hand, len(set(labels)), max(1, round(skew * (len(labels) // clients))))
    shares = draw_skewed(np.array(labels), clients, seed, hand, skew)
    together = np.concatenate(shares)
    assert {len(share) for share in shares} == {len(labels) // clients}
    assert len(set(together.tolist())) == len(together)
    assert set(together.tolist()) <= set(range(len(labels)))


def test_skewed_clients_have_exactly_their_classes_where_shards_fit():
    # 10 classes of 600, 20 clients with 2 shards each: 4 shards are a class, and a stretch of 20 shards five classes.
    pure = client_class_counts(TEN_CLASSES, draw_skewed(TEN_CLASSES, 20, 3, 2, 1.0), 10)
    assert [sorted(row.tolist()) for row in pure] == [[0] * 8 + [150, 150]] * 20
    assert (pure > 0).sum(0).tolist() == [4] * 10
    counts = client_class_counts(TEN_CLASSES, draw_skewed(TEN_CLASSES, 20, 3, 2, 0.8), 10)
    own = np.sort(counts)[:, -2:]
    assert counts.sum(1).tolist() == [300] * 20
    assert (own >= 120).all()  # 80 % of 300, half of it of each class
    assert np.sort(counts)[:, -3].max() < 20  # 60 of ten classes, give or take sqrt(6)
    assert (counts >= 120).sum(0).tolist() == [4] * 10


def test_skewed_others_are_of_any_class():
    # Of the 60 others a fifth is of the client's own two classes: 240 + 12 of 300. 400 clients, standard error 0.0005.
    counts = [client_class_counts(TEN_CLASSES, draw_skewed(TEN_CLASSES, 20, seed, 2, 0.8), 10) for seed in range(20)]
    assert np.sort(counts)[..., -2:].sum(-1).mean() / 300 == pytest.approx(0.84, abs=0.003)


def test_skewed_shards_of_classes_that_do_not_fit():
    # A line of 25 examples in 5 classes has four borders. One shard of 5 a client: each border is in one shard at most.
    labels = np.repeat([4, 7, 1, 0, 9], [1, 3, 5, 7, 9])
    for seed in range(50):
        pure = [set(labels[share].tolist()) for share in draw_skewed(labels, 5, seed, 1, 1.0)]
        assert sum(len(classes) - 1 for classes in pure) <= 4
        assert set.union(*pure) == {0, 1, 4, 7, 9}


def test_skewed_shards_of_unequal_length():
    # The line aaaaabbbbb, or bbbbbaaaaa, is cut into aaa and aab, bb and bb: either client has 3 of one and 2 of the other.
    labels = np.repeat([0, 1], 5)
    counts = [client_class_counts(labels, draw_skewed(labels, 2, seed, 2, 1.0), 2) for seed in range(20)]
    assert {tuple(row) for pair in counts for row in pair.tolist()} == {(3, 2), (2, 3)}


def test_a_skew_of_nothing_is_iid():
    counts = client_class_counts(TEN_CLASSES, draw_skewed(TEN_CLASSES, 20, 0, 2, 0.0), 10)
    assert counts.sum(1).tolist() == [300] * 20
    assert abs(counts - 30).max() < 20  # 30 a class, give or take sqrt(27)


def test_skewed_classes_are_in_another_order_with_another_seed():
    # The classes of one stretch never meet on a client: with one order for all seeds there would be pairs that never come.
    pairs = {
        tuple(np.flatnonzero(row))
        for seed in range(40)
        for row in client_class_counts(TEN_CLASSES, draw_skewed(TEN_CLASSES, 20, seed, 2, 1.0), 10)
    }
    assert len(pairs) == 45


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(len(share) for share in iid(np.zeros(11, dtype=int), 4, 0)) == [2, 3, 3, 3]


def test_pathological_splits_a_class_evenly_among_its_holders():
    # 3 classes of 5, 3 clients with 2 classes each: every class has two holders, one gets 3 examples and the other 2.
    labels = np.repeat([0, 1, 2], 5)
    counts = client_class_counts(labels, pathological(labels, 3, 7, 2), 3)
    assert [sorted(column.tolist()) for column in counts.T] == [[0, 2, 3]] * 3


def test_balanced_draws_have_the_distribution_of_drawing_one_by_one():
    # Two examples of each of two classes, two clients, p ~ uniform: 2 + 0, 1 + 1 and 0 + 2 are equally likely, since
    # E[p^2] = 2 E[p (1 - p)] = 1/3. 1200 seeds: the standard error is 0.014.
    labels = np.array([0, 0, 1, 1])
    outcomes = [int((labels[dirichlet(labels, 2, seed, 1.0, balanced=True)[0]] == 0).sum()) for seed in range(1200)]
    assert np.bincount(outcomes) / 1200 == pytest.approx([1 / 3] * 3, abs=0.045)


def test_no_client_number_is_always_left_the_remains():
    # Whoever draws last gets what the others left, fewer classes than it would have drawn: its largest class has 8.6
    # of 20 examples here, the others' 7.0. Over 300 seeds every client number must be last as often (error 0.1).
    labels = np.repeat(np.arange(5), 20)
    draws = [client_class_counts(labels, dirichlet(labels, 5, seed, 10.0, True), 5) for seed in range(300)]
    largest = np.max(draws, axis=2).mean(axis=0)
    assert largest.max() - largest.min() < 0.6, largest


@pytest.mark.parametrize("balanced", [True, False])
def test_smaller_alpha_gives_fewer_classes(balanced):
    held = {
        alpha: client_class_counts(TEN_CLASSES, dirichlet(TEN_CLASSES, 20, 5, alpha, balanced), 10)
        for alpha in (0.1, 1000.0)
    }
    few, nearly_all = ((counts > 0.02 * counts.sum(1, keepdims=True)).sum(1).mean() for counts in held.values())
    assert few < 5
    assert nearly_all >= 9.9  # balanced, the last to draw gets what is left
    assert abs(held[1000.0] - 30).mean() < 6  # 300 examples a client, 30 a class, give or take sqrt(27)


def test_unbalanced_client_data_keep_every_example_and_the_minimum_size():
    sizes = [len(share) for share in dirichlet(TEN_CLASSES, 20, 0, 0.3, balanced=False, min_examples=40)]
    assert sum(sizes) == 6000
    assert min(sizes) >= 40
    assert max(sizes) > 350  # unlike the balanced 300


def test_unbalanced_client_data_divide_each_class_as_drawn():
    """Two clients: the first gets the drawn fraction of each class, whatever it has already."""
    drawn = np.random.default_rng(np.random.SeedSequence([7, 12])).dirichlet([0.3, 0.3], size=10)
    counts = client_class_counts(TEN_CLASSES, dirichlet(TEN_CLASSES, 2, 7, 0.3, balanced=False), 10)
    assert counts[0].tolist() == np.rint(600 * drawn[:, 0]).astype(int).tolist()
    assert counts.sum(axis=0).tolist() == [600] * 10


def test_a_cap_takes_classes_from_clients():
    """SpaFL's partition: 100 clients, Dirichlet 0.2; a client's effective number of classes is exp(entropy)."""
    labels, effective = np.repeat(np.arange(10), 6000), dict.fromkeys((True, False), 0.0)
    for capped, seed in itertools.product(effective, (1, 2, 3)):
        counts = client_class_counts(labels, dirichlet(labels, 100, seed, 0.2, balanced=False, capped=capped), 10)
        p = counts / counts.sum(axis=1, keepdims=True)
        effective[capped] += np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)).mean() / 3
    assert effective == pytest.approx({True: 3.13, False: 3.53}, abs=0.01)


def test_a_capped_client_with_its_part_gets_nothing_of_later_classes():
    counts = client_class_counts(TEN_CLASSES, dirichlet(TEN_CLASSES, 20, 0, 0.3, balanced=False, capped=True), 10)
    full = np.cumsum(counts, axis=1)[:, :-1] >= 6000 / 20
    assert full.any()
    assert (counts[:, 1:][full] == 0).all()


def test_unbalanced_client_data_that_cannot_be_drawn_raise_an_error_with_advice():
    with pytest.raises(
        ValueError,
        match=r"alpha 0\.001: in 2000 draws the poorest of 20 .* each needs 10; use a larger data.partition-alpha.*balanced",
    ):
        dirichlet(TEN_CLASSES, 20, 0, 0.001, balanced=False)
    with pytest.raises(
        ValueError,
        match=r"3 clients with at least 10 examples each need 30, there are 20; use fewer clients, or data\.part",
    ):
        dirichlet(np.zeros(20, dtype=int), 3, 0, 1.0, balanced=False)


def test_a_class_of_examples_fewer_than_holders_is_an_error():
    with pytest.raises(ValueError, match=r"class [01] has 2 examples for 3 clients; use fewer clients"):
        pathological(np.array([0, 0, 1, 1]), 3, 0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: shares_of("shards"),
            "unknown partition 'shards'; known: iid, dirichlet, pathological, skewed, natural",
        ),
        (lambda: iid(np.zeros(3, dtype=int), 4, 0), "4 clients for 3 examples; allowed are 1 to 3"),
        (lambda: iid(np.zeros(3, dtype=int), 0, 0), "0 clients for 3 examples"),
        (lambda: iid(np.zeros(3), 1, 0), "labels are float64 of shape (3,); they must be integers"),
        (lambda: iid(np.zeros(3, dtype=int), 1, -1), "seed and client are (-1,); they must not be negative"),
        (lambda: shares_of("dirichlet", alpha=0.0), "alpha is 0.0; allowed are numbers above 0"),
        (lambda: shares_of("dirichlet", alpha=float("nan")), "alpha is nan"),
        (
            lambda: shares_of("pathological", classes_per_client=11),
            "data.partition-classes is 11; these data allow 1 to 10",
        ),
        (lambda: shares_of("skewed", classes_per_client=0), "data.partition-classes is 0; these data allow 1 to 10"),
        (
            lambda: shares_of("skewed", skew=1.1),
            "data.partition-skew is 1.1; it must be at least 0 (as iid) and at most 1",
        ),
        (lambda: shares_of("skewed", skew=float("nan")), "data.partition-skew is nan"),
        (
            lambda: shares_of("skewed", skew=0.01, classes_per_client=4),
            "data.partition-skew 0.01 makes 3 of a client's 300 examples those of its 4 classes, too few for one of each",
        ),
        (lambda: shares_of("natural"), "partition = natural: these data have no groups"),
        (
            lambda: natural(TEN_CLASSES, 20, 0, TEN_CLASSES, 0),
            "data.partition-groups is 0: 20 clients need 20 groups, these data have 10",
        ),
        (
            lambda: natural(TEN_CLASSES, 4, 0, TEN_CLASSES, 3),
            "data.partition-groups is 3: 4 clients need 12 groups, these data have 10",
        ),
        (lambda: split(np.arange(3), 1.0, 0, 0), "data.validation-fraction is 1.0; it must be at least 0 and below 1"),
    ],
)
def test_errors_print_the_value_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("clients", "each", "sizes"), [(3, 2, [2, 2, 2]), (3, 0, [3, 2, 2]), (7, 1, [1] * 7)])
def test_natural_client_data_are_whole_groups(clients, each, sizes):
    groups = np.random.default_rng(0).permutation(np.repeat([3, 5, 8, 11, 20, 21, 40], [1, 2, 3, 4, 5, 6, 7]))
    shares = natural(np.zeros(28, dtype=int), clients, 0, groups, each)
    held = [set(groups[share].tolist()) for share in shares]
    assert [len(writers) for writers in held] == sizes
    assert sum(map(len, held)) == len(set().union(*held))
    for share, writers in zip(shares, held, strict=True):
        assert share.tolist() == [row for row in range(28) if groups[row] in writers]
    again, other = (natural(np.zeros(28, dtype=int), clients, seed, groups, each) for seed in (0, 1))
    assert all(map(np.array_equal, shares, again))
    assert not all(map(np.array_equal, shares, other))


def test_split_takes_its_fraction_and_depends_on_seed_and_client():
    indices = np.arange(100, 150)
    train, validation = split(indices, 0.2, 0, 3)
    assert (len(train), len(validation)) == (40, 10)
    assert sorted([*train, *validation]) == indices.tolist()
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    assert np.array_equal(validation, split(indices, 0.2, 0, 3)[1])
    assert not np.array_equal(validation, split(indices, 0.2, 0, 4)[1])
    assert not np.array_equal(validation, split(indices, 0.2, 1, 3)[1])


@pytest.mark.parametrize(
    ("count", "share", "validation"), [(5, 0.0, 0), (5, 0.2, 1), (10, 0.29, 3), (1, 0.9, 0), (3, 0.9, 2), (0, 0.5, 0)]
)
def test_split_leaves_something_to_train_on(count, share, validation):
    train, held = split(np.arange(count), share, 0, 0)
    assert (len(train), len(held)) == (count - validation, validation)
    assert train.dtype == held.dtype == np.int64


def test_class_counts():
    labels = np.array([0, 1, 1, 2, 0])
    counts = client_class_counts(labels, [np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([4])], 4)
    assert counts.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
