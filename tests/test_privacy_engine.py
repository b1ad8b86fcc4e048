"An Opacus training loop with three changed lines, and what the engine reports of it."
import copy
import dataclasses
import difflib
import json
import math
import random
import signal
import time
import types
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import AutoS, Flat, GlobalAdapt, GlobalAdaptV2, GroupAdaptive
from dp_companion.algorithms.private_optimizer import check_collate
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import gaussian_events, per_step_multipliers
from dp_companion.budgets.schedules import Constant, LinearDecay, PoissonPlan, StepDecay
from oracles.opacus_engines import ORACLES

pytestmark = pytest.mark.filterwarnings("ignore")

# The loop of Opacus's MNIST tutorial (examples/mnist.py): its network, its calls in its order, and its several runs over one name of the loader. The data are smaller, and there is no command line.
TUTORIAL = '''
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))  # -> [B, 16, 14, 14]
        x = F.max_pool2d(x, 2, 1)  # -> [B, 16, 13, 13]
        x = F.relu(self.conv2(x))  # -> [B, 32, 5, 5]
        x = F.max_pool2d(x, 2, 1)  # -> [B, 32, 4, 4]
        x = x.view(-1, 32 * 4 * 4)  # -> [B, 512]
        x = F.relu(self.fc1(x))  # -> [B, 32]
        x = self.fc2(x)  # -> [B, 10]
        return x


def train(model, device, train_loader, optimizer, privacy_engine, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
    return np.mean(losses), epsilon


def test(model, device, test_loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            right += output.argmax(dim=1).eq(target.to(device)).sum().item()
    return right / len(test_loader.dataset)


def main(dataset, epochs=2, runs=2):
    torch.manual_seed(0)
    train_loader = DataLoader(dataset, batch_size=16, num_workers=0, pin_memory=True)
    test_loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=0, pin_memory=True)
    for _ in range(runs):
        model = SampleConvNet().to("cpu")
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0)
        privacy_engine = PrivacyEngine(secure_mode=False)
        model, optimizer, train_loader = privacy_engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=train_loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        found = [train(model, "cpu", train_loader, optimizer, privacy_engine, epoch) for epoch in range(epochs)]
        test(model, "cpu", test_loader)
    return privacy_engine.get_epsilon(1e-5), found, model, optimizer
'''

CHANGED = TUTORIAL.replace("from opacus import PrivacyEngine", "from dp_companion import PrivacyEngine") \
    .replace("max_grad_norm=1.0,\n", "max_grad_norm=1.0, clip_rule=\"auto_s\",\n") \
    .replace("return privacy_engine.get_epsilon(1e-5), found", "return privacy_engine.budget(1e-5), found")


def seeded(seed=3): return torch.Generator().manual_seed(seed)


def mnist_like(n=80):
    "Images of MNIST's size whose class can be seen: a bright row of its own."
    labels = torch.arange(n)%10
    images = .1*torch.randn(n, 1, 28, 28, generator=seeded())
    for image, label in zip(images, labels): image[0, 2*label:2*label+4] += 1
    return TensorDataset(images, labels)


def run(source, **options):
    names = {}
    exec(source, names)
    return names["main"](mnist_like(), **options)


def test_the_tutorial_runs_unchanged_but_for_three_lines():
    lines = [line for line in difflib.unified_diff(TUTORIAL.splitlines(), CHANGED.splitlines(), n=0) if line[0] == "+" and line[:3] != "+++"]
    assert len(lines) == 3
    report, found, model, optimizer = run(CHANGED)
    assert len(found) == 2 and found[1][1] > found[0][1] > 0 and all(math.isfinite(loss) for loss, _ in found)
    assert [(e.noise_multiplier, e.sample_rate, e.steps) for e in report.events] == [(1., .2, 10)]
    assert report.certified == certify(report.events, delta=1e-5) and report.epsilon == pytest.approx(found[1][1], abs=1e-12)
    assert json.loads(json.dumps(report.to_dict()))["neighbouring_relation"] == "add_or_remove_one"
    assert optimizer.clip_rule == AutoS(max_grad_norm=1.)
    plain = {}
    exec(TUTORIAL, plain)
    plain["SampleConvNet"]().load_state_dict(model.state_dict())  # the weights are an ordinary model's


def test_one_changed_line_is_enough():
    epsilon, found, _, optimizer = run(CHANGED.replace(', clip_rule="auto_s"', "").replace("budget(1e-5)", "get_epsilon(1e-5)"))
    theirs, *_ = run(TUTORIAL)
    assert optimizer.clip_rule == Flat(max_grad_norm=1.) and epsilon == found[-1][1]
    assert epsilon == pytest.approx(theirs, rel=.02)  # PRV and PLD, the same rate and steps


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)


def data(n=40): return TensorDataset(torch.randn(n, 1, 8, 8, generator=seeded(), dtype=torch.float64), torch.arange(n)%3)


def private(privacy=None, method="make_private", batch_size=8, dataset=None, model=None, secure_mode=False, optimizer=None, **options):
    "An engine, and what `make_private` gives for a small network."
    model, privacy = model or network(), privacy or PrivacyEngine(secure_mode=secure_mode)
    defaults = dict(max_grad_norm=.5)
    if method == "make_private" and "noise_schedule" not in options: defaults["noise_multiplier"] = 1.
    torch.manual_seed(1)
    found = getattr(privacy, method)(module=model, optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(dataset or data(), batch_size=batch_size), **{**defaults, **options})
    return privacy, *found


def train(model, optimizer, loader, criterion=nn.CrossEntropyLoss(), groups=None):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step(**({} if groups is None else {"groups": groups(y)}))


def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


class Centred(nn.Module):
    "Subtracts the batch's mean."
    def forward(self, h): return h-h.mean(0)


def test_samples_that_meet_are_refused():
    _, model, optimizer, loader = private(model=nn.Sequential(network(), Centred()))
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"): train(model, optimizer, loader)


def test_autocast_is_refused():
    _, model, optimizer, loader = private(model=network(torch.float32))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="the forward pass must run in the parameters' own precision"): model(torch.zeros(4, 1, 8, 8))


@pytest.mark.parametrize("rule", [Flat(max_grad_norm=.5), AutoS(max_grad_norm=.5), GlobalAdaptV2(max_grad_norm=.5), GlobalAdapt(max_grad_norm=.5)], ids=lambda r: r.name)
def test_every_step_of_a_loop_is_that_of_the_oracles(rule):
    _, model, optimizer, loader = private(clip_rule=rule, noise_multiplier=1e-9)
    for x, y in (batch for _ in range(2) for batch in loader):
        now, before = optimizer.clip_rule, copy.deepcopy(model)
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        for oracle in ORACLES.values() if len(x) else ():
            total, _ = oracle(copy.deepcopy(before), nn.CrossEntropyLoss(), x, y, now.scale)
            torch.testing.assert_close(gathered(optimizer), total/optimizer.expected_batch_size, rtol=1e-6, atol=1e-8)


def test_a_sample_that_is_not_finite_is_left_out():
    broken = data()
    broken.tensors[0][::3] = math.nan
    _, model, optimizer, loader = private(dataset=broken)
    train(model, optimizer, loader)
    assert torch.isfinite(weights(model)).all() and optimizer.report.nonprivate_not_finite > 0


def test_groups_reach_a_rule_that_needs_them():
    privacy, model, optimizer, loader = private(clip_rule=GroupAdaptive(num_groups=3, max_grad_norm=.5))
    train(model, optimizer, loader, groups=lambda y: y)
    assert len(privacy.accountant) == 5 and privacy.accountant.events[0].query == "gradient and clipped and unclipped per group"
    with pytest.raises(ValueError, match="groups must be given to optimizer.step"): train(model, optimizer, loader)
    assert len(privacy.accountant) == 5  # and nothing was spent


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_counts_are_paid_for_by_the_target_or_it_is_refused(accountant):
    rule = GlobalAdapt(max_grad_norm=.5, count_noise=1.5)
    def asked(target): return private(PrivacyEngine(accountant=accountant), "make_private_with_epsilon", target_epsilon=target, target_delta=1e-4, epochs=2, clip_rule=rule)
    _, _, optimizer, _ = asked(12.)
    events = gaussian_events(optimizer.noise_schedule, optimizer.plan)
    assert 12*.998 < certify(rule.joint_events(events), delta=1e-4, accountants=(accountant,))[accountant].epsilon <= 12
    assert certify(events, delta=1e-4, accountants=(accountant,))[accountant].epsilon < 11  # the gradient alone has less than the whole
    with pytest.raises(ValueError, match="target_epsilon must be more than the .* that the rule's own counts spend"): asked(1.)


