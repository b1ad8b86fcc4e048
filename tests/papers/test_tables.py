"Tables: a cell has one noise, and the risk of what is certified."
import numpy as np
import pytest


def test_a_cell_of_a_table_has_one_noise():
    from dp_companion.training.records import RunRecord
    from dp_companion.training.spec import run_spec
    from dp_companion.papers.tables import summarise
    def record(seed, sigma):
        spec = run_spec(
            paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn",
            clip_rule="flat", accounting="certified", noise_multiplier=sigma, target_epsilon=1.,
            epochs=1, expected_batch_size=64, seed=seed
        )
        return RunRecord(
            spec=spec, epochs=[], final={"test_accuracy": .5},
            budget={"claimed": None, "certified": {"pld": {"epsilon": 1/sigma}}, "empirical": None},
            provenance={}
        )
    table = summarise([record(0, 2.), record(1, 2.), record(0, 1.)])
    assert table[["noise_multiplier", "certified_pld", "seeds"]].values.tolist() == [
        [2., .5, 2], [1., 1., 1]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["global_adapt_v2", "sad", "sanitization", "adaptive_noise"])
def test_risk_of_a_record_is_that_of_what_is_certified(root, paper):
    "A record's curve is that of its events, and lies below its certificate."
    from dp_companion.budgets.certified import pld_epsilon
    from dp_companion.budgets.risk import trade_off
    from dp_companion.papers.results import read_records
    from dp_companion.papers.tables import report_of
    reports = (report_of(r.budget) for r in read_records(root/"results", paper=paper))
    certified = [r for r in reports if "pld" in r.certified and r.epsilon < 20
                 and len(r.events) <= 10] # a fine grid costs seconds a phase
    for report in certified[::max(1, len(certified)//3)]:
        relation = dict(neighbouring_relation=report.neighbouring_relation)
        curve = trade_off(report.events, **relation)
        epsilon = np.interp(-report.delta, -curve.deltas, curve.epsilons)
        assert epsilon < report.certified["pld"].epsilon*(1 + 1e-4)
        # The certificate's own grid is wider where phases are many, and gives away more
        fine = pld_epsilon(report.events, delta=report.delta, interval=5e-5, **relation)
        assert fine == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.slow
def test_a_lesion_has_another_risk_than_an_image():
    from dp_companion.papers.audited_claims import HEADLINES
    image, lesion = (headline.budget() for headline in HEADLINES["sad"]()[:2])
    rates = [report.risk.true_positive_rate[.01] for report in (image, lesion)]
    by_epsilon = [.01*np.exp(report.epsilon) for report in (image, lesion)]
    assert rates[0] < by_epsilon[0] and rates[0] < .99 < rates[1]
