"Runs of paper sanitization: found, resumed after a kill, counted and certified."
import math
from dataclasses import replace

import pytest
import torch

from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.released_rows import RowRelease, claimed_rows, sanitization_report
from dp_companion.papers.sanitization import run as sanitized
from dp_companion.papers.sanitization.attacks import attack_rows
from dp_companion.papers.sanitization.grid import printed_values
from dp_companion.papers.sanitization.run import SanitizedRun, layer_report
from dp_companion.training.run import epoch_steps, step
from dp_companion.training.spec import run_spec
from dp_companion.training.training import train
from killed_runs import whole_and_parts
from sanitized_runs import DATA, SIZE, SPECS, below_spec


@pytest.mark.slow
@pytest.mark.parametrize("method", SPECS)
def test_killed_run_ends_the_same(method, tmp_path, monkeypatch):
    whole, parts = whole_and_parts(SPECS[method], tmp_path, DATA, monkeypatch)
    assert whole.read_bytes() == parts.read_bytes()


def test_a_found_run_trains_nothing(tmp_path, monkeypatch):
    spec = SPECS["Frozen"]
    record = train(spec, tmp_path, DATA)
    monkeypatch.setattr(SanitizedRun, "train_epoch", lambda run: pytest.fail("trained again"))
    assert train(spec, tmp_path, DATA) == record


@pytest.mark.parametrize("method", SPECS)
def test_reports_say_which_applies(method):
    spec = SPECS[method]
    run = SanitizedRun(spec, DATA)
    report = layer_report(spec, run.plan, run.model)
    assert report.neighbouring_relation == "replace_one"
    assert report.privacy_unit == "features of one record"
    assert (report.certified == {}) == (method == "Sanitization + Adaptive C")
    assert report.case == report.to_dict()["case"] == {
        "Sanitization + Adaptive C": "weights below trained on raw features, rows released 3 times",
        "Frozen": "weights below frozen, rows released 3 times",
        "One release": "weights below frozen, rows released 1 time",
        "DP-SGD below": "weights below trained by DP-SGD on secret batches of its own, rows "
        "released 3 times"}[method]
    if method in ("Frozen", "One release"): assert 5*(1 - 1e-3) <= report.epsilon <= 5


def test_composition_of_below_by_hand():
    spec = below_spec()
    run = SanitizedRun(spec, DATA)
    events = (MechanismEvent(noise_multiplier=2., sample_rate=200/1437, steps=run.plan.steps),)
    release = RowRelease(width=9, noise_multiplier=4., releases=3, rows="nonnegative")
    by_hand = sanitization_report(release, run.plan, below="dp_sgd", delta=1e-5,
                                  gradient_events=events, batches="own")
    assert layer_report(spec, run.plan, run.model).epsilon == pytest.approx(by_hand.epsilon,
        rel=1e-9)
    rows_alone = sanitization_report(release, run.plan, below="frozen", delta=1e-5)
    assert by_hand.epsilon > rows_alone.epsilon


def test_gradients_of_below_are_as_accounted():
    run = SanitizedRun(below_spec(), DATA)
    counted = []
    run.training.watchers.append(lambda: lambda report: counted.append((report.noise_multiplier,
        report.nonprivate_batch_size)))
    for _ in range(3): run.train_epoch()
    # Poisson sizes vary
    assert len(counted) == run.plan.steps and {m for m, _ in counted} == {2.}
    assert len({n for _, n in counted}) > 1
    assert (run.counts == 3).all()


def test_a_row_that_escapes_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitized, "released", lambda run, rows, indices: run.layer(rows))
    with pytest.raises(RuntimeError, match="released rows must be 3 of every record, got 0 to 0"):
        train(SPECS["Frozen"], tmp_path, DATA)


@pytest.mark.parametrize("changed", [dict(noise_multiplier=1.), dict(dropout=.5),
                                     dict(rows="symmetric")])
def test_a_layer_that_was_changed_releases_nothing(changed, tmp_path, monkeypatch):
    run = SanitizedRun(SPECS["Frozen"], DATA)
    run.train_epoch()
    for name, value in changed.items(): setattr(run.layer, name, value)
    with pytest.raises(RuntimeError, match="the layer must release what was accounted"):
        run.train_epoch()
    assert run.released == len(run.counts)


def test_a_row_released_twice_is_noticed(tmp_path, monkeypatch):
    def mean_of_two(run, rows, indices):
        run.counts[indices] += 1
        return (run.layer(rows) + run.layer(rows))/2
    monkeypatch.setattr(sanitized, "released", mean_of_two)
    with pytest.raises(RuntimeError,
                       match="released rows must be 3 of every record, got 3 to 3, "
                       f"{6*1437} in all"):
        train(SPECS["Frozen"], tmp_path, DATA)
    assert attack_rows(SPECS["Frozen"]).epsilon > SPECS["Frozen"].target_epsilon


