"No verdict comes from a run outside the regime of its claim: the regime of every record is read."
from functools import lru_cache
from itertools import groupby

import pytest

from dp_companion.papers.adaptive_noise import verdicts as adaptive
from dp_companion.papers.global_adapt_v2 import verdicts as global_adapt
from dp_companion.papers.global_adapt_v2.fairness_verdicts import FAIRNESS_CLAIMS
from dp_companion.papers.results import reference_of
from dp_companion.papers.sanitization import verdicts as sanitization
from dp_companion.papers.verdicts import INCONCLUSIVE

CLAIMS = (*global_adapt.UTILITY_CLAIMS, *global_adapt.NORM_CLAIMS, *FAIRNESS_CLAIMS,
          *global_adapt.accuracy_claims(("Table 5", "Table 14")))


@lru_cache(maxsize=None)
def pools_of(paper):
    "The committed runs of a paper by data set, accounting and size."
    def key(r): return r.spec.dataset, r.spec.accounting, r.spec.epochs
    records = sorted(reference_of(paper), key=key)
    return {at: list(of) for at, of in groupby(records, key)}


def judged_records(claim, pools):
    "The records that a claim's judge gets to see."
    seen = []

    def spy(pool):
        seen.extend(pool)
        return INCONCLUSIVE, "seen"
    found = global_adapt.judge([claim._replace(judge=spy)], pools)
    return seen, {v.where for v in found}


def is_in_regime(record):
    "Read from the spec alone: certified noise, or the paper's own E, K and b on MNIST."
    spec = record.spec
    if spec.accounting == "certified": return True
    own = dict.fromkeys(("mnist", "unbalanced_mnist", "cifar10", "cifar10_efficientnet"),
                        (100, 10, 64))
    here = spec.epochs, spec.method.drop_every or 10, spec.expected_batch_size
    return own.get(spec.dataset) == here


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_global_adapt_judges_no_record_outside_its_regime(claim):
    pools = pools_of("global_adapt_v2")
    seen, judged = judged_records(claim, pools)
    if claim.trained: assert all(map(is_in_regime, seen))
    outside = {at for at, of in pools.items() if at[1] == "as_printed" and not is_in_regime(of[0])}
    assert outside and (not claim.trained or not judged & outside)


def test_every_pool_that_is_set_aside_has_a_reason():
    pools = {str(at): of for at, of in pools_of("global_adapt_v2").items()}
    said = global_adapt.set_aside(pools)
    for name, of in pools.items():
        needs_reason = of[0].spec.accounting == "as_printed" and not is_in_regime(of[0])
        assert (name in said) == needs_reason
        title = global_adapt.noise_title(of)
        if needs_reason: assert "set apart (outside the claim's regime: E = " in title


def test_k_1_records_on_mnist_give_no_verdict():
    pools = {at: of for at, of in pools_of("global_adapt_v2").items()
             if at[:2] == ("mnist", "as_printed") and at[2] < 100}
    assert sum(map(len, pools.values())) > 50
    assert all(v.claim.startswith("No setting spends more")
               for v in global_adapt.judge(CLAIMS, pools))


def test_short_sanitization_runs_judge_no_printed_accuracy():
    for (dataset, accounting, epochs), records in pools_of("sanitization").items():
        if accounting != "as_printed" or epochs >= 100: continue
        assert sanitization.outside_regime(records).startswith("outside the claim's regime: E = ")
        widths = {w: [r for r in records if r.spec.method.layer_width == w] for w in (20, 40, 50)}
        if sum(map(bool, widths.values())) > 1:
            assert sanitization.best_in_range(widths, 40, 60)[0] == INCONCLUSIVE
        for verdict in sanitization.judge_layers(records, dataset, 8.):
            if verdict.claim.startswith("A bound that follows"):
                assert verdict.answer == INCONCLUSIVE


def test_short_adaptive_runs_judge_no_saved_epochs():
    pools = pools_of("adaptive_noise")
    methods = sorted({r.spec.method.name for of in pools.values() for r in of
                      if r.spec.method.adapt_to})
    for (dataset, _, epochs), records in pools.items():
        found = adaptive.judge_adaptive(records, methods, (.5, 1., 3., 10.), dataset)
        epochs_claims = [v for v in found if v.claim.endswith("fewer epochs than DP-SGD")]
        assert len(epochs_claims) == len(methods)
        if epochs < 40: assert {v.answer for v in epochs_claims} == {INCONCLUSIVE}
