"Paired comparisons: what swapping, shifting and shuffling must not change."
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.training.paired import compared, least, spread_says

quick = settings(derandomize=True, max_examples=80, deadline=None)
values = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=6)
OPPOSITE = {"above": "below", "below": "above"}


def runs(accuracies):
    return [SimpleNamespace(spec=SimpleNamespace(seed=k), value=float(a))
            for k, a in enumerate(accuracies)]


def value(run): return run.value


@quick
@given(values)
def test_swapping_two_methods_swaps_the_verdict(pairs):
    ours, theirs = zip(*pairs)
    said, swapped = spread_says(ours, theirs)[0], spread_says(theirs, ours)[0]
    assert swapped == OPPOSITE.get(said, said)


@quick
@given(values, st.integers(-500, 500))
def test_a_common_shift_changes_nothing(pairs, shift):
    ours, theirs = map(np.array, zip(*pairs))
    assert spread_says(ours, theirs) == spread_says(ours + shift, theirs + shift)


@quick
@given(values, st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(pairs, random):
    ours, theirs = (runs(side) for side in zip(*pairs))
    shuffled = random.sample(theirs, len(theirs))
    assert compared(ours, theirs, value) == compared(ours, shuffled, value)


@quick
@given(values, st.integers(2, 20))
def test_a_correction_never_decides_more(pairs, among):
    ours, theirs = zip(*pairs)
    corrected, alone = spread_says(ours, theirs, among)[0], spread_says(ours, theirs)[0]
    assert corrected in (alone, "indistinguishable from")


@quick
@given(st.lists(st.integers(0, 100), min_size=2, max_size=5))
def test_one_seed_never_holds_or_refutes(accuracies):
    cells = {str(k): runs([a]) for k, a in enumerate(accuracies)}
    assert all(least(cells, name, value)[0].endswith("on one seed") for name in cells)