def test_a_step_below_too_many_is_noticed(tmp_path, monkeypatch):
    def and_one_more(training):
        reports = epoch_steps(training)
        if training.batches.steps_taken == 21:
            training.ledger.add_step(training.step.clip_rule, 2., training.plan.sample_rate)
        return reports
    monkeypatch.setattr(sanitized, "epoch_steps", and_one_more)
    with pytest.raises(RuntimeError,
                       match="applied noise multipliers must equal the 21 accounted ones"):
        train(below_spec(), tmp_path, DATA)


def test_a_step_below_without_a_batch_is_refused():
    run = SanitizedRun(below_spec(), DATA)
    run.train_epoch()
    with pytest.raises(ValueError, match="every optimizer.step must have a batch of its own"):
        step(run.training, [0, 1], 2.)


def test_a_step_is_counted_before_it_is_released():
    run = SanitizedRun(below_spec(), DATA)
    def torn(*args, **kw): raise KeyboardInterrupt
    torn.clip_rule, run.training.step = run.training.step.clip_rule, torn
    with pytest.raises(KeyboardInterrupt): run.train_epoch()
    assert run.training.ledger.multipliers == [2.]


def test_a_checkpoint_of_an_earlier_version_is_one_sentence():
    run = SanitizedRun(below_spec(), DATA)
    with pytest.raises(ValueError, match="checkpoint must hold released, got one of an earlier "
                       "version or of something else; delete it"):
        run.load({k: v for k, v in run.state().items() if k != "released"})


def test_dropout_comes_where_the_run_says():
    after = run_spec(**printed_values(SIZE, layer_dropout=.5), seed=0)
    for spec, is_after in ((after, True), (after.varied(layer_dropout_position="before"), False)):
        layer = SanitizedRun(spec, DATA).layer
        # noise on a dropped element hides it
        assert ((layer(torch.ones(50, SIZE.width)) == 0).any()) == is_after
    assert after.name != after.varied(layer_dropout_position="before").name


def test_frozen_weights_and_one_release():
    for method in ("Frozen", "One release"):
        for model in ("pooled_rows", "small_sanitization_cnn"):
            run = SanitizedRun(replace(SPECS[method], model=model), DATA)
            before = [p.clone() for p in run.model.below.parameters()]
            calls = []
            run.layer.register_forward_hook(lambda layer, inputs,
                rows: calls.append((layer.training, len(rows))))
            for _ in range(2): run.train_epoch()
            assert all(torch.equal(a, b) for a, b in zip(before, run.model.below.parameters()))
            assert sum(n for is_training, n in calls if is_training) == (1437
                if method == "One release" else 2*1437)


def test_stopping_claims_less_and_certifies_the_plan(tmp_path):
    stops = dict(stop_window=2, stop_limit=1e6)
    printed, frozen = run_spec(**printed_values(SIZE, "Sanitization") | stops,
                               seed=0), SPECS["Frozen"].varied(**stops)
    for spec in (printed, frozen):
        record = train(spec, tmp_path, DATA)
        assert len(record.epochs) == 2 and record.epochs[-1]["flag"]
        release = RowRelease(width=spec.method.layer_width,
                             noise_multiplier=spec.method.layer_noise_multiplier, releases=2,
                             rows="nonnegative")
        plan = replace(SIZE.plan, epochs=2)
        assert record.budget["claimed"]["epsilon"] == pytest.approx(claimed_rows(release, plan,
            delta=1e-5).epsilon)
        assert (record.budget["certified"] == {}) == (spec is printed)
    # as planned, though it stopped
    assert record.budget["certified"]["pld"]["epsilon"] == pytest.approx(5, rel=1e-3)


def test_moving_bound_follows_the_weights():
    run = SanitizedRun(SPECS["Sanitization + Adaptive C"], DATA)
    run.train_epoch(); run.train_epoch()
    first, second = run.epochs
    assert first["clip"] == SIZE.clip
    assert second["clip"] == pytest.approx(SIZE.bound_ratio*first["weight_norm"])


@pytest.mark.parametrize("model, width, sentence",
                         [("pooled_rows", 15, "width must be 1 times a square number"),
                          ("pooled_rows", 81, "that fits 8 pixels"),
                          ("mnist_cnn", 9, "model must be one of"),
                                                    ("sanitization_resnet18", 50,
                                                        "width must be 512 for this network")])
def test_widths_that_do_not_fit(model, width, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        SanitizedRun(SPECS["Frozen"].varied(model=model, layer_width=width), DATA)


def test_a_head_follows_the_bound():
    run = SanitizedRun(below_spec().varied(layer_bound_ratio=.05), DATA)
    before = run.model.head.by
    run.train_epoch()
    assert run.layer.clip != .5
    assert run.model.head.by == math.hypot(run.layer.noise_std, run.layer.clip) != before
