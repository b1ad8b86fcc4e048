"An Opacus training loop with three changed lines, and what the engine reports of it."
import copy
import dataclasses
import difflib
import json
import math
import subprocess
import sys
import types
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import AutoS, Flat, GlobalAdapt, GlobalAdaptV2
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import gaussian_events, per_step_multipliers
from dp_companion.budgets.schedules import PoissonPlan, StepDecay
from oracles.opacus_engines import ORACLES
from user_loops import (SCHEDULES, data, flat_data, flat_network, loop, network, private, run,
    scaled_by_the_largest, seeded, train, weights)

pytestmark = pytest.mark.filterwarnings("ignore")

# The loop of Opacus's MNIST tutorial (examples/mnist.py): its network, its calls in its order, and
# its several runs over one name of the loader. The data are smaller; there is no command line.
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
        found = [train(model, "cpu", train_loader, optimizer, privacy_engine, epoch)
                 for epoch in range(epochs)]
        test(model, "cpu", test_loader)
    return privacy_engine.get_epsilon(1e-5), found, model, optimizer
'''


CHANGED = TUTORIAL
for theirs, ours in {
    "from opacus import PrivacyEngine": "from dp_companion import PrivacyEngine",
    "max_grad_norm=1.0,\n": "max_grad_norm=1.0, clip_rule=\"auto_s\",\n",
    "return privacy_engine.get_epsilon(1e-5), found": "return privacy_engine.budget(1e-5), found",
}.items(): CHANGED = CHANGED.replace(theirs, ours)


@pytest.mark.slow
def test_the_tutorial_runs_unchanged_but_for_three_lines():
    lines = [line for line in difflib.unified_diff(TUTORIAL.splitlines(), CHANGED.splitlines(), n=0)
        if line[0] == "+" and line[:3] != "+++"]
    assert len(lines) == 3
    report, found, model, optimizer = run(CHANGED)
    assert len(found) == 2 and found[1][1] > found[0][1] > 0 and all(math.isfinite(loss) for loss,
        _ in found)
    assert [(e.noise_multiplier, e.sample_rate, e.steps) for e in report.events] == [(1., .2, 10)]
    assert report.certified == certify(report.events,
        delta=1e-5) and report.epsilon == pytest.approx(found[1][1], abs=1e-12)
    assert json.loads(json.dumps(report.to_dict()))["neighbouring_relation"] == "add_or_remove_one"
    assert optimizer.clip_rule == AutoS(max_grad_norm=1.)
    plain = {}
    exec(TUTORIAL, plain)
    # the weights are an ordinary model's
    plain["SampleConvNet"]().load_state_dict(model.state_dict())


def test_one_changed_line_is_enough():
    epsilon, found, _, optimizer = run(CHANGED.replace(', clip_rule="auto_s"', "").replace(
        "budget(1e-5)", "get_epsilon(1e-5)"))
    theirs, *_ = run(TUTORIAL)
    assert optimizer.clip_rule == Flat(max_grad_norm=1.) and epsilon == found[-1][1]
    assert epsilon == pytest.approx(theirs, rel=.02)  # PRV and PLD, the same rate and steps


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Flat(max_grad_norm=.5), AutoS(max_grad_norm=.5),
    GlobalAdaptV2(max_grad_norm=.5), GlobalAdapt(max_grad_norm=.5)], ids=lambda r: r.name)
def test_every_step_of_a_loop_is_that_of_the_oracles(rule):
    _, model, optimizer, loader = private(clip_rule=rule, noise_multiplier=1e-9)
    for x, y in (batch for _ in range(2) for batch in loader):
        now, before = optimizer.clip_rule, copy.deepcopy(model)
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        for oracle in ORACLES.values() if len(x) else ():
            total, _ = oracle(copy.deepcopy(before), nn.CrossEntropyLoss(), x, y, now.scale)
            torch.testing.assert_close(gathered(optimizer), total/optimizer.expected_batch_size,
                rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}-{s.unit}")
@pytest.mark.parametrize("batch_size", [8, *(pytest.param(b, marks=pytest.mark.slow)
                                           for b in (7, 13))])
def test_the_budget_is_that_of_the_applied_steps(schedule, batch_size):
    epochs, rule, applied = 3, GlobalAdapt(max_grad_norm=.5, count_noise=4.), []
    privacy, model, optimizer, loader = private(noise_schedule=schedule, clip_rule=rule,
        batch_size=batch_size)
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
        if len(x) == 0: assert optimizer.report.nonprivate_batch_size == 0 and .5 < moved.std()/(
            .1*.5) < 2
    assert empty > 5 and len(privacy.accountant) == 40


def test_evaluation_is_the_plain_module():
    _, model, optimizer, loader = private()
    x = data().tensors[0]
    model.eval()
    assert torch.equal(model(x), model._module(x)) and optimizer.recorder.batch_size is None
    model.train()
    with torch.no_grad(): model(x)
    assert optimizer.recorder.batch_size is None


BAD = {"poisson_sampling must be True, got poisson_sampling=False: the accountant certifies "
    "Poisson batches": dict(poisson_sampling=False),
    "noise_multiplier must be finite and > 0": dict(noise_multiplier=math.nan),
    "max_grad_norm must be": dict(max_grad_norm=[1., 1.]),
    "batch_first must be True": dict(batch_first=False),
    "leave out grad_sample_mode and criterion, and call "
    "loss.backward() on the ordinary loss": dict(criterion=nn.CrossEntropyLoss()),
    "grad_sample_mode must be hooks, got grad_sample_mode=ghost": dict(grad_sample_mode="ghost"),
    "loss_reduction must be one of": dict(loss_reduction="median"), "clip_rule must be a ClipRule "
    "or the name of one": dict(clip_rule=3),
    "max_grad_norm must be left out or equal clip_rule's 2":
        dict(clip_rule=AutoS(max_grad_norm=2.)),
    "must be a whole number": dict(expected_batch_size=2.5),}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_sentence(message):
    with pytest.raises(ValueError) as error: private(**BAD[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_bad_input():
    with pytest.raises(ValueError, match="mixes the samples of a batch"): private(
        model=nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)).double())
    with pytest.raises(TypeError, match="no argument 'noise'"): private(noise=1.)
    model = network()
    with pytest.raises(ValueError, match="optimizer must hold the trainable parameters of module "
        "and no others, got 6 that it misses"):
        PrivacyEngine().make_private(module=model,
            optimizer=torch.optim.SGD(model[-1].parameters(), lr=.1),
            data_loader=DataLoader(data(), batch_size=4), noise_multiplier=1.)
    with pytest.raises(ValueError, match="delta must be given"): PrivacyEngine().budget()
    with pytest.raises(ValueError, match="accountant must be one of pld, rdp"): PrivacyEngine(
        accountant="gdp")


class Rows(nn.Module):
    "A layer that sees every position as a sample of its own."
    def __init__(self): super().__init__(); self.layer = nn.Linear(6, 3).double()
    def forward(self, x): return self.layer(x.reshape(-1, 6)).reshape(len(x), -1, 3).sum(1)


@pytest.mark.parametrize("samples", [1, 4])
def test_rows_of_a_sample_are_clipped_together(samples):
    model, rule = Rows(), Flat(max_grad_norm=.01)
    before, loss = copy.deepcopy(model), nn.CrossEntropyLoss()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=1.), clip_rule=rule,
                       expected_batch_size=1, noise_multiplier=0.)
    x, y = torch.randn(samples, 50, 6, dtype=torch.float64), torch.zeros(samples, dtype=torch.long)
    step(loss, x, y)
    total, _ = ORACLES["one_by_one"](before, loss, x, y, rule.scale)
    moved = [(p - q).flatten() for p, q in zip(before.parameters(), model.parameters())]
    torch.testing.assert_close(torch.cat(moved), total, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_batch_that_a_loop_leaves_out_is_noticed(pieces):
    model, optimizer, criterion, loader = loop()
    def train_on(batches):
        for k, (x, y) in enumerate(batches):
            if k == 1: continue
            optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()
    with pytest.raises(ValueError, match="every batch of the returned data loader must have its "
        "optimizer.step"):
        if not pieces: return train_on(loader)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3,
            optimizer=optimizer) as small: train_on(small)


class Several(nn.Module):
    "A module whose output is more than a tensor."
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3).double(), kind
    def forward(self, x): return self.kind(self.layer(x))


Named = namedtuple("Named", "logits, note")


@pytest.mark.parametrize("kind", [lambda x: (x, None), lambda x: Named(x, "said"),
    lambda x: [x, torch.tensor(1.)]])
def test_an_empty_batch_takes_any_output(kind):
    _, model, optimizer, _ = private(dataset=flat_data(), model=Several(kind))
    optimizer.batches.current_pass.drawn.append((0, None))
    logits = model(torch.zeros(0, 6, dtype=torch.float64))[0]
    assert logits.shape == (0, 3)
    nn.CrossEntropyLoss(reduction="sum")(logits, torch.zeros(0, dtype=torch.long)).backward()
    optimizer.step()
    assert optimizer.steps_taken == 1


def test_an_average_of_weights_is_the_plain_module():
    from torch.optim.swa_utils import AveragedModel
    model, optimizer, criterion, loader = loop()
    average = AveragedModel(model)
    for x, y in loader:
        optimizer.zero_grad(); criterion(model(x), y).backward(); optimizer.step()
        average.update_parameters(model)
    with torch.no_grad(): assert average.eval()(flat_data()[:5][0]).shape == (5, 3)
    assert set(average.module.state_dict()) == set(model.state_dict()) and not isinstance(
        average.module, type(model))
    again = AveragedModel(flat_network())
    again.load_state_dict(average.state_dict())


def test_words_that_say_one_thing_agree():
    with pytest.raises(ValueError, match="max_grad_norm must be left out or equal bound_schedule's "
        "initial 3.0"):
        private(max_grad_norm=1.,
            bound_schedule=StepDecay(initial=3., decay_rate=.5, drop_every=2, decay_of="value"))
    own = flat_network()
    module, *_ = PrivacyEngine().make_private(module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=DataLoader(flat_data(),
        batch_size=8), noise_multiplier=1., loss_reduction="sum")
    assert module.loss_reduction == "sum"


def test_what_the_engine_does_not_do_it_refuses():
    made = dict(dataset=flat_data(), model=flat_network(), noise_multiplier=1.)
    with pytest.raises(ValueError, match="epochs must be given exactly with a target"):
        private(epochs=3, **made)
    with pytest.raises(ValueError, match="target_delta must be in \\(0, 1\\), got target_delta=0"):
        private(PrivacyEngine(), "make_private_with_epsilon", target_epsilon=1., target_delta=0,
            epochs=1)
    with pytest.raises(TypeError, match="make_private has no argument 'engine'"): private(engine=
        "book", **made)
    chosen = DataLoader(flat_data(), batch_size=8,
        sampler=torch.utils.data.SubsetRandomSampler(range(30)))
    with pytest.raises(ValueError, match="data_loader must not choose its samples"):
        PrivacyEngine().make_private(module=made["model"], data_loader=chosen, noise_multiplier=1.,
            optimizer=torch.optim.SGD(made["model"].parameters(), lr=.1), max_grad_norm=1.)


@pytest.mark.slow
def test_secure_by_default_and_seeded_on_request():
    def end(**options):
        privacy, model, optimizer, loader = private(**options)
        train(model, optimizer, loader)
        return privacy.noise_source, weights(model)
    assert end(privacy=PrivacyEngine())[0] == "secure" and end(privacy=PrivacyEngine(),
        noise_generator=seeded())[0] == "seeded"
    kernels = {"0": "matrices"}
    assert torch.equal(end(kernels=kernels)[1], end(kernels=kernels)[1]) # torch.manual_seed decides
    assert not torch.equal(end(secure_mode=None)[1], end(secure_mode=None)[1])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Answer(dict): pass


class Wrapped(nn.Module):
    "A network with one of several kinds of output, of which samples meet where asked."
    def __init__(self, wrap,
        meets): super().__init__(); self.inside, self.wrap, self.meets = network(), wrap, meets
    def forward(self, x):
        h = self.inside(x)
        return self.wrap(h/h.detach().std() if self.meets else h)


OUTPUTS = {"dict": lambda h: {"logits": h}, "data class": Output,
    "dict of its own": lambda h: Answer(logits=h),
    "object": lambda h: types.SimpleNamespace(logits=h)}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_samples_that_meet_are_seen_behind_every_output(kind):
    _, module, optimizer, loader = private(model=Wrapped(OUTPUTS[kind], meets=True))
    with pytest.raises(ValueError, match="samples must not meet"): module(next(iter(loader))[0])


@pytest.mark.parametrize("kind", ["dict", "data class", "dict of its own"])
def test_an_empty_batch_has_every_output(kind):
    _, module, optimizer, loader = private(model=Wrapped(OUTPUTS[kind], meets=False))
    output = module(torch.zeros(0, 1, 8, 8, dtype=torch.float64))
    assert type(output) is type(OUTPUTS[kind](0)) and (output["logits"] if isinstance(output, dict)
        else output.logits).shape == (0, 3)


def test_outputs_without_a_batch_in_front_are_warned_of():
    class Flat(nn.Module):
        def __init__(self): super().__init__(); self.fc = nn.Linear(4, 3)
        def forward(self, x): return self.fc(x).flatten(0, 1)
    dataset, model = TensorDataset(torch.randn(12, 5, 4), torch.arange(12)%3), Flat()
    module, optimizer, loader = PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(dataset, batch_size=12), noise_multiplier=1., max_grad_norm=1.)
    for x, _ in loader:
        with pytest.warns(UserWarning, match="no output of the module has the batch in front"):
            module(x)


def test_a_child_with_two_names_counts_once():
    class Block(nn.Module):
        def __init__(self): super().__init__(); self.scale, self.fc = nn.Parameter(
            torch.ones(6)), nn.Linear(6, 6)
        def forward(self, x): return self.fc(x*self.scale)
    class Alias(nn.Module):
        def __init__(self): super().__init__(); self.block, self.head = Block(), nn.Linear(6,
            3); self.fc = self.block.fc
        def forward(self, x): return self.head(self.block(x))
    model, x, y = Alias().double(), torch.randn(8, 6, generator=seeded(),
        dtype=torch.float64), torch.arange(8)%3
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.),
        clip_rule=Flat(max_grad_norm=1e6), expected_batch_size=8, noise_multiplier=0.)
    true = torch.autograd.grad(nn.CrossEntropyLoss()(model(x), y), list(model.parameters()))
    step(nn.CrossEntropyLoss(), x, y)
    for p, g in zip(model.parameters(), true): torch.testing.assert_close(p.grad, g)


def test_parts_in_evaluation_mode_stay_there():
    model = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64).eval(), nn.Dropout(.9).eval()),
        nn.Linear(64, 3)).double()
    for p in model[0].parameters(): p.requires_grad_(False)
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model[1].parameters(), lr=.1),
        data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    train(module, optimizer, loader)
    assert module.training and not model[0][1].training and not model[0][
        2].training and optimizer.steps_taken == 5


def test_a_pickled_module_has_nothing_of_the_batch():
    import pickle
    _, module, _, loader = private()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y).backward()
    written = pickle.dumps(module)
    assert x.numpy().tobytes()[:64] not in written and type(pickle.loads(written)) is type(
        module._module)


@pytest.mark.parametrize("changed, sentence", [(dict(module="m"), "module must be a torch Module, "
    "got a str"), (dict(optimizer=3), "optimizer must be a torch Optimizer, got a int"),
    (dict(data_loader=[1, 2]), "data_loader must be a torch DataLoader, got a list"),
    (dict(clip_rule="autos"), "clip_rule must be one of flat, auto_s, .*, got clip_rule=autos"),
    (dict(noise_generator=0), "noise_generator must be a torch.Generator or None, got "
    "noise_generator=0")])
def test_what_no_engine_can_wrap_is_said_in_a_sentence(changed, sentence):
    model = network()
    given = dict(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1.,
        max_grad_norm=1.) | changed
    with pytest.raises(ValueError, match=sentence): PrivacyEngine().make_private(**given)


def gathered(optimizer): return torch.cat([p.grad.flatten() for p in optimizer.recorder.slots])


def test_an_empty_batch_of_a_module_that_drops_or_differentiates():
    class Odd(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(6, 1).double()
        def forward(self, x):
            z = x.clone().requires_grad_()
            slope, = torch.autograd.grad(z.square().sum(), z)
            return self.layer(slope).squeeze()
    _, module, optimizer, *_ = private(dataset=flat_data(), model=Odd())
    assert module(torch.zeros(0, 6, dtype=torch.float64)).shape == (0,)


@pytest.mark.parametrize("word", ["Mean", "none", "batchmean", 3])
def test_loss_reduction_is_mean_or_sum(word):
    with pytest.raises(ValueError, match="loss_reduction must be one of mean, sum"): private(
        dataset=flat_data(), model=nn.Linear(6, 3).double(), loss_reduction=word)


class TwoHeads(nn.Module):
    "One layer norm for two heads; the second may be left out of the loss."
    def __init__(self): super().__init__(); self.f, self.n, self.a, self.b = nn.Linear(6,
        8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(8, 3)
    def forward(self, x): h = self.f(x); return self.a(self.n(h)), self.b(self.n(h.flip(1)))


def test_a_call_that_leaves_the_loss_is_clipped():
    "At a step that nobody looks at."
    torch.manual_seed(0)
    model, both = TwoHeads().double(), [True]
    with torch.no_grad(): model.a.weight *= 100
    def loss(out, y, reduction="mean"): return sum(F.cross_entropy(o, y, reduction=reduction)
        for o in (out if both[0] else out[:1]))
    _, module, optimizer, loader = private(dataset=flat_data(8), model=model, noise_multiplier=1e-9,
        max_grad_norm=1e-3)
    for k in range(6):
        both[0] = k < 5
        for x, y in loader:
            loss(module(x), y).backward()
            optimizer.step()
            assert gathered(optimizer).norm()*8 < 8.01e-3


def test_an_empty_batch_keeps_a_recurrent_state():
    class Recurrent(nn.Module):
        def __init__(self): super().__init__(); self.rnn, self.head = DPLSTM(6, 4,
            batch_first=True).double(), nn.Linear(4, 3).double()
        def forward(self, x): out, (h, c) = self.rnn(x[:, None]); return self.head(out[:, -1]), h
    _, module, optimizer, _ = private(dataset=flat_data(), model=Recurrent())
    optimizer.batches.current_pass.drawn.append((0, None))
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
            return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum(1,
                keepdim=True)
    _, module, optimizer, loader = private(dataset=flat_data(8), model=Forces(), batch_size=8)
    with pytest.raises(ValueError, match="must"):
        for x, y in loader: F.cross_entropy(module(x), y).backward(); optimizer.step()


def test_a_compiled_private_module_is_clipped_rightly():
    "Its layers run as Python, around which the compiler breaks its graphs."
    model = nn.Linear(6, 3).double()
    _, module, optimizer, loader = private(dataset=flat_data(8), model=model, batch_size=8,
        noise_multiplier=1e-9, max_grad_norm=.1)
    compiled, before = torch.compile(module, backend="aot_eager"), copy.deepcopy(model)
    x, y = next(iter(loader))
    F.cross_entropy(compiled(x), y).backward()
    optimizer.step()
    scale = Flat(max_grad_norm=.1).scale
    total, _ = ORACLES["one_by_one"](before, nn.CrossEntropyLoss(), x, y, scale)
    torch.testing.assert_close(gathered(optimizer), total/8, rtol=1e-6, atol=1e-8)


def test_a_second_make_private_that_fails_changes_nothing():
    privacy, module, optimizer, loader = private(dataset=flat_data(), model=flat_network())
    with pytest.raises(ValueError, match="collate_fn must not mix records"):
        privacy.make_private(module=module, optimizer=optimizer, noise_multiplier=1.,
            max_grad_norm=.5,
            data_loader=DataLoader(flat_data(), batch_size=8, collate_fn=scaled_by_the_largest))
    train(module, optimizer, loader)
    assert len(privacy.accountant)==len(loader)


SLOW = {"pandas", "matplotlib", "seaborn", "dp_accounting", "nbdev", "IPython", "papermill"}


@pytest.mark.slow
def test_the_engine_imports_no_slow_packages():
    code = """
import sys, torch, opacus
before = set(sys.modules)
from dp_companion import PrivacyEngine
print(*{name.split(".")[0] for name in {*sys.modules} - before})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "dp_companion" in run.stdout.split() and not SLOW & {*run.stdout.split()}