SCHEDULES = [Constant(initial=2.), StepDecay(initial=2., decay_rate=.5, drop_every=2), LinearDecay(initial=2., decay_rate=.9, unit="step")]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}-{s.unit}")
@pytest.mark.parametrize("batch_size", [8, 7, 13])
def test_the_budget_is_that_of_the_applied_steps(schedule, batch_size):
    epochs, rule, applied = 3, GlobalAdapt(max_grad_norm=.5, count_noise=4.), []
    privacy, model, optimizer, loader = private(noise_schedule=schedule, clip_rule=rule, batch_size=batch_size)
    step = optimizer.private_step.add_noise

    def draw_noise():
        if not optimizer.private_step.has_noise:
            applied.append(optimizer.private_step.step_multiplier)
            assert len(privacy.accountant) == len(applied)  # accounted before it is drawn
        step()

    optimizer.private_step.add_noise = draw_noise
    plan = PoissonPlan(dataset_size=40, expected_batch_size=batch_size, epochs=epochs)
    for _ in range(epochs):
        for x, y in loader:
            if len(applied) == plan.steps: break
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
    assert applied == plan.per_step(schedule).tolist()
    events = rule.joint_events(gaussian_events(schedule, plan))
    report = privacy.budget(1e-4)
    assert report.events == events and report.certified == certify(events, delta=1e-4)
    assert per_step_multipliers(report.events).max() < 2.  # counts are paid for


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [None, GlobalAdapt(max_grad_norm=.5, count_noise=4.)], ids=["flat", "counting"])
def test_a_target_is_met_and_never_passed(accountant, rule):
    privacy, model, optimizer, loader = private(PrivacyEngine(accountant=accountant), "make_private_with_epsilon", target_epsilon=4., target_delta=1e-4,
        epochs=3, clip_rule=rule, batch_size=7, noise_schedule=SCHEDULES[1])
    for _ in range(3): train(model, optimizer, loader)
    assert len(privacy.accountant) == 3*40//7
    assert 4*.998 < privacy.get_epsilon(1e-4) <= 4. and privacy.budget().epsilon <= 4.
    with pytest.raises(ValueError, match="training must stop after the 17 steps that target_epsilon pays for"): train(model, optimizer, loader)
    with pytest.raises(ValueError, match="must be asked of a fresh PrivacyEngine, got one that has made an optimizer already, with 17 steps"):
        private(privacy, "make_private_with_epsilon", target_epsilon=4., target_delta=1e-4, epochs=3)


class Reshapes(nn.Module):
    "A module that does not take an empty batch by itself."
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 3).double()

    def forward(self, x): return self.head(x.view(len(x), -1))


def test_an_empty_batch_is_a_step_with_noise():
    privacy, model, optimizer, loader = private(model=Reshapes(), batch_size=1)
    empty = 0
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        before = weights(model)
        optimizer.step()
        empty += len(x) == 0
        moved = weights(model)-before
        assert torch.isfinite(moved).all() and (moved != 0).all()
        if len(x) == 0: assert optimizer.report.nonprivate_batch_size == 0 and .5 < moved.std()/(.1*.5) < 2
    assert empty > 5 and len(privacy.accountant) == 40


def test_the_divisor_is_public():
    for n in (40, 41):  # one record more
        _, model, optimizer, loader = private(dataset=data(n), expected_batch_size=8)
        train(model, optimizer, loader)
        assert optimizer.report.noise_std == 1.*.5/8


def test_learning_rate_schedulers_and_closures_work():
    _, model, optimizer, loader = private()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=.1, total_steps=5)
    rates = []
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step(closure)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 3 and rates[-1] == optimizer.original_optimizer.param_groups[0]["lr"]


def test_evaluation_is_the_plain_module():
    _, model, optimizer, loader = private()
    x = data().tensors[0]
    model.eval()
    assert torch.equal(model(x), model._module(x)) and optimizer.recorder.batch_size is None
    model.train()
    with torch.no_grad(): model(x)
    assert optimizer.recorder.batch_size is None


BAD = {
    "poisson_sampling must be True, got poisson_sampling=False: the accountant certifies Poisson batches": dict(poisson_sampling=False),
    "noise_multiplier must be finite and > 0": dict(noise_multiplier=math.nan),
    "max_grad_norm must be": dict(max_grad_norm=[1., 1.]),
    "batch_first must be True": dict(batch_first=False),
    "leave out grad_sample_mode and criterion, and call loss.backward() on the ordinary loss": dict(criterion=nn.CrossEntropyLoss()),
    "grad_sample_mode must be hooks, got grad_sample_mode=ghost": dict(grad_sample_mode="ghost"),
    "loss_reduction must be one of": dict(loss_reduction="median"),
    "clip_rule must be a ClipRule or the name of one": dict(clip_rule=3),
    "max_grad_norm must be left out or equal clip_rule's 2": dict(clip_rule=AutoS(max_grad_norm=2.)),
    "must be a whole number": dict(expected_batch_size=2.5),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_sentence(message):
    with pytest.raises(ValueError) as error: private(**BAD[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_bad_input():
    with pytest.raises(ValueError, match="mixes the samples of a batch"): private(model=nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)).double())
    with pytest.raises(TypeError, match="no argument 'noise'"): private(noise=1.)
    model = network()
    with pytest.raises(ValueError, match="optimizer must hold the trainable parameters of module and no others, got 6 that it misses"):
        PrivacyEngine().make_private(module=model, optimizer=torch.optim.SGD(model[-1].parameters(), lr=.1), data_loader=DataLoader(data(), batch_size=4), noise_multiplier=1.)
    with pytest.raises(ValueError, match="delta must be given"): PrivacyEngine().budget()
    with pytest.raises(ValueError, match="accountant must be one of pld, rdp"): PrivacyEngine(accountant="gdp")


def test_a_changed_buffer_is_refused_at_the_forward_pass():
    norm = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(64, 3)).double()
    _, model, _, loader = private(model=norm)
    with pytest.raises(ValueError, match="no buffer may change"): model(next(iter(loader))[0])


def flat_data(n=40): return TensorDataset(torch.randn(n, 6, generator=seeded(), dtype=torch.float64), torch.arange(n)%3)


def flat_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(.5), nn.ReLU(), nn.Linear(8, 3)).double()


def loop():
    "Module, optimizer, criterion and loader of a tiny private loop."
    _, model, optimizer, loader = private(dataset=flat_data(), model=flat_network())
    return model, optimizer, nn.CrossEntropyLoss(), loader


@pytest.mark.parametrize("later", [True, False])
def test_what_trains_is_decided_once(later):
    "A layer that is unfrozen later would be trained on raw gradients, one that is frozen later would go on."
    own = flat_network()
    own[0].requires_grad_(not later)
    privacy = PrivacyEngine(secure_mode=False)
    model, optimizer, loader = privacy.make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=1.), data_loader=DataLoader(flat_data(), batch_size=8),
                                                                noise_multiplier=1., max_grad_norm=1.)
    own[0].requires_grad_(later)
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="the trainable parameters must be those that the private step was built with"): model(x)
    own = flat_network()
    own[0].requires_grad_(later)
    step = PrivateStep(own, torch.optim.SGD(own.parameters(), lr=1.), clip_rule=Flat(), expected_batch_size=8, noise_multiplier=1.)
    own[0].requires_grad_(not later)
    with pytest.raises(ValueError, match="the trainable parameters must be those"): step(nn.CrossEntropyLoss(), x, y)


def test_an_old_gradient_of_a_frozen_layer_is_not_applied():
    own = flat_network()
    own[0].weight.grad, before = torch.ones_like(own[0].weight), own[0].weight.detach().clone()
    own[0].requires_grad_(False)
    step = PrivateStep(own, torch.optim.SGD(own.parameters(), lr=1.), clip_rule=Flat(), expected_batch_size=8, noise_multiplier=1.)
    step(nn.CrossEntropyLoss(), *flat_data()[:8])
    assert torch.equal(own[0].weight, before)


class Rows(nn.Module):
    "A layer that sees every position as a sample of its own."
    def __init__(self): super().__init__(); self.layer = nn.Linear(6, 3).double()
    def forward(self, x): return self.layer(x.reshape(-1, 6)).reshape(len(x), -1, 3).sum(1)


@pytest.mark.parametrize("samples", [1, 4])
def test_rows_are_not_clipped_in_the_place_of_samples(samples):
    step = PrivateStep(model := Rows(), torch.optim.SGD(model.parameters(), lr=1.), clip_rule=Flat(max_grad_norm=.01), expected_batch_size=1, noise_multiplier=0.)
    with pytest.raises(ValueError, match="must see one row per sample|must be the batch of"):
        step(nn.CrossEntropyLoss(), torch.ones(samples, 50, 6, dtype=torch.float64), torch.zeros(samples, dtype=torch.long))


def test_a_scaler_that_goes_by_raw_gradients_is_refused():
    model, optimizer, criterion, loader = loop()
    x, y = next(iter(loader))
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(criterion(model(x), y)).backward()
        if not enabled: scaler.step(optimizer); x, y = next(iter(loader))
    with pytest.raises(ValueError, match="must be called without a GradScaler"): scaler.step(optimizer)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_batch_that_a_loop_leaves_out_is_noticed(pieces):
    model, optimizer, criterion, loader = loop()
    def train_on(batches):
        for k, (x, y) in enumerate(batches):
            if k == 1: continue
            optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()
    with pytest.raises(ValueError, match="every batch of the returned data loader must have its optimizer.step"):
        if not pieces: return train_on(loader)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small: train_on(small)


