"Runs of paper sanitization: found, resumed after a kill, counted, certified and attacked."
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.papers.sanitization.attacks import (
    attack_below, attack_epoch, attack_rows, attack_step, audit_layers, certified_epoch,
    certified_step, claimed_there, epoch_scores, moved, row_scores, short, step_scores, worst_case
)
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.outputs import gaussian_delta
from dp_companion.budgets.released_rows import RowRelease, claimed_rows, sanitization_report
from dp_companion.papers.sanitization import run as sanitized
from dp_companion.training import training
from dp_companion.training.datasets import load_dataset
from dp_companion.training.records import find_record, record_path
from dp_companion.training.spec import run_spec
from dp_companion.training.run import epoch_steps, step
from dp_companion.papers.sanitization.run import (
    SanitizedRun, build_layer, build_layered, layer_report
)
from dp_companion.papers.sanitization.grid import (
    LAYER_PROFILES, claim_of, layer_profile, printed_values, public_width, real_values, row_noise
)
from dp_companion.training.training import train

SIZE = replace(layer_profile("digits"), epochs=3, windows=(2, 2), private_batch_size=200,
               expected_batch_size=200, width=16, seeds=1)
DATA = load_dataset("digits")


def below_spec(**changes):
    "DP-SGD below, noise not calibrated: so `as_printed`, whose target is not checked."
    values = dict(paper="sanitization", method="DP-SGD below", dataset="digits",
                  model="small_sanitization_cnn", clip_rule="auto_s", noise_multiplier=2.,
                  accounting="as_printed", target_epsilon=1., epochs=3,
                  expected_batch_size=200, optimizer="sgd", learning_rate=.5, weight_decay=0.,
                  lr_scheduler="cosine", seed=0, layer_below="dp_sgd", layer_width=9, layer_clip=.5,
                  layer_noise_multiplier=4.)
    return run_spec(**values | changes)


def specs():
    yield run_spec(**printed_values(SIZE, "Sanitization + Adaptive C", layer_dropout=.2), seed=0)
    for method in ("Frozen", "One release"):
        yield run_spec(**real_values(SIZE, method, target_epsilon=5.), seed=0)
    yield below_spec()


SPECS = {s.method.name: s for s in specs()}


@pytest.mark.parametrize("method", SPECS)
def test_killed_run_ends_the_same(method, tmp_path, monkeypatch):
    spec = SPECS[method]
    whole = train(spec, tmp_path/"whole", DATA)
    assert find_record(spec, tmp_path/"whole") == whole

    class Killed(Exception): pass
    save = training.save_checkpoint
    def save_and_die(run, path):
        save(run, path)
        raise Killed
    monkeypatch.setattr(training, "save_checkpoint", save_and_die)
    for _ in range(2): pytest.raises(Killed, train, spec, tmp_path/"killed", DATA)
    monkeypatch.undo()
    train(spec, tmp_path/"killed", DATA)
    assert record_path(spec, tmp_path/"whole").read_bytes() == record_path(spec,
        tmp_path/"killed").read_bytes()


def test_a_found_run_trains_nothing(tmp_path, monkeypatch):
    spec = SPECS["Frozen"]
    record = train(spec, tmp_path, DATA)
    monkeypatch.setattr(SanitizedRun, "train_epoch", lambda run: pytest.fail("trained again"))
    assert train(spec, tmp_path, DATA) == record


def test_names_stay():
    said = dict(paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn",
                clip_rule="flat", noise_multiplier=1., accounting="as_printed", target_epsilon=1.,
                epochs=2, expected_batch_size=64, seed=0)
    assert run_spec(**said).name == "371545b65d63d758"


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


