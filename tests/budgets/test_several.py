"Several records, tries, releases and engines, each against what must be the same or lie between."
import math

import numpy as np
import pytest

from dp_companion.budgets.certified import (
    BudgetReport, Certified, budget_report, calibrate, certify)
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.risk import Target, trade_off
from dp_companion.budgets.several import person_report, tuned
from dp_companion.budgets.units import certify_group

RUN = (MechanismEvent(noise_multiplier=4., sample_rate=.05, steps=100),)
OTHER = (MechanismEvent(noise_multiplier=3., sample_rate=.1, steps=20),)
DELTA = 1e-5


@pytest.mark.slow
def test_reports_add_in_any_order():
    one, other = (budget_report(events, delta=DELTA) for events in (RUN, OTHER))
    both = certify(RUN + OTHER, delta=DELTA)
    assert (one + other).certified == both
    for name, c in (other + one).certified.items():
        np.testing.assert_allclose(c.epsilon, both[name].epsilon, rtol=1e-6)
    assert sum([one]) is one


@pytest.mark.slow
@pytest.mark.parametrize("change", [dict(delta=1e-6), dict(privacy_unit="lesion")])
def test_reports_of_other_settings_do_not_add(change):
    wrong = budget_report(OTHER, **dict(delta=DELTA) | change)
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be the same in reports"):
        budget_report(RUN, delta=DELTA) + wrong


def test_certificate_that_is_no_sum_of_events_does_not_add():
    filtered = BudgetReport(certified={"rdp": Certified(3., "rdp", "a filter")}, delta=DELTA,
                            events=OTHER)
    with pytest.raises(ValueError, match="must be certified by their events"):
        budget_report(RUN, delta=DELTA) + filtered


@pytest.mark.slow
def test_a_person_of_records_drawn_alone_is_the_groups():
    report = person_report(RUN, records=3, delta=DELTA)
    assert report.certified == certify_group(RUN, images=3, delta=DELTA)
    assert report.risk.advantage < 1 and "person of 3 records" in str(report)


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic", "poisson"])
def test_more_tries_cost_more_and_less_than_all_of_them(distribution):
    one = budget_report(RUN, delta=DELTA, accountants=("rdp",))
    costs = [tuned(one, tries=t, distribution=distribution).epsilon for t in (1, 3, 30, 1000)]
    assert (np.diff(costs) > -1e-12).all()
    assert costs[2] < budget_report(RUN*30, delta=DELTA, accountants=("rdp",)).epsilon
    assert math.isfinite(costs[-1])


@pytest.mark.slow
def test_what_was_spent_before_counts_in_a_target():
    def after(sigma): return (*RUN, MechanismEvent(noise_multiplier=sigma, sample_rate=.1, steps=9))
    spent = certify(RUN, delta=DELTA)["pld"].epsilon
    sigma = calibrate(after, target=Target(epsilon=2*spent, delta=DELTA))
    assert .999*2*spent < certify(after(sigma), delta=DELTA)["pld"].epsilon <= 2*spent
    with pytest.raises(ValueError, match="queries of fixed noise spend"):
        calibrate(after, target=Target(epsilon=.9*spent, delta=DELTA))
    risk = float(trade_off(RUN).true_positive_rate(.01))
    sigma = calibrate(after, target=Target(true_positive_rate=2*risk))
    assert float(trade_off(after(sigma)).true_positive_rate(.01)) <= 2*risk


@pytest.mark.slow
def test_two_models_have_one_ledger():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset
    from dp_companion import PrivacyEngine
    rows = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    first = PrivacyEngine(secure_mode=False)
    second = PrivacyEngine(accountant=first.accountant, secure_mode=False)
    def parts():
        network = torch.nn.Linear(3, 2)
        return dict(module=network, optimizer=torch.optim.SGD(network.parameters(), lr=.1),
                    data_loader=DataLoader(rows, batch_size=20))
    def epoch(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    epoch(*first.make_private(**parts(), noise_multiplier=3.))
    epoch(*second.make_private_with_epsilon(**parts(), target_epsilon=3., target_delta=1e-3,
                                            epochs=1))
    assert len(first.accountant) == len(second.accountant) == 4
    assert 2.99 < second.budget().epsilon <= 3 and second.budget().epsilon == first.budget(
        1e-3).epsilon


@pytest.mark.slow
def test_an_engine_takes_a_risk_for_a_target():
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset
    from dp_companion import PrivacyEngine
    rows = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    network = torch.nn.Linear(3, 2)
    engine = PrivacyEngine(secure_mode=False)
    parts = dict(module=network, data_loader=DataLoader(rows, batch_size=20),
                 optimizer=torch.optim.SGD(network.parameters(), lr=.1))
    with pytest.raises(ValueError, match="target must be a Target"):
        engine.make_private(**parts, target=.05, epochs=2)
    with pytest.raises(ValueError, match="noise_multiplier must be left out with a target"):
        engine.make_private(**parts, target=Target(mu=1.), epochs=2, noise_multiplier=1.)
    model, optimizer, loader = engine.make_private(**parts, epochs=2, target=Target(
        true_positive_rate=.05, false_positive_rate=.01))
    for _ in range(2):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = engine.budget(1e-3)
    assert .04998 < report.risk.true_positive_rate[.01] <= .05
    assert report.noise_source == "seeded" and "seeded" in report.statement()