@pytest.mark.parametrize("pieces", [3, 5])
def test_batches_in_pieces_end_at_the_same_weights(pieces):
    ends = []
    for size in (None, pieces):
        _, model, optimizer, loader = private()
        if size is None: train(model, optimizer, loader)
        else:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as small: train(model, optimizer, small)
        ends.append(weights(model))
    assert (ends[0]-ends[1]).norm() <= 1e-12*ends[0].norm()


def test_only_the_last_forward_pass_counts():
    "With dropout, a second pass would leave the norms of another network."
    model, optimizer, criterion, loader = loop()
    x, y = flat_data()[:8]
    loss = criterion(model(x), y)
    model(x)
    with pytest.raises(ValueError, match="loss.backward must go once through the last forward pass"): loss.backward()


@pytest.mark.parametrize("order", ["before", "between"])
def test_gradients_may_be_cleared_before_the_backward_pass(order):
    model, optimizer, criterion, loader = loop()
    for x, y in loader:
        if order == "before": optimizer.zero_grad()
        loss = criterion(model(x), y)
        if order == "between": optimizer.zero_grad()
        loss.backward(); optimizer.step()
    assert optimizer.steps_taken == 5


def test_a_promise_has_one_optimizer():
    "Two would each spend the target, or one of them what the other promised."
    def promised(privacy, target=2.):
        own = flat_network()
        return privacy.make_private_with_epsilon(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=DataLoader(flat_data(), batch_size=8),
                                                 target_epsilon=target, target_delta=1e-5, epochs=1, max_grad_norm=1.)
    privacy = PrivacyEngine(accountant="rdp", secure_mode=False)
    made = promised(privacy)
    with pytest.raises(ValueError, match="target_epsilon must be asked of a fresh PrivacyEngine, got one that has made an optimizer already"): promised(privacy, 1.)
    train(*made)
    with pytest.raises(ValueError, match="training must stop after the 5 steps that target_epsilon pays for"): train(*made)
    with pytest.raises(ValueError, match="make_private must be asked of a fresh PrivacyEngine"): private(privacy, dataset=flat_data(), model=flat_network(), noise_multiplier=1.)
    other, *_ = private(dataset=flat_data(), model=flat_network(), noise_multiplier=.5)
    with pytest.raises(ValueError, match="target_epsilon must be asked of a fresh PrivacyEngine"): promised(other)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_draw_the_same_batches(integer):
    "Their shifts overflow: all records were in every batch, or none was."
    sizes = []
    for b in (20, integer(20)):
        _, _, _, loader = private(dataset=flat_data(200), model=flat_network(), expected_batch_size=b)
        sizes.append([len(x) for x, _ in loader])
    assert sizes[0] == sizes[1] and 10 < np.mean(sizes[0]) < 30


@pytest.mark.parametrize("way", ["signal", "module"])
def test_no_record_is_in_a_step_twice(way):
    "Opacus's signal for pieces of a batch could add the whole of it again and again, at the price of once."
    model, optimizer, criterion, loader = loop()
    with pytest.raises(ValueError, match="the passes of one step must hold the records of its batch once, got [0-9]+ rows more"):
        for x, y in loader:
            for more in (True, False) if way == "signal" else (False,):
                optimizer.zero_grad()
                if way == "signal": optimizer.signal_skip_step(more)
                else: x, y = torch.cat([x]*2), torch.cat([y]*2)
                criterion(model(x), y).backward()
                optimizer.step()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_draws_the_batch_that_comes_next(tmp_path, workers):
    "Workers draw ahead: what a checkpoint keeps is where the steps are, else the same noise would be added to other records."
    def made():
        own = flat_network()[2:]
        privacy = PrivacyEngine()
        model, optimizer, loader = privacy.make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1., noise_generator=seeded(),
            data_loader=DataLoader(TensorDataset(torch.randn(40, 8, generator=seeded(), dtype=torch.float64), torch.arange(40)%3), batch_size=4, num_workers=workers, generator=seeded(1)))
        return privacy, model, optimizer, loader
    def run(privacy, model, optimizer, loader, steps, stop_at=None):
        for x, y in loader:
            optimizer.zero_grad(); nn.CrossEntropyLoss()(model(x), y).backward(); optimizer.step()
            steps.append((x, optimizer.recorder.flat.clone()))
            if optimizer.steps_taken == 3: privacy.save_checkpoint(path=tmp_path/"c.pt", module=model, optimizer=optimizer)
            if optimizer.steps_taken == stop_at: return
    whole, resumed, broken = [], [], []
    run(*made(), whole)
    privacy, model, optimizer, loader = made()
    privacy.load_checkpoint(path=tmp_path/"c.pt", module=model, optimizer=optimizer)
    run(privacy, model, optimizer, loader, resumed)
    objects = made()
    run(*objects, broken, stop_at=5)
    run(*objects, broken) # The same pass, left and begun again
    for found, expected in ((resumed, whole[3:]), (broken, whole)):
        assert len(found) == len(expected) and all(torch.equal(a, b) for pair in zip(found, expected) for a, b in zip(*pair))


class Noisy(torch.utils.data.Dataset):
    "A data set that augments its images where they are read."
    def __len__(self): return 40
    def __getitem__(self, i): return torch.randn(1, 8, 8, dtype=torch.float64), i % 3


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_after_a_resumption_has_the_same_augmented_images(tmp_path, workers):
    def made():
        torch.manual_seed(5)
        model = network()
        return PrivacyEngine(secure_mode=False), model, torch.optim.SGD(model.parameters(), lr=.1), DataLoader(Noisy(), batch_size=8, num_workers=workers)
    def private_of(privacy, model, optimizer, loader): return privacy, *privacy.make_private(module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1., max_grad_norm=.5)
    privacy, model, optimizer, loader = private_of(*made())
    train(model, optimizer, loader)
    privacy.save_checkpoint(path=tmp_path/"c.pt", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    other, resumed, optimizer, loader = private_of(*made())
    other.load_checkpoint(path=tmp_path/"c.pt", module=resumed, optimizer=optimizer)
    train(resumed, optimizer, loader)
    assert torch.equal(weights(model), weights(resumed))


@pytest.mark.parametrize("choice", ["batches", "part", "few", "again"])
def test_a_loader_that_chooses_its_samples_is_refused(choice):
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler
    made = flat_data()
    chosen = dict(batches=dict(batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 5, False)), part=dict(sampler=SequentialSampler(range(10)), batch_size=5),
                  few=dict(sampler=RandomSampler(made, num_samples=10), batch_size=5), again=dict(sampler=RandomSampler(made, replacement=True), batch_size=5))[choice]
    own = flat_network()
    with pytest.raises(ValueError, match="data_loader must not choose its samples"):
        PrivacyEngine().make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=DataLoader(made, **chosen), noise_multiplier=1., expected_batch_size=5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_that_is_shared_gives_one_share_of_a_batch(processes):
    from torch.utils.data import DistributedSampler
    made = flat_data()
    shared = DataLoader(made, batch_size=4, sampler=DistributedSampler(made, num_replicas=processes, rank=0))
    own = flat_network()
    _, optimizer, _ = PrivacyEngine().make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=shared, noise_multiplier=1.)
    assert optimizer.expected_batch_size == 4*processes and optimizer.plan.sample_rate == 4*processes/len(made)


def test_a_checkpoint_that_cannot_be_read_is_not_written(tmp_path):
    path = tmp_path/"checkpoint.pt"
    privacy, model, optimizer, _ = private()
    privacy.save_checkpoint(path=path, module=model, optimizer=optimizer)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="a checkpoint must hold tensors and plain values alone"):
        privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"accuracy": np.mean([.9, .8])})
    assert path.read_bytes() == before


class Several(nn.Module):
    "A module whose output is more than a tensor."
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3).double(), kind
    def forward(self, x): return self.kind(self.layer(x))


Named = namedtuple("Named", "logits, note")


@pytest.mark.parametrize("kind", [lambda x: (x, None), lambda x: Named(x, "said"), lambda x: [x, torch.tensor(1.)]])
def test_an_empty_batch_takes_any_output(kind):
    _, model, optimizer, _ = private(dataset=flat_data(), model=Several(kind))
    optimizer.current_pass.drawn.append((0, None))
    logits = model(torch.zeros(0, 6, dtype=torch.float64))[0]
    assert logits.shape == (0, 3)
    nn.CrossEntropyLoss(reduction="sum")(logits, torch.zeros(0, dtype=torch.long)).backward()
    optimizer.step()
    assert optimizer.steps_taken == 1


def test_the_length_of_a_pass_stays():
    _, model, optimizer, loader = private()
    lengths = []
    for x, y in loader:
        optimizer.zero_grad(); nn.CrossEntropyLoss()(model(x), y).backward(); optimizer.step()
        lengths.append(len(loader))
    assert set(lengths[:-1]) == {len(lengths)}