def test_a_row_that_is_released_twice_is_noticed_and_found_out(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("moves, sentence",
                         [(dict(clip_rule="global_adapt"), "clip_rule must be one of none, flat"),
                          (dict(bound_decay_rate=.5), "got 'bound_decay_rate'"),
                                             (dict(decay="step"),
                                                 "got 'decay'; the nearest known name is")])
def test_what_a_report_would_not_count_is_refused(moves, sentence):
    with pytest.raises(ValueError, match=sentence): below_spec(**moves)


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


@pytest.mark.parametrize("wrong, sentence", [
    (dict(layer_clip=0.), "layer_clip must be a finite number > 0"), (dict(layer_clip=-1.),
        "layer_clip must be"), (dict(layer_clip=math.nan), "layer_clip must be"),
    (dict(layer_dropout=1.), "layer_dropout must be in [0, 1)"), (dict(layer_dropout=-.1),
        "layer_dropout must be in [0, 1)"), (dict(layer_noise_multiplier=0.),
            "layer_noise_multiplier must be"),
    (dict(layer_width=0), "layer_width must be a whole number > 0"),
    (dict(stop_window=4, stop_limit=1e-3),
     "stop_window must be from 2 to 3 for a run of 3 epochs, got stop_window=4"),
    (dict(stop_window=3), "stop_limit must be given exactly when there is a stop_window"),
    (dict(layer_below="public"), "layer_below must be one of"), (dict(layer_below=None),
        "layer_below must be one of"),
    (dict(layer_bound_ratio=0.), "layer_bound_ratio must be"),
    (dict(layer_bound_ratio=.05, model="pooled_rows"),
     "layer_bound_ratio must be None with model=pooled_rows"),
    (dict(layer_dropout_position="before"),
     "layer_dropout_position must be None, or before with a layer_dropout > 0"),
     (dict(layer_dropout=.5, layer_dropout_position="after"),
      "layer_dropout_position must be None, or before"), (dict(target_epsilon=None),
          "target_epsilon must be")])
def test_bad_specs(wrong, sentence):
    with pytest.raises(ValueError) as error: run_spec(**{**printed_values(SIZE), "seed": 0} | wrong)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("model, width, sentence",
                         [("pooled_rows", 15, "width must be 1 times a square number"),
                          ("pooled_rows", 81, "that fits 8 pixels"),
                          ("mnist_cnn", 9, "model must be one of"),
                                                    ("sanitization_resnet18", 50,
                                                        "width must be 512 for this network")])
def test_widths_that_do_not_fit(model, width, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        SanitizedRun(SPECS["Frozen"].varied(model=model, layer_width=width), DATA)


def test_networks_of_the_profiles_can_be_built():
    for name, profiles in LAYER_PROFILES.items():
        for size in profiles.values():
            if size.model == "sanitization_resnet18": continue # built in test_sanitization.py
            spec = run_spec(**printed_values(size), seed=0)
            model = build_layered(spec, worst_case(size.dataset, True, records=2),
                                  build_layer(spec, torch.Generator()))
            assert model(worst_case(size.dataset, True, records=2).train_images).shape == (2, 10)
            assert spec.target_epsilon == claim_of(size)


def test_a_head_follows_the_bound():
    run = SanitizedRun(below_spec().varied(layer_bound_ratio=.05), DATA)
    before = run.model.head.by
    run.train_epoch()
    assert run.layer.clip != .5
    assert run.model.head.by == math.hypot(run.layer.noise_std, run.layer.clip) != before


def test_noise_never_overshoots_and_width_is_public():
    for target in (.5, 3., 8.):
        for releases in (1, 10):
            sigma = row_noise(releases, target, 1e-5)
            found = sanitization_report(RowRelease(width=25, noise_multiplier=sigma,
                releases=releases, rows="nonnegative"), SIZE.plan, below="frozen",
                delta=1e-5).epsilon
            assert target*(1 - 1e-3) <= found <= target
    widths = [public_width(s, SIZE) for s in (10., 1., .5, .1)]
    assert widths == sorted(widths) and widths[0] == 4 and widths[-1] == 49


# attacks

def test_printed_is_told_apart_whatever_the_noise():
    loud = run_spec(**printed_values(SIZE, layer_noise_multiplier=22.), seed=0)
    # of one and the same run
    claim, found = claimed_there(short(loud, 3), 64), attack_below(loud, draws=60, epochs=3,
        records=64)
    assert claim < .1 and found.epsilon > 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Frozen", "One release"])
def test_frozen_versions_hold_in_20_runs(method):
    spec = SPECS[method]
    # nothing below moves, in 20 runs
    with_weights = short(replace(spec, model="small_sanitization_cnn"))
    assert [moved(with_weights, is_bright, seed) for is_bright in (False, True)
            for seed in range(10)] == [0]*20
    # the bounds hold together
    found = [attack_rows(spec, draws=4000, seed=seed, confidence=1 - .05/20).epsilon
             for seed in range(20)]
    assert max(found) <= spec.target_epsilon and max(found) > .5*spec.target_epsilon


@pytest.mark.slow
def test_below_holds_in_20_runs():
    spec = below_spec(noise_multiplier=4.)
    # the bounds hold together
    found = [attack_epoch(spec, draws=2000, seed=seed, confidence=1 - .05/20).epsilon
             for seed in range(20)]
    assert .5*certified_epoch(spec) < max(found) <= certified_epoch(spec)


def test_a_step_with_half_of_the_noise_is_found_out(monkeypatch):
    spec, fill = below_spec(noise_multiplier=4.), GaussianNoise.fill_
    assert attack_step(spec, draws=2000).epsilon <= certified_step(spec)
    monkeypatch.setattr(GaussianNoise, "fill_", lambda self, out, std: fill(self, out, std/2))
    assert attack_step(spec, draws=2000).epsilon > certified_step(spec)
    assert attack_epoch(spec, draws=2000).epsilon > certified_epoch(spec)


def test_an_epoch_composes_its_step_and_its_row():
    spec = below_spec(noise_multiplier=4., layer_noise_multiplier=2.)
    out, into = (epoch_scores(spec, is_bright, 4000, 7 + is_bright) for is_bright in (False, True))
    mu = math.hypot(2/4., 1/2.) # of the step and of the row: half of its square each
    # four standard errors
    assert (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2) == pytest.approx(mu,
        abs=4*math.sqrt(2/4000))
    assert certified_epoch(spec) == pytest.approx(brentq(lambda e: gaussian_delta(1/mu,
        sensitivity=1., epsilon=e) - spec.delta, .1, 20), rel=1e-3)


def test_step_scores_have_the_accounted_distance():
    spec = below_spec(noise_multiplier=2.)
    out, into = (step_scores(spec, sign, 4000, 7 + sign) for sign in (-1, 1))
    assert (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2) == pytest.approx(
        2/spec.method.noise_multiplier, rel=.05)
    assert into.mean() == pytest.approx(1, abs=.15) and out.mean() == pytest.approx(-1, abs=.15)


def test_row_scores_have_the_accounted_distance():
    spec = SPECS["Frozen"]
    out, into = (row_scores(spec, is_bright, 20_000, 7 + is_bright) for is_bright in (False, True))
    mu = (into.mean() - out.mean())/np.sqrt((into.var() + out.var())/2)
    assert mu == pytest.approx(math.sqrt(spec.epochs)/spec.method.layer_noise_multiplier, rel=.03)


def test_audited_records_keep_three_epsilons(tmp_path):
    spec = SPECS["One release"]
    record = train(spec, tmp_path, DATA)
    (made,) = audit_layers([record], lambda s: SIZE.plan, tmp_path)
    assert find_record(spec, tmp_path) == made
    assert 0 < made.budget["empirical"]["epsilon"] <= made.budget["certified"]["pld"]["epsilon"]
    assert made.spec.name == record.spec.name and made.final == record.final
