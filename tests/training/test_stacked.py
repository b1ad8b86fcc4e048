"Runs that share their passes: each record is that of the run alone."
import copy
import dataclasses
import json

import pytest
import torch

from dp_companion.training import stacked as stacked_module
from dp_companion.training import run as run_module
from dp_companion.training.datasets import load_dataset
from dp_companion.training.records import record_path
from dp_companion.training.run import Run
from dp_companion.training.run import step as take_step
from dp_companion.training.spec import run_spec
from dp_companion.training.stacked import _Stack, train_stacked
from dp_companion.training.training import train


def spec_of(seed, **changes):
    said = dict(method="DP-SGD", clip_rule="flat", noise_multiplier=1., accounting="as_printed",
                target_epsilon=1., learning_rate=1e-3, epochs=1)
    return run_spec(paper="global_adapt_v2", dataset="digits", model="mnist_cnn",
                    expected_batch_size=256, seed=seed, **said | changes)


SPECS = [spec_of(0), spec_of(1), spec_of(1, method="Auto-S", clip_rule="auto_s",
                                         noise_multiplier=.5, learning_rate=5e-4),
         spec_of(2, method="V2-S", clip_rule="global_adapt_v2", strict_max_grad_norm=3.,
                 bound_decay_rate=.5, decay="step", decay_rate=.5, drop_every=1),
         spec_of(3, method="Global-Adapt", clip_rule="global_adapt", strict_max_grad_norm=10.)]


@pytest.fixture
def double(monkeypatch):
    "Data and networks in double precision."
    build = run_module.build_network
    monkeypatch.setattr(run_module, "build_network", lambda *args: build(*args).double())
    data = load_dataset("digits")
    return dataclasses.replace(data, train_images=data.train_images.double(),
                               test_images=data.test_images.double())


def weights(run): return torch.cat([p.detach().flatten() for p in run.model.parameters()])


@pytest.mark.slow
def test_a_stacked_run_is_the_run_alone_in_double_precision(double):
    alone, together = ([Run(spec, double) for spec in SPECS] for _ in range(2))
    stack = _Stack(together)
    for run in alone: run.train_epoch()
    stack.train_epoch()
    for one, other in zip(alone, together):
        torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-10)
        for name, value in one.epochs[-1].items():
            assert other.epochs[-1][name] == pytest.approx(value, rel=1e-10), name
        assert other.training.ledger.events == one.training.ledger.events
        assert other.training.step.clip_rule.sensitivity == one.training.step.clip_rule.sensitivity
        assert torch.equal(other.training.noise.get_state(), one.training.noise.get_state())
    assert len({run.epochs[-1]["test_loss"] for run in together}) == len(SPECS)


def test_padding_changes_nothing(double):
    "Two hundred rows more of image 0, and batches of which one is empty."
    runs = [[Run(spec, double) for spec in SPECS[:2]] for _ in range(2)]
    batches = [list(range(40)), []]
    for some, room in zip(runs, (0, 240)):
        for run in some: next(iter(run.training.batches))
        _Stack(some).step(batches, [1., 1.], room)
    for tight, wide in zip(*runs):
        torch.testing.assert_close(weights(wide), weights(tight), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_left_out(double):
    spoiled = double.train_images.clone()
    spoiled[3] = float("nan")
    data = dataclasses.replace(double, train_images=spoiled)
    alone, together = ([Run(spec, data) for spec in SPECS[:2]] for _ in range(2))
    _Stack(together).train_epoch()
    for run in alone: run.train_epoch()
    for one, other in zip(alone, together):
        assert other.nonprivate_nonfinite_samples == one.nonprivate_nonfinite_samples > 0
        torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-10)


def heads(**changes):
    "Linear layers, of which every run has its own method."
    return [dataclasses.replace(spec, model="linear", expected_batch_size=64, epochs=2, **changes)
            for spec in SPECS]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stacked_linear_layer_has_record_of_run_alone_to_bit(tmp_path, workers):
    train_stacked(heads(), tmp_path/"stacked", workers=workers)
    for spec in heads():
        train(spec, tmp_path/"single")
        found, wanted = (record_path(spec, tmp_path/of) for of in ("stacked", "single"))
        assert found.read_bytes() == wanted.read_bytes()