def test_processes_that_would_train_apart_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="module must be in torch.nn.parallel.DistributedDataParallel before make_private where 2 processes train, got Sequential"): private()


def test_an_average_of_weights_is_the_plain_module():
    from torch.optim.swa_utils import AveragedModel
    model, optimizer, criterion, loader = loop()
    average = AveragedModel(model)
    for x, y in loader:
        optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()
        average.update_parameters(model)
    with torch.no_grad(): assert average.eval()(flat_data()[:5][0]).shape == (5, 3)
    assert set(average.module.state_dict()) == set(model.state_dict()) and not isinstance(average.module, type(model))
    again = AveragedModel(flat_network())
    again.load_state_dict(average.state_dict())


def test_a_pass_ends_with_the_epoch_where_a_plan_ends_before():
    engine, model, optimizer, loader = private(dataset=flat_data(100), model=flat_network(), batch_size=30, noise_multiplier=1.)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (len(engine.accountant), PoissonPlan(dataset_size=100, expected_batch_size=30, epochs=1).steps) == (4, 3)


def test_a_sum_is_divided_by_the_batch_size_too():
    def moved(reduction):
        own = nn.Linear(6, 3).double()
        nn.init.zeros_(own.weight), nn.init.zeros_(own.bias)
        model, optimizer, loader = PrivacyEngine().make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=1.), data_loader=DataLoader(flat_data(), batch_size=40),
            noise_multiplier=1e-9, max_grad_norm=10., loss_reduction=reduction)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        return own.weight.detach()
    torch.testing.assert_close(moved("sum"), moved("mean"), rtol=1e-6, atol=1e-7)


def test_the_schedule_that_a_refusal_names_is_taken():
    with pytest.raises(ValueError, match="bound_schedule must be a Schedule") as error: private(bound_schedule=2.)
    named = str(error.value).split("such as ")[1].split(", got")[0]
    private(bound_schedule=eval(named), max_grad_norm=None)


def test_words_that_say_one_thing_agree():
    with pytest.raises(ValueError, match="max_grad_norm must be left out or equal bound_schedule's initial 3.0"):
        private(max_grad_norm=1., bound_schedule=StepDecay(initial=3., decay_rate=.5, drop_every=2, decay_of="value"))
    own = flat_network()
    module, *_ = PrivacyEngine().make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=DataLoader(flat_data(), batch_size=8), noise_multiplier=1., loss_reduction="sum")
    assert module.loss_reduction == "sum"


def test_what_the_engine_does_not_do_it_refuses():
    made = dict(dataset=flat_data(), model=flat_network(), noise_multiplier=1.)
    with pytest.raises(TypeError, match="make_private has no argument 'epochs'"): private(epochs=3, **made)
    with pytest.raises(ValueError, match="target_delta must be in \\(0, 1\\), got target_delta=0"): private(PrivacyEngine(), "make_private_with_epsilon", target_epsilon=1., target_delta=0, epochs=1)
    with pytest.raises(TypeError, match="make_private has no argument 'engine'"): private(engine="book", **made)
    chosen = DataLoader(flat_data(), batch_size=8, sampler=torch.utils.data.SubsetRandomSampler(range(30)))
    with pytest.raises(ValueError, match="data_loader must not choose its samples"):
        PrivacyEngine().make_private(module=made["model"], optimizer=torch.optim.SGD(made["model"].parameters(), lr=.1), data_loader=chosen, noise_multiplier=1., max_grad_norm=1.)


def test_secure_by_default_and_seeded_on_request():
    def end(**options):
        privacy, model, optimizer, loader = private(**options)
        train(model, optimizer, loader)
        return privacy.noise_source, weights(model)
    assert end(privacy=PrivacyEngine())[0] == "secure" and end(privacy=PrivacyEngine(), noise_generator=seeded())[0] == "seeded"
    kernels = {"0": "matrices"}
    assert torch.equal(end(kernels=kernels)[1], end(kernels=kernels)[1])  # torch.manual_seed decides
    assert not torch.equal(end(secure_mode=None)[1], end(secure_mode=None)[1])


def resumed(folder):
    "Twelve epochs from wherever the checkpoint in `folder` is; a process of the test below."
    torch.set_num_threads(1)
    model, path = nn.Sequential(nn.Dropout(.2), *network()), folder/"checkpoint.pt"
    privacy, model, optimizer, loader = private(model=model, noise_schedule=SCHEDULES[2], clip_rule=GlobalAdapt(max_grad_norm=.5), kernels={"1": "matrices"})
    if path.exists(): privacy.load_checkpoint(path=path, module=model, optimizer=optimizer)
    for epoch in range(optimizer.epoch, 12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": epoch})
            time.sleep(.02)
    report = privacy.budget(1e-4).to_dict()
    (folder/"record.json").write_text(json.dumps([report, weights(model).tolist(), optimizer.clip_rule.strict_max_grad_norm]))


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_record(tmp_path, processes):
    def start(folder):
        folder.mkdir(exist_ok=True)
        process = processes.Process(target=resumed, args=(folder,))
        process.start()
        return process
    def ends(process):
        process.join(300)
        return process.exitcode
    def written(folder): return (folder/"checkpoint.pt").stat().st_mtime_ns if (folder/"checkpoint.pt").exists() else 0
    assert ends(start(tmp_path/"whole")) == 0
    killed = tmp_path/"killed"
    for wait in (.01, .3):
        seen, process, deadline = written(killed), start(killed), time.monotonic() + 120
        while written(killed) == seen and process.is_alive() and time.monotonic() < deadline: time.sleep(.005)
        time.sleep(wait)
        process.kill()
        assert ends(process) == -signal.SIGKILL
    assert not (killed/"record.json").exists()
    assert ends(start(killed)) == 0
    assert (killed/"record.json").read_bytes() == (tmp_path/"whole"/"record.json").read_bytes()


@pytest.mark.parametrize("rule, name", [(GlobalAdaptV2(), "strict_max_grad_norm"), (Flat(), "max_grad_norm")])
def test_a_bound_can_fall_by_the_step(rule, name):
    schedule = StepDecay(initial=3., decay_rate=.5, drop_every=2, unit="step", decay_of="value")
    _, model, optimizer, loader = private(clip_rule=rule, max_grad_norm=None, bound_schedule=schedule)
    steps = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        steps.append((getattr(optimizer.clip_rule, name), optimizer.private_step.sensitivity, optimizer.clip_rule.sensitivity))
    assert [bound for bound, *_ in steps] == [3*.5**(t//2) for t in range(len(steps))] and len(steps) > 3
    assert all(used == of_rule for _, used, of_rule in steps)


def test_checkpoints_do_not_go_back_or_elsewhere(tmp_path):
    path = tmp_path/"checkpoint.pt"
    privacy, model, optimizer, loader = private()
    train(model, optimizer, loader)
    privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"note": "kept"})
    with pytest.raises(ValueError, match="load_checkpoint must come before the first step, got 5 steps"): privacy.load_checkpoint(path=path, module=model, optimizer=optimizer)
    other, *objects = private(noise_multiplier=2.)
    with pytest.raises(ValueError, match="noise_schedule must be the checkpoint's"): other.load_checkpoint(path=path, module=objects[0], optimizer=objects[1])
    other, *objects = private(max_grad_norm=2.)
    with pytest.raises(ValueError, match=r"clip_rule must be the checkpoint's Flat\(max_grad_norm=0.5\), got"): other.load_checkpoint(path=path, module=objects[0], optimizer=objects[1])
    fresh, *objects = private()
    assert fresh.load_checkpoint(path=path, module=objects[0], optimizer=objects[1])["note"] == "kept"
    assert torch.equal(weights(objects[0]), weights(model)) and fresh.budget(1e-4) == privacy.budget(1e-4)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="checkpoint must be whole"): private()[0].load_checkpoint(path=path, module=model, optimizer=optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_workers_bring_the_same_batches():
    batches = []
    for workers in (0, 2):
        torch.manual_seed(1)
        model = network()
        _, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
            data_loader=DataLoader(data(), batch_size=8, num_workers=workers), noise_multiplier=1., max_grad_norm=1.)
        batches.append([x for x, _ in loader])
    for a, b in zip(*batches): assert torch.equal(a, b)


