"Verdicts: intervals are those of scipy, one seed decides nothing, a box shows every claim once."
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from dp_companion.papers.verdicts import (
    HOLDS, INCONCLUSIVE, REFUTED, Verdict, above_at_all, answer_together, paired_difference,
    verdict_box
)

quick = settings(derandomize=True, max_examples=60, deadline=None)
pairs = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=2, max_size=6)


def runs(values):
    return [SimpleNamespace(spec=SimpleNamespace(seed=k), value=float(v))
            for k, v in enumerate(values)]


def value(run): return run.value


@quick
@given(pairs)
def test_the_interval_is_that_of_the_paired_t_test(values):
    ours, theirs = map(np.array, zip(*values))
    assume((ours - theirs).std() > 0)
    found = paired_difference("", runs(ours), runs(theirs), value)
    low, high = ttest_rel(ours, theirs).confidence_interval(.95)
    np.testing.assert_allclose([found.mean - found.half, found.mean + found.half], [low, high])


@quick
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_one_seed_decides_nothing(ours, theirs):
    assert above_at_all({1.: (runs([ours]), runs([theirs]))}, value)[0] == INCONCLUSIVE


@quick
@given(st.lists(st.sampled_from([HOLDS, REFUTED, INCONCLUSIVE]), max_size=5))
def test_parts_of_a_claim_make_one_answer(answers):
    said = answer_together(answers)
    assert (said == REFUTED) == (REFUTED in answers)
    assert (said == HOLDS) == (bool(answers) and set(answers) == {HOLDS})


@pytest.mark.parametrize("answer", [HOLDS, REFUTED, INCONCLUSIVE])
def test_a_box_shows_every_claim_once(answer):
    made = [Verdict(claim=f"claim {k}", answer=answer, why=f"reason {k}", where="here")
            for k in range(4)]
    text = verdict_box(made, facts="Facts.", caveat="limits.").data
    assert [text.count(v.claim) for v in made] == [1]*4
    assert text.count(f'title="{answer.capitalize()}"') == 1
    assert text.endswith("Facts. **Caveat:** limits.")