def test_linear_layers_leave_out_what_is_not_finite():
    data = load_dataset("digits")
    spoiled = data.train_images.clone()
    spoiled[3] = float("nan")
    data = dataclasses.replace(data, train_images=spoiled)
    alone, together = ([Run(spec, data) for spec in heads()] for _ in range(2))
    for run in [*alone, *together]: next(iter(run.training.batches))
    for one in alone: take_step(one.training, [2, 3, 4], 1.)
    _Stack(together).step([[2, 3, 4]]*len(together), [1.]*len(together))
    for runs in (alone, together): # the next batch of every second run is empty
        for run in runs: next(iter(run.training.batches))
    batches = [[5, 3]*(k % 2) for k in range(len(alone))]
    for one, batch in zip(alone, batches): take_step(one.training, batch, 1.)
    _Stack(together).step(batches, [1.]*len(together))
    for one, other in zip(alone, together):
        assert torch.equal(weights(one), weights(other)) and weights(one).isfinite().all()


class Killed(Exception): pass


@pytest.mark.slow
def test_killed_stack_goes_on_and_a_late_run_catches_up(tmp_path, monkeypatch):
    specs = [spec_of(seed, epochs=3) for seed in (0, 1)]
    whole = train_stacked(specs, tmp_path/"whole")
    real = stacked_module.save_checkpoint

    def save(run, path):
        real(run, path)
        if run.spec == specs[0] and len(run.epochs) == 2: raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(stacked_module, "save_checkpoint", save)
        train_stacked(specs, tmp_path/"parts")
    # the second run's last checkpoint is an epoch older
    parts = train_stacked(specs, tmp_path/"parts")
    assert [record.budget for record in parts] == [record.budget for record in whole]
    for spec, record in zip(specs, whole):
        found = json.loads(record_path(spec, tmp_path/"parts").read_text())
        assert found["final"]["test_loss"] == pytest.approx(record.final["test_loss"], rel=1e-5)
        assert not record_path(spec, tmp_path/"parts").with_name("checkpoint.pt").exists()


def test_a_step_agrees_in_single_precision():
    "Later a unit next to zero may fall on the other side, and the sample's gradient jumps."
    data = load_dataset("digits")
    alone, together = ([Run(spec, data) for spec in SPECS] for _ in range(2))
    batches = [[next(iter(run.training.batches)) for run in runs] for runs in (alone, together)]
    found = _Stack(together).step(batches[1], [1.]*len(SPECS))
    for one, other, batch, report in zip(alone, together, batches[0], found):
        single = take_step(one.training, batch, 1.)
        torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-5)
        for name in ("nonprivate_norms", "nonprivate_scales", "nonprivate_losses"):
            torch.testing.assert_close(getattr(report, name), getattr(single, name), rtol=1e-5,
                                       atol=1e-6)


def nearest_zero(model, images):
    "The smallest input of a ReLU in absolute value, by sample."
    seen = []
    hooks = [layer.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
             for layer in model if isinstance(layer, torch.nn.ReLU)]
    with torch.no_grad(): model(images)
    for hook in hooks: hook.remove()
    return torch.stack([x.abs().flatten(1).amin(1) for x in seen]).amin(0)


def test_single_precision_differs_only_where_unit_is_next_to_zero():
    "From equal weights, step after step; where a sample jumps, its own unit explains it."
    data, spec = load_dataset("digits"), dataclasses.replace(SPECS[3], epochs=2)
    one, other = Run(spec, data), Run(spec, data)
    stack, jumped = _Stack([other]), []
    for batch, same in zip(one.training.batches, other.training.batches):
        near = nearest_zero(one.model, data.train_images[batch])
        single, (report,) = take_step(one.training, batch, 1.), stack.step([same], [1.])
        apart = (report.nonprivate_norms/single.nonprivate_norms - 1).abs()
        jumped += near[apart > 1e-5].tolist()
        if not jumped: torch.testing.assert_close(weights(other), weights(one), rtol=0, atol=1e-5)
        other.model.load_state_dict(one.model.state_dict())
        state = copy.deepcopy(one.training.optimizer.state_dict())
        other.training.optimizer.load_state_dict(state)
    assert len(jumped) <= 2 and all(x < 1e-6 for x in jumped)


@pytest.mark.slow
def test_records_of_a_stack_are_those_of_single_runs(tmp_path):
    for spec, record in zip(SPECS, train_stacked(SPECS, tmp_path/"stacked")):
        single = train(spec, tmp_path/"single")
        assert record.budget == single.budget and record.provenance == single.provenance
        for name in ("nonprivate_train_loss", "test_loss"):
            assert record.final[name] == pytest.approx(single.final[name], rel=1e-3)