def share(rank, world, out):
    "One of the processes of the test below."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    model = DistributedDataParallel(network())
    torch.manual_seed(rank)
    privacy, module, optimizer, loader = private(model=model, batch_size=4)
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(module(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    torch.save((weights(model), sizes, len(privacy.accountant)), f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_stay_together(tmp_path, processes):
    mp.start_processes(share, args=(2, str(tmp_path/"out")), nprocs=2, start_method=processes.get_start_method())
    (w0, n0, t0), (w1, n1, t1) = (torch.load(f"{tmp_path/'out'}.{rank}", weights_only=True) for rank in (0, 1))
    assert torch.equal(w0, w1) and t0 == t1 == 10 and len(n0) == len(n1) == 10
    assert .5 < (sum(n0)+sum(n1))/40 < 1.7


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_whenever_they_come(kind):
    def hooked(model): getattr(next(model.parameters()), kind)(lambda g: None)
    model = network(); hooked(model)
    with pytest.raises(ValueError, match="the hook on the parameter at .* changes a gradient"): private(model=model)
    _, module, optimizer, loader = private(model=(model := network()))
    loss, hook_at = nn.CrossEntropyLoss(), 3 # A pass that is not looked at
    with pytest.raises(ValueError, match="the hook on the parameter at .* changes a gradient"):
        for k, (x, y) in enumerate(loader):
            if k == hook_at: hooked(model)
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
    assert k == hook_at


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Answer(dict): pass


class Wrapped(nn.Module):
    "A network with one of several kinds of output, of which samples meet where asked."
    def __init__(self, wrap, meets): super().__init__(); self.inside, self.wrap, self.meets = network(), wrap, meets
    def forward(self, x):
        h = self.inside(x)
        return self.wrap(h/h.detach().std() if self.meets else h)


OUTPUTS = {"dict": lambda h: {"logits": h}, "data class": Output, "dict of its own": lambda h: Answer(logits=h), "object": lambda h: types.SimpleNamespace(logits=h)}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_samples_that_meet_are_seen_behind_every_output(kind):
    _, module, optimizer, loader = private(model=Wrapped(OUTPUTS[kind], meets=True))
    with pytest.raises(ValueError, match="samples must not meet"): module(next(iter(loader))[0])


@pytest.mark.parametrize("kind", ["dict", "data class", "dict of its own"])
def test_an_empty_batch_has_every_output(kind):
    _, module, optimizer, loader = private(model=Wrapped(OUTPUTS[kind], meets=False))
    output = module(torch.zeros(0, 1, 8, 8, dtype=torch.float64))
    assert type(output) is type(OUTPUTS[kind](0)) and (output["logits"] if isinstance(output, dict) else output.logits).shape == (0, 3)


def test_the_optimizer_that_was_given_does_not_step():
    model = network()
    given = torch.optim.SGD(model.parameters(), lr=.1)
    def made(by): return by.make_private(module=model, optimizer=given, data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    first = PrivacyEngine(secure_mode=False)
    module, optimizer, loader = made(first)
    with pytest.raises(ValueError, match="optimizer.step must be called on the optimizer that make_private returned"): given.step()
    train(module, optimizer, loader)
    with pytest.raises(ValueError, match="optimizer must not have been trained by another PrivacyEngine, got one with 5 steps"): made(PrivacyEngine())
    module, optimizer, loader = made(first) # The model is not changed: the same engine may be given both again
    train(module, optimizer, loader)
    assert len(first.accountant) == 10
    assert optimizer.steps_taken == 5


@pytest.mark.parametrize("what", ["module", "optimizer", "both"])
def test_what_another_engine_has_trained_is_refused(what):
    "A notebook's cell that is run again would report its own steps alone, for a target that both have used."
    target = dict(target_epsilon=1., target_delta=1e-5, epochs=1, max_grad_norm=1., data_loader=DataLoader(data(), batch_size=8))
    def made(module, optimizer=None): return PrivacyEngine(secure_mode=False).make_private_with_epsilon(module=module, optimizer=optimizer or torch.optim.SGD(module.parameters(), lr=.1), **target)
    module, optimizer, loader = made(*made(network())[:2]) # One that has spent nothing
    train(module, optimizer, loader)
    again = {"module": (module,), "optimizer": (module._module, optimizer), "both": (module, optimizer)}[what]
    with pytest.raises(ValueError, match=r"(module|optimizer) must not have been trained by another PrivacyEngine, got one with 5 steps in that one's ledger"): made(*again)
    made(module._module) # Said to be for other people's data


BASE = data()

@pytest.mark.parametrize("dataset, times", [
    (Subset(BASE, [0]*3 + list(range(1, 40))), 3), (ConcatDataset([BASE, BASE]), 2), (Subset(BASE, [-1, 39]), 2), (ConcatDataset([Subset(BASE, range(5, 20)), Subset(BASE, range(10, 30))]), 2),
    (Subset(ConcatDataset([BASE, BASE]), [1, 41]), 2)])
def test_a_record_twice_in_the_data_set_is_refused(dataset, times):
    with pytest.raises(ValueError, match=f"data_loader must hold every record once, got one that is in its data set {times} times"): private(dataset=dataset, batch_size=1)


@pytest.mark.parametrize("dataset", [Subset(BASE, torch.arange(0, 40, 2)), ConcatDataset([BASE, data()]), ConcatDataset([Subset(BASE, range(20)), Subset(BASE, range(20, 40))]), Subset(Subset(BASE, range(10, 30)), [0, 1, 19]),
    Subset({f"k{i}": BASE[i] for i in range(40)}, ["k3", "k7", "k9"])])
def test_data_sets_of_parts_are_taken(dataset): train(*private(dataset=dataset, batch_size=1)[1:])


def rolled(records):
    x, y = default_collate(records)
    return .7*x + .3*x.roll(1, 0), y

def mixed(records):
    x, y = default_collate(records)
    share = np.random.beta(.4, .4)
    return share*x + (1 - share)*x[torch.randperm(len(x))], y

def soft(records): # As MixUp's targets
    x, y = default_collate(records)
    y = F.one_hot(y, 3).double()
    return x, .7*y + .3*y.roll(1, 0)


def now_and_then(records): return rolled(records) if torch.rand(()) < .5 else default_collate(records)

def made_with(collate, dataset=BASE):
    model = network()
    return PrivacyEngine().make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=DataLoader(dataset, batch_size=8, collate_fn=collate), noise_multiplier=1., max_grad_norm=1.)

@pytest.mark.parametrize("collate", [rolled, mixed, soft, now_and_then])
def test_a_collate_function_that_mixes_records_is_refused(collate):
    with pytest.raises(ValueError, match="collate_fn must not mix records"): made_with(collate)


def noisy(records): return default_collate([(x + torch.randn_like(x) + np.random.normal(), y) for x, y in records])
def in_order(records): return default_collate(sorted(records, key=lambda r: r[0].sum().item()))
def shuffled(records): return default_collate(random.sample(records, len(records)))
def with_sizes(records): return [*default_collate(records), torch.tensor([sum(x.sum() for x, _ in records), max(x.max() for x, _ in records) + len(records)])] # Two numbers, of the batch
def with_a_list(records): return [*default_collate(records), [x[0, :2] for x, _ in records]] # Two rows, of each record
def emptied(records):
    for r in records: r.pop("extra")
    return default_collate([(r["x"], r["y"]) for r in records])

@pytest.mark.parametrize("collate", [noisy, in_order, shuffled, emptied, with_sizes, with_a_list])
def test_a_collate_function_that_keeps_records_apart_is_taken(collate):
    class Records(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, k): return dict(x=BASE[k][0], y=BASE[k][1], extra=1)
    dataset = Records() if collate is emptied else BASE
    if collate in (with_sizes, with_a_list): return check_collate(collate, dataset) # Which have no empty batches
    module, optimizer, loader = made_with(collate, dataset)
    if collate is not emptied: train(module, optimizer, loader)


def test_two_passes_at_once_are_refused():
    "Seeded batches would be drawn twice, and counted as if they were others."
    privacy, *_, loader = private()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ValueError, match="a pass over the returned data loader must end before the next begins"): next(first)


def test_outputs_without_a_batch_in_front_are_warned_of():
    class Flat(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(4, 3)
        def forward(self, x): return self.fc(x).flatten(0, 1)
    dataset, model = TensorDataset(torch.randn(12, 5, 4), torch.arange(12)%3), Flat()
    module, optimizer, loader = PrivacyEngine().make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=DataLoader(dataset, batch_size=12), noise_multiplier=1., max_grad_norm=1.)
    for x, _ in loader:
        with pytest.warns(UserWarning, match="no output of the module has the batch in front"): module(x)


def test_a_child_with_two_names_counts_once():
    class Block(nn.Module):
        def __init__(self): super().__init__(); self.scale, self.fc = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)
        def forward(self, x): return self.fc(x*self.scale)
    class Alias(nn.Module):
        def __init__(self): super().__init__(); self.block, self.head = Block(), nn.Linear(6, 3); self.fc = self.block.fc
        def forward(self, x): return self.head(self.block(x))
    model, x, y = Alias().double(), torch.randn(8, 6, generator=seeded(), dtype=torch.float64), torch.arange(8)%3
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=Flat(max_grad_norm=1e6), expected_batch_size=8, noise_multiplier=0.)
    true = torch.autograd.grad(nn.CrossEntropyLoss()(model(x), y), list(model.parameters()))
    step(nn.CrossEntropyLoss(), x, y)
    for p, g in zip(model.parameters(), true): torch.testing.assert_close(p.grad, g)


def test_parts_in_evaluation_mode_stay_there():
    model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64).eval(), nn.Dropout(.9).eval()), nn.Linear(64, 3)).double()
    for p in model[0].parameters(): p.requires_grad_(False)
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=.1),
        data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    train(module, optimizer, loader)
    assert module.training and not model[0][1].training and not model[0][2].training and optimizer.steps_taken == 5


def test_checkpoints_belong_to_their_engine(tmp_path):
    (one, module, optimizer, loader), (two, other, others, _) = private(), private()
    train(module, optimizer, loader)
    one.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="module must be the one of the last make_private"): one.save_checkpoint(path=tmp_path/"run.pt", module=other, optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer must be the one of the last make_private"): two.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="module must be the one of the last make_private"): two.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=others)
    small, smaller, its, _ = private(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double())
    with pytest.raises(ValueError, match="checkpoint must be of this module, got"): small.load_checkpoint(path=tmp_path/"run.pt", module=smaller, optimizer=its)
    torch.save(module.state_dict(), tmp_path/"weights.pt")
    with pytest.raises(ValueError): two.load_checkpoint(path=tmp_path/"weights.pt", module=other, optimizer=others)
    assert len(small.accountant) == len(two.accountant) == 0
    two.load_checkpoint(path=tmp_path/"run.pt", module=other, optimizer=others)
    assert len(two.accountant) == 5 and torch.equal(weights(other), weights(module))


Pair = namedtuple("Pair", "x y")


class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, k): return Pair(torch.zeros(1, 8, 8), 0)


def test_batches_that_cannot_be_empty_are_refused_at_once():
    with pytest.raises(ValueError, match="data_loader must give batches that can be empty"): private(dataset=Pairs())


def test_hooks_of_the_optimizer_are_the_given_ones():
    seen, (_, module, optimizer, loader) = [], private()
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    train(module, optimizer, loader)
    optimizer.state_dict()
    assert seen == 5*["step"] + ["state"]


def test_groups_that_are_no_tensor_are_refused():
    _, module, optimizer, loader = private(clip_rule=GroupAdaptive(num_groups=3, max_grad_norm=.5), max_grad_norm=None)
    x, y = next(iter(loader))
    nn.CrossEntropyLoss()(module(x), y).backward()
    with pytest.raises(ValueError, match="groups must be a tensor of labels, got a list"): optimizer.step(groups=y.tolist())


def test_schedules_stay_as_they_were_paid_for():
    "A schedule in the place of another, or one whose value at a step depends on the others, would spend more than the target."
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Ramp(StepDecay.__mro__[-2]):
        def factor(self, index): return 1 - .7*index/max(index[-1], 1)
    target = dict(method="make_private_with_epsilon", target_epsilon=2., target_delta=1e-3, epochs=4)
    _, _, optimizer, _ = private(noise_schedule=Constant(initial=1.), **target)
    for name in ("noise_schedule", "bound_schedule"):
        with pytest.raises(ValueError, match=f"{name} must be set by an argument of make_private"): setattr(optimizer, name, Constant(initial=.5))
    with pytest.raises(ValueError, match="noise_schedule must give every epoch one value"): private(noise_schedule=Ramp(initial=1.), **target)


def test_a_pickled_module_has_nothing_of_the_batch():
    import pickle
    _, module, _, loader = private()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    written = pickle.dumps(module)
    assert x.numpy().tobytes()[:64] not in written and type(pickle.loads(written)) is type(module._module)


def test_a_checkpoint_of_other_groups_is_refused_before_anything_is_taken(tmp_path):
    def grouped(*parts):
        torch.manual_seed(0)
        model, privacy = flat_network(), PrivacyEngine(secure_mode=False)
        parameters = list(model.parameters())
        groups = [dict(params=parameters[a:b]) for a, b in parts]
        return privacy, *privacy.make_private(module=model, optimizer=torch.optim.SGD(groups, lr=.1), data_loader=DataLoader(flat_data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    n = len(list(flat_network().parameters()))
    privacy, module, optimizer, loader = grouped((0, n))
    train(module, optimizer, loader)
    privacy.save_checkpoint(path=tmp_path/"one.pt", module=module, optimizer=optimizer)
    privacy, module, optimizer, _ = grouped((0, 1), (1, n))
    before = weights(module).clone()
    with pytest.raises(ValueError, match=rf"checkpoint must be of an optimizer with parameters in groups of \[1, {n-1}\], got \[{n}\]"): privacy.load_checkpoint(path=tmp_path/"one.pt", module=module, optimizer=optimizer)
    assert len(privacy.accountant) == 0 and torch.equal(weights(module), before)


@pytest.mark.parametrize("changed, sentence", [
    (dict(module="m"), "module must be a torch Module, got a str"), (dict(optimizer=3), "optimizer must be a torch Optimizer, got a int"), (dict(data_loader=[1, 2]), "data_loader must be a torch DataLoader, got a list"),
    (dict(clip_rule="autos"), "clip_rule must be one of flat, auto_s, .*, got clip_rule=autos"), (dict(noise_generator=0), "noise_generator must be a torch.Generator or None, got noise_generator=0")])
def test_what_no_engine_can_wrap_is_said_in_a_sentence(changed, sentence):
    model = network()
    given = dict(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.) | changed
    with pytest.raises(ValueError, match=sentence): PrivacyEngine().make_private(**given)


def test_settings_are_not_set_on_the_optimizer():
    optimizer = private()[2]
    for name in ("clip_rule", "expected_batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be set by an argument of make_private"): setattr(optimizer, name, 3)
    with pytest.raises(ValueError, match="secure_mode must be True, False or None, got secure_mode='no'"): PrivacyEngine(secure_mode="no")
    with pytest.raises(TypeError, match="use opacus.utils.batch_memory_manager.BatchMemoryManager"): private(max_physical_batch_size=4)


def gathered(optimizer): return torch.cat([p.grad.flatten() for p in optimizer.recorder.slots])


def test_a_batch_that_the_loop_looked_at_and_left_comes_again():
    "Else a loop that ends its pass where a batch has no record of a kind would choose batches, and the ledger would not know."
    data = TensorDataset(torch.randn(200, 6), torch.cat([torch.ones(1), torch.zeros(199)]).long())
    for secure in (True, False):
        model, engine = nn.Linear(6, 2), PrivacyEngine(secure_mode=secure)
        module, optimizer, loader = engine.make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=DataLoader(data, batch_size=10), noise_multiplier=1., max_grad_norm=1.)
        looked_at = [x for x, _ in loader]
        firsts = [next(iter(loader))[0] for _ in range(5)]
        assert all(torch.equal(x, y) for x, (y, _) in zip(looked_at, loader, strict=True))
        assert all(torch.equal(first, firsts[0]) for first in firsts)
        for x, y in loader:
            assert optimizer.steps_taken or torch.equal(x, firsts[0])
            optimizer.zero_grad(); F.cross_entropy(module(x), y).backward(); optimizer.step()
        assert optimizer.steps_taken == 20 and not torch.equal(next(iter(loader))[0], firsts[0])


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("where", ["add_recorded", "finish"])
def test_a_paid_batch_comes_again_until_its_noise_may_be_out(where, secure):
    "Else what a record does to a step decides whether it is in one; and one batch must not have two noises."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(), secure_mode=secure)
    def fail(*args, **kwargs): raise ValueError("stopped here")
    first = None
    with pytest.raises(ValueError, match="stopped here"):
        for first, y in loader:
            F.cross_entropy(module(first), y).backward()
            setattr(optimizer.private_step, where, fail)
            optimizer.step()
    assert optimizer.steps_taken == 1
    delattr(optimizer.private_step, where)
    again = next(iter(loader))[0]
    assert (first.shape == again.shape and torch.equal(first, again)) == (where == "add_recorded")


def test_a_step_that_failed_is_not_passed_over():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    def fail(*args, **kwargs): raise ValueError("stopped here")
    with pytest.raises(ValueError, match="every batch of the returned data loader must have its optimizer.step"):
        for k, (x, y) in enumerate(loader):
            F.cross_entropy(module(x), y).backward()
            if k == 0: optimizer.private_step.add_recorded = fail
            try: optimizer.step()
            except ValueError as error:
                if "stopped here" not in str(error): raise
                del optimizer.private_step.add_recorded


def test_counts_of_a_step_that_failed_are_taken_back():
    "Else one batch would be counted as often as its step fails."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(), clip_rule=GroupAdaptive(num_groups=2, max_grad_norm=.5))
    before = optimizer.clip_rule
    for _ in range(3):
        x, y = next(iter(loader))
        F.cross_entropy(module(x), y).backward()
        rows, place = optimizer.current_pass.drawn[0]
        optimizer.current_pass.drawn[0] = rows+1, place
        with pytest.raises(ValueError, match="rows fewer than were drawn"): optimizer.step(groups=torch.arange(len(x)) % 2)
        assert optimizer.clip_rule == before


@pytest.mark.parametrize("secure", [True, False])
def test_a_batch_in_pieces_that_is_left_comes_again(secure):
    "A loop that leaves where a record is in a piece had it in 1 % of the steps instead of 18."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(), secure_mode=secure, batch_size=20) # Five records or more, but for once in ten million
    def pieces_until(many):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as batches:
            for k, (x, y) in enumerate(batches):
                if k == many: return
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                yield x
    left = torch.cat(list(pieces_until(2)))
    assert torch.equal(torch.cat(list(pieces_until(2))), left)
    assert optimizer.steps_taken == 2 # Each time it was paid for


@pytest.mark.parametrize("workers", [0, 1])
def test_pieces_of_a_pass_are_refused_after_a_look_at_another(workers):
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Linear(6, 3).double()
        _, module, optimizer, loader = (None, *PrivacyEngine(secure_mode=False).make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
            data_loader=DataLoader(flat_data(40), batch_size=8, num_workers=workers), noise_multiplier=1., max_grad_norm=1.))
        with pytest.raises(ValueError, match="must be held until its steps are done|must end before the next begins|must hold the records of its batch once"):
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
                for k, (x, y) in enumerate(batches):
                    if k == 1: next(iter(batches))
                    F.cross_entropy(module(x), y).backward()
                    optimizer.step()


def test_an_earlier_optimizer_is_refused_before_it_is_paid_for():
    model = nn.Linear(6, 3).double()
    given, privacy = torch.optim.SGD(model.parameters(), lr=.1), PrivacyEngine(secure_mode=False)
    def made(): return privacy.make_private(module=model, optimizer=given, data_loader=DataLoader(flat_data(40), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    module, optimizer, loader = made()
    made()
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match="must be the one of the last make_private, got an earlier one"): optimizer.step()
    assert len(privacy.accountant) == 0


def test_a_pass_that_was_open_when_a_run_was_resumed_is_refused(tmp_path):
    "It would draw the first batches of the run again."
    def fresh():
        torch.manual_seed(0)
        return private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    privacy, module, optimizer, loader = fresh()
    for _, (x, y) in zip(range(3), loader):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    privacy.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    privacy, module, optimizer, loader = fresh()
    opened = iter(loader)
    next(opened)
    privacy.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="must end before the next begins"): next(opened)


def test_a_run_with_numpy_s_and_python_s_randomness_goes_on_as_it_was(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, k): return torch.full((6,), np.random.rand() + random.random(), dtype=torch.float64), k % 3
    def run(stop=None):
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        privacy, module, optimizer, loader = private(dataset=Noisy(), model=nn.Linear(6, 3).double())
        if stop is None: privacy.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
        while optimizer.steps_taken < (stop or 7):
            for x, y in loader:
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                if optimizer.steps_taken == (stop or 7): break
        if stop == 3: privacy.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
        return torch.cat([p.detach().flatten() for p in module.parameters()])
    whole = run(7)
    run(3)
    random.random(), np.random.rand()
    assert torch.equal(run(), whole)


@pytest.mark.parametrize("epochs", [2, 3])
def test_epochs_of_large_batches_end_without_an_error(epochs):
    model = nn.Linear(6, 3).double()
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private_with_epsilon(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(flat_data(40), batch_size=32), target_epsilon=3., target_delta=1e-3, epochs=epochs, max_grad_norm=1.)
    next(iter(loader)) # A look is no epoch
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    assert optimizer.steps_taken == epochs*40//32
    with pytest.raises(ValueError, match="look at records through a loader of your own"): next(iter(loader))


def sorted_and_dropped(records):
    records = sorted(records, key=lambda record: -record[1])
    x = torch.stack([x for x, _ in records])
    return x*(torch.rand(x.shape) > .2), torch.tensor([y for _, y in records])


def test_a_collate_function_that_sorts_and_augments_is_taken():
    records = [(torch.randn(6, generator=torch.Generator().manual_seed(k)), k % 7) for k in range(12)]
    check_collate(sorted_and_dropped, records)


def test_a_collate_function_with_a_generator_of_its_own_is_warned_of():
    "Nobody can look whether it mixes."
    own = np.random.default_rng(3)
    def mixed(records):
        x, y = torch.utils.data.default_collate(records)
        share = own.uniform(.3, .7)
        return share*x + (1-share)*x[torch.from_numpy(own.permutation(len(x)))], y
    with pytest.warns(UserWarning, match="nobody looks whether it mixes records"): check_collate(mixed, [(torch.randn(6), k) for k in range(5)])


def test_two_passes_at_once_are_refused_where_workers_hold_all_of_one():
    model = nn.Linear(6, 3).double()
    *_, loader = PrivacyEngine().make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=DataLoader(flat_data(24), batch_size=8, num_workers=1, prefetch_factor=4), noise_multiplier=1., max_grad_norm=1.)
    one, other = iter(loader), iter(loader)
    next(one); next(other)
    with pytest.raises(ValueError, match="a pass over the returned data loader must end before the next begins"): next(one)


def test_an_empty_batch_of_a_module_that_drops_or_differentiates():
    class Odd(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(6, 1).double()
        def forward(self, x):
            z = x.clone().requires_grad_()
            slope, = torch.autograd.grad(z.square().sum(), z)
            return self.layer(slope).squeeze()
    _, module, optimizer, *_ = private(dataset=flat_data(), model=Odd())
    assert module(torch.zeros(0, 6, dtype=torch.float64)).shape == (0,)


def test_a_loop_that_waits_for_another_batch_does_not_wait_for_ever():
    _, _, _, loader = private(dataset=TensorDataset(torch.randn(200, 6)), model=nn.Linear(6, 2), batch_size=1)
    with pytest.raises(ValueError, match="an empty one too, got 1000 passes without one"):
        while True: next(iter(loader))


@pytest.mark.parametrize("word", ["Mean", "none", "batchmean", 3])
def test_what_the_loss_does_over_the_batch_is_one_of_two(word):
    with pytest.raises(ValueError, match="loss_reduction must be one of mean, sum"): private(dataset=flat_data(), model=nn.Linear(6, 3).double(), loss_reduction=word)


def test_rows_that_are_no_records_are_refused():
    "Time first: ten rows for thirty records, each of which would hold all of them."
    class Tagger(nn.Module):
        def __init__(self): super().__init__(); self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)
        def forward(self, tokens): return self.head(self.embedding(tokens)).mean(1)
    _, module, optimizer, loader = private(dataset=TensorDataset(torch.randint(20, (30, 10)), torch.zeros(30).long()), model=Tagger(), batch_size=30)
    for x, y in loader:
        loss = nn.CrossEntropyLoss()(module(x.T.contiguous()), y[:10])
        loss.backward()
        with pytest.raises(ValueError, match="got 20 rows fewer than were drawn"): optimizer.step()


class TwoHeads(nn.Module):
    "One layer norm for two heads; the second may be left out of the loss."
    def __init__(self): super().__init__(); self.f, self.n, self.a, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(8, 3)
    def forward(self, x): h = self.f(x); return self.a(self.n(h)), self.b(self.n(h.flip(1)))


def test_a_call_that_leaves_the_loss_is_clipped():
    "At a step that nobody looks at."
    torch.manual_seed(0)
    model, both = TwoHeads().double(), [True]
    with torch.no_grad(): model.a.weight *= 100
    def loss(out, y, reduction="mean"): return sum(F.cross_entropy(o, y, reduction=reduction) for o in (out if both[0] else out[:1]))
    _, module, optimizer, loader = private(dataset=flat_data(8), model=model, noise_multiplier=1e-9, max_grad_norm=1e-3)
    for k in range(6):
        both[0] = k < 5
        for x, y in loader:
            loss(module(x), y).backward()
            optimizer.step()
            assert gathered(optimizer).norm()*8 < 8.01e-3


def test_two_models_on_one_seeded_loader_have_batches_of_their_own():
    data = flat_data(200)
    loader, engine, made = DataLoader(data, batch_size=20, generator=seeded()), PrivacyEngine(secure_mode=False), []
    for _ in range(2):
        model = nn.Linear(6, 3).double()
        made.append(engine.make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=loader, noise_multiplier=1., max_grad_norm=1.)[-1])
    first, second = (next(iter(batches))[0] for batches in made)
    assert first.shape != second.shape or not torch.equal(first, second)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_fused_optimizer_steps_in_the_layout_of_its_parameters(kind):
    x, y = torch.randn(8, 3, 3, 3, 3, generator=seeded()), torch.arange(8)%3
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv3d(3, 4, 2), nn.Flatten(), nn.Linear(32, 3)).to(memory_format=torch.channels_last_3d)
        _, module, optimizer, loader = private(dataset=TensorDataset(x, y), model=model, optimizer=kind(model.parameters(), lr=.1, fused=fused), noise_multiplier=1e-9, max_grad_norm=1e3)
        for inputs, targets in loader: F.cross_entropy(module(inputs), targets).backward(); optimizer.step()
        ends.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def scaled_by_the_largest(records):
    x, y = default_collate(records)
    return x/x.abs().max(), y


def test_a_collate_function_is_asked_for_each_of_three_records():
    for seed in range(20):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(ValueError, match="collate_fn must not mix records"): check_collate(scaled_by_the_largest, TensorDataset(x, torch.zeros(3)))


def test_an_empty_batch_keeps_a_state_that_has_the_batch_behind():
    class Recurrent(nn.Module):
        def __init__(self): super().__init__(); self.rnn, self.head = DPLSTM(6, 4, batch_first=True).double(), nn.Linear(4, 3).double()
        def forward(self, x): out, (h, c) = self.rnn(x[:, None]); return self.head(out[:, -1]), h
    _, module, optimizer, _ = private(dataset=flat_data(), model=Recurrent())
    optimizer.current_pass.drawn.append((0, None))
    logits, h = module(torch.zeros(0, 6, dtype=torch.float64))
    assert logits.shape == (0, 3) and h.shape == (1, 0, 4)
    F.cross_entropy(logits, torch.zeros(0).long(), reduction="sum").backward()
    optimizer.step()


def test_what_cannot_be_followed_is_one_sentence():
    class Forces(nn.Module):
        def __init__(self): super().__init__(); self.f = nn.Linear(6, 3).double()
        def forward(self, x):
            x = x.requires_grad_()
            out = self.f(x).square()
            return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum(1, keepdim=True)
    _, module, optimizer, loader = private(dataset=flat_data(8), model=Forces(), batch_size=8)
    with pytest.raises(ValueError, match="must"):
        for x, y in loader: F.cross_entropy(module(x), y).backward(); optimizer.step()


def test_a_compiled_private_module_is_clipped_rightly():
    "Its layers run as Python, around which the compiler breaks its graphs."
    model = nn.Linear(6, 3).double()
    _, module, optimizer, loader = private(dataset=flat_data(8), model=model, batch_size=8, noise_multiplier=1e-9, max_grad_norm=.1)
    compiled, before = torch.compile(module, backend="aot_eager"), copy.deepcopy(model)
    x, y = next(iter(loader))
    F.cross_entropy(compiled(x), y).backward()
    optimizer.step()
    total, _ = ORACLES["one_by_one"](before, nn.CrossEntropyLoss(), x, y, Flat(max_grad_norm=.1).scale)
    torch.testing.assert_close(gathered(optimizer), total/8, rtol=1e-6, atol=1e-8)


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(tmp_path):
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = nn.Linear(6, 3).double()
        engine, module, optimizer, _ = private(dataset=flat_data(), model=model, optimizer=kind(model.parameters(), lr=.1))
        if kind is torch.optim.SGD: engine.save_checkpoint(path=tmp_path/"made.pt", module=module, optimizer=optimizer)
        else:
            with pytest.raises(ValueError, match="optimizer must be the checkpoint's SGD, got optimizer=Adam"): engine.load_checkpoint(path=tmp_path/"made.pt", module=module, optimizer=optimizer)


def test_a_second_make_private_that_fails_leaves_all_as_it_was():
    privacy, module, optimizer, loader = private(dataset=flat_data(), model=flat_network())
    with pytest.raises(ValueError, match="collate_fn must not mix records"):
        privacy.make_private(module=module, optimizer=optimizer, noise_multiplier=1., max_grad_norm=.5,
            data_loader=DataLoader(flat_data(), batch_size=8, collate_fn=scaled_by_the_largest))
    train(module, optimizer, loader)
    assert len(privacy.accountant)==len(loader)


def refusing(optimizer, where, error=ValueError):
    def fail(*args, **kwargs): raise error("stopped here")
    setattr(optimizer.private_step, where, fail)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["add_recorded", "finish"])
def test_a_pass_whose_step_failed_ends(where, error):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    batches = iter(loader)
    def step(): F.cross_entropy(module(batch[0]), batch[1]).backward(); optimizer.step()
    batch = next(batches)
    refusing(optimizer, where, error)
    with pytest.raises(error, match="stopped here"): step()
    delattr(optimizer.private_step, where)
    if where == "finish": batch = next(batches)
    with pytest.raises(ValueError, match="got a step after one that failed"): step()
    assert optimizer.steps_taken == 1


def test_a_batch_that_is_left_out_of_a_later_pass_is_noticed_where_workers_fetch_ahead():
    model = nn.Linear(6, 3).double()
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(flat_data(40), batch_size=8, num_workers=1), noise_multiplier=1., max_grad_norm=1.)
    def train_on(left_out):
        for k, (x, y) in enumerate(loader):
            if k == left_out: continue
            F.cross_entropy(module(x), y).backward(); optimizer.step()
    train_on(None)
    with pytest.raises(ValueError, match="must have its optimizer.step, an empty one too, got 1 without one"): train_on(1)


def test_a_batch_that_is_left_out_is_noticed_behind_a_loader_of_the_user_s():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    with pytest.raises(ValueError, match="must have its optimizer.step, an empty one too, got 1 without one"):
        for k, (x, y) in enumerate(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)):
            if k == 1: continue
            F.cross_entropy(module(x), y).backward(); optimizer.step()


def test_a_second_step_on_one_batch_is_refused():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward(); optimizer.step()
    F.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match="must have a batch of its own"): optimizer.step()
    assert optimizer.steps_taken == 1


@pytest.mark.parametrize("fails", [False, True])
def test_counts_of_a_step_whose_noise_may_be_out_stay(fails):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(), clip_rule=GroupAdaptive(num_groups=2, max_grad_norm=.5))
    before, (x, y) = optimizer.clip_rule, next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    if fails: refusing(optimizer, "finish")
    try: optimizer.step(groups=torch.arange(len(x)) % 2)
    except ValueError as error: assert fails and "stopped here" in str(error)
    after = optimizer.clip_rule
    next(iter(loader))
    assert before != after == optimizer.clip_rule


@pytest.mark.parametrize("drops", [[1], [0], [1, 0]])
def test_a_piece_has_its_step_while_its_pass_is_held(drops):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as batches:
        passes, given = {}, []
        for k in range(2): passes[k] = iter(batches); given = next(passes[k])
        for k in drops: del passes[k]
        F.cross_entropy(module(given[0]), given[1]).backward()
        if drops == [0]: return optimizer.step()
        with pytest.raises(ValueError, match="must be held until its steps are done"): optimizer.step()


def test_an_earlier_pass_in_pieces_draws_no_more():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as batches:
        earlier, later = iter(batches), iter(batches)
        next(earlier), next(later)
        with pytest.raises(ValueError, match="must end before the next begins"): list(earlier)


def test_the_length_of_a_pass_is_what_it_gives(tmp_path):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    for _, (x, y) in zip(range(2), loader): F.cross_entropy(module(x), y).backward(); optimizer.step()
    batches = iter(loader)
    next(batches)
    assert len(loader) == 1 + len(list(batches)) == 3


def test_a_checkpoint_without_numpy_s_and_python_s_randomness_is_taken():
    privacy, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    for _, (x, y) in zip(range(2), loader): F.cross_entropy(module(x), y).backward(); optimizer.step()
    state = {name: value for name, value in privacy.state_dict().items() if name not in ("python", "numpy")}
    privacy, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    privacy.load_state_dict(state)
    assert len(loader) == len(list(loader)) == 3


def test_a_run_with_another_generator_of_numpy_s_is_saved(tmp_path):
    before = np.random.get_bit_generator()
    def fresh(): return private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        privacy, module, optimizer, _ = fresh()
        privacy.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
        privacy, module, optimizer, _ = fresh()
        privacy.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    finally: np.random.set_bit_generator(before)


def padded_to_the_longest(records):
    return nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True), torch.tensor([y for _, y in records])


@pytest.mark.parametrize("collate", [default_collate, padded_to_the_longest])
def test_a_collate_function_is_taken_without_a_word(collate):
    lengths = dict(zip(range(4), [2, 3, 4, 5])) if collate is padded_to_the_longest else dict.fromkeys(range(4), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_collate(collate, [(torch.randn(n), k) for k, n in lengths.items()])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), np.random.rand, random.random])
def test_a_look_at_collate_fn_leaves_the_user_s_random_numbers_alone(draw):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self): return 5
        def __getitem__(self, k): return torch.rand(6)*np.random.rand()*random.random(), k
    def drawn(looks):
        for seeded in (torch.manual_seed, np.random.seed, random.seed): seeded(0)
        if looks: check_collate(default_collate, Noisy())
        return draw()
    assert drawn(True) == drawn(False)


def test_a_failed_step_leaves_no_gradient():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    drawn = optimizer.current_pass.drawn
    drawn[0] = 0, drawn[0][1]
    with pytest.raises(ValueError, match="rows more than were drawn"): optimizer.step()
    assert not any(p.grad is not None for p in module.parameters())


def test_passes_without_a_step_are_counted_from_the_last_step():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    optimizer.idle_passes = 999
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward(); optimizer.step()
    for _ in range(1000): optimizer.begin_pass()
    with pytest.raises(ValueError, match="got 1000 passes without one"): [optimizer.begin_pass() for _ in range(2)]
    next(iter(loader)) # Once refused, a loop may go on
