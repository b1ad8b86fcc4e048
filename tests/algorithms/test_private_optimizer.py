"Steps of a user's loop: accounted, in pieces, failed, and what each is certified for."
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import Flat, GlobalAdapt, GlobalAdaptV2, GroupAdaptive
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import gaussian_events
from dp_companion.budgets.schedules import Constant, StepDecay
from user_loops import (SCHEDULES, data, flat_data, flat_network, loop, network, private, seeded,
    train, weights)

pytestmark = pytest.mark.filterwarnings("ignore")

class Centred(nn.Module):
    "Subtracts the batch's mean."
    def forward(self, h): return h-h.mean(0)


def test_samples_that_meet_are_refused():
    _, model, optimizer, loader = private(model=nn.Sequential(network(), Centred()))
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        train(model, optimizer, loader)


def test_autocast_to_half_precision_is_refused():
    _, model, optimizer, loader = private(model=network(torch.float32))
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="autocast must "
        "compute in torch.bfloat16, got torch.float16"): model(torch.zeros(4, 1, 8, 8))


def test_groups_reach_a_rule_that_needs_them():
    privacy, model, optimizer, loader = private(
        clip_rule=GroupAdaptive(num_groups=3, max_grad_norm=.5))
    train(model, optimizer, loader, groups=lambda y: y)
    assert len(privacy.accountant) == 5 and privacy.accountant.events[
        0].query == "gradient and clipped and unclipped per group"
    with pytest.raises(ValueError, match="groups must be given to optimizer.step"): train(model,
        optimizer, loader)
    assert len(privacy.accountant) == 5  # and nothing was spent


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_the_target_pays_for_counts_or_is_refused(accountant):
    rule = GlobalAdapt(max_grad_norm=.5, count_noise=1.5)
    def asked(target): return private(PrivacyEngine(accountant=accountant),
        "make_private_with_epsilon", target_epsilon=target, target_delta=1e-4, epochs=2,
        clip_rule=rule)
    _, _, optimizer, _ = asked(12.)
    events = gaussian_events(optimizer.noise_schedule, optimizer.batches.plan)
    assert 12*.998 < certify(rule.joint_events(events), delta=1e-4, accountants=(accountant,))[
        accountant].epsilon <= 12
    # the gradient alone has less than the whole
    assert certify(events, delta=1e-4, accountants=(accountant,))[accountant].epsilon < 11
    with pytest.raises(ValueError, match="target_epsilon must be more than the .* that queries "
        "of fixed noise spend"): asked(1.)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [None, GlobalAdapt(max_grad_norm=.5, count_noise=4.)], ids=["flat",
    "counting"])
def test_a_target_is_met_and_never_passed(accountant, rule):
    privacy, model, optimizer, loader = private(PrivacyEngine(accountant=accountant),
        "make_private_with_epsilon", target_epsilon=4., target_delta=1e-4, epochs=3, clip_rule=rule,
        batch_size=7, noise_schedule=SCHEDULES[1])
    for _ in range(3): train(model, optimizer, loader)
    assert len(privacy.accountant) == 3*40//7
    assert 4*.998 < privacy.get_epsilon(1e-4) <= 4. and privacy.budget().epsilon <= 4.
    with pytest.raises(ValueError, match="training must stop after the 17 steps that "
        "target_epsilon pays for"): train(model, optimizer, loader)
    with pytest.raises(ValueError, match="must be asked of a fresh PrivacyEngine, got one that has "
        "made an optimizer already, with 17 steps"):
        private(privacy, "make_private_with_epsilon", target_epsilon=4., target_delta=1e-4,
            epochs=3)


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


def test_a_changed_buffer_is_refused_at_the_forward_pass():
    norm = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(),
        nn.Linear(64, 3)).double()
    _, model, _, loader = private(model=norm)
    with pytest.raises(ValueError, match="no buffer may change"): model(next(iter(loader))[0])


@pytest.mark.parametrize("later", [True, False])
def test_what_trains_is_decided_once(later):
    "A layer that is unfrozen later would be trained on raw gradients."
    own = flat_network()
    own[0].requires_grad_(not later)
    privacy = PrivacyEngine(secure_mode=False)
    model, optimizer, loader = privacy.make_private(module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=1.),
        data_loader=DataLoader(flat_data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    own[0].requires_grad_(later)
    x, y = next(iter(loader))
    with pytest.raises(ValueError, match="the trainable parameters must be those that the private "
        "step was built with"): model(x)
    own = flat_network()
    own[0].requires_grad_(later)
    step = PrivateStep(own, torch.optim.SGD(own.parameters(), lr=1.), clip_rule=Flat(),
        expected_batch_size=8, noise_multiplier=1.)
    own[0].requires_grad_(not later)
    with pytest.raises(ValueError, match="the trainable parameters must be those"): step(
        nn.CrossEntropyLoss(), x, y)


def test_an_old_gradient_of_a_frozen_layer_is_not_applied():
    own = flat_network()
    own[0].weight.grad, before = torch.ones_like(own[0].weight), own[0].weight.detach().clone()
    own[0].requires_grad_(False)
    step = PrivateStep(own, torch.optim.SGD(own.parameters(), lr=1.), clip_rule=Flat(),
        expected_batch_size=8, noise_multiplier=1.)
    step(nn.CrossEntropyLoss(), *flat_data()[:8])
    assert torch.equal(own[0].weight, before)


def test_a_scaler_that_goes_by_raw_gradients_is_refused():
    model, optimizer, criterion, loader = loop()
    x, y = next(iter(loader))
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(criterion(model(x), y)).backward()
        if not enabled: scaler.step(optimizer); x, y = next(iter(loader))
    with pytest.raises(ValueError, match="must be called without a GradScaler"): scaler.step(
        optimizer)


@pytest.mark.parametrize("pieces", [3, 5])
def test_batches_in_pieces_end_at_the_same_weights(pieces):
    ends = []
    for size in (None, pieces):
        _, model, optimizer, loader = private()
        if size is None: train(model, optimizer, loader)
        else:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size,
                optimizer=optimizer) as small: train(model, optimizer, small)
        ends.append(weights(model))
    assert (ends[0]-ends[1]).norm() <= 1e-12*ends[0].norm()


def test_only_the_last_forward_pass_counts():
    "With dropout, a second pass would leave the norms of another network."
    model, optimizer, criterion, loader = loop()
    x, y = flat_data()[:8]
    loss = criterion(model(x), y)
    model(x)
    with pytest.raises(ValueError, match="must go once through the last forward pass"):
        loss.backward()


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
        return privacy.make_private_with_epsilon(module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=.1),
            data_loader=DataLoader(flat_data(), batch_size=8), target_epsilon=target,
            target_delta=1e-5, epochs=1, max_grad_norm=1.)
    privacy = PrivacyEngine(accountant="rdp", secure_mode=False)
    made = promised(privacy)
    with pytest.raises(ValueError, match="target_epsilon must be asked of a fresh PrivacyEngine, "
        "got one that has made an optimizer already"): promised(privacy, 1.)
    train(*made)
    with pytest.raises(ValueError, match="training must stop after the 5 steps that target_epsilon "
        "pays for"): train(*made)
    with pytest.raises(ValueError, match="make_private must be asked of a fresh PrivacyEngine"):
        private(privacy, dataset=flat_data(), model=flat_network(), noise_multiplier=1.)
    other, *_ = private(dataset=flat_data(), model=flat_network(), noise_multiplier=.5)
    with pytest.raises(ValueError, match="target_epsilon must be asked of a fresh PrivacyEngine"):
        promised(other)


def test_a_sum_is_divided_by_the_batch_size_too():
    def moved(reduction):
        own = nn.Linear(6, 3).double()
        nn.init.zeros_(own.weight), nn.init.zeros_(own.bias)
        model, optimizer, loader = PrivacyEngine().make_private(module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=1.),
            data_loader=DataLoader(flat_data(), batch_size=40), noise_multiplier=1e-9,
            max_grad_norm=10., loss_reduction=reduction)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
        return own.weight.detach()
    torch.testing.assert_close(moved("sum"), moved("mean"), rtol=1e-6, atol=1e-7)


def test_the_schedule_that_a_refusal_names_is_taken():
    with pytest.raises(ValueError, match="bound_schedule must be a Schedule") as error: private(
        bound_schedule=2.)
    named = str(error.value).split("such as ")[1].split(", got")[0]
    private(bound_schedule=eval(named), max_grad_norm=None)


@pytest.mark.parametrize("rule, name", [(GlobalAdaptV2(), "strict_max_grad_norm"), (Flat(),
    "max_grad_norm")])
def test_a_bound_can_fall_by_the_step(rule, name):
    schedule = StepDecay(initial=3., decay_rate=.5, drop_every=2, unit="step", decay_of="value")
    _, model, optimizer, loader = private(clip_rule=rule, max_grad_norm=None,
        bound_schedule=schedule)
    steps = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        steps.append((getattr(optimizer.clip_rule, name), optimizer.private_step.sensitivity,
            optimizer.clip_rule.sensitivity))
    assert [bound for bound, *_ in steps] == [3*.5**(t//2) for t in range(len(steps))] and len(
        steps) > 3
    assert all(used == of_rule for _, used, of_rule in steps)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_whenever_they_come(kind):
    def hooked(model): getattr(next(model.parameters()), kind)(lambda g: None)
    model = network(); hooked(model)
    with pytest.raises(ValueError, match="the hook on the parameter at .* changes a gradient"):
        private(
        model=model)
    _, module, optimizer, loader = private(model=(model := network()))
    loss, hook_at = nn.CrossEntropyLoss(), 3 # A pass that is not looked at
    with pytest.raises(ValueError, match="the hook on the parameter at .* changes a gradient"):
        for k, (x, y) in enumerate(loader):
            if k == hook_at: hooked(model)
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
    assert k == hook_at


def test_the_optimizer_that_was_given_does_not_step():
    model = network()
    given = torch.optim.SGD(model.parameters(), lr=.1)
    def made(by): return by.make_private(module=model, optimizer=given,
        data_loader=DataLoader(data(), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    first = PrivacyEngine(secure_mode=False)
    module, optimizer, loader = made(first)
    with pytest.raises(ValueError, match="optimizer.step must be called on the optimizer that "
        "make_private returned"): given.step()
    train(module, optimizer, loader)
    with pytest.raises(ValueError, match="optimizer must not have been trained by another "
        "PrivacyEngine, got one with 5 steps"): made(PrivacyEngine())
    # The model is not changed: the same engine may be given both again
    module, optimizer, loader = made(first)
    train(module, optimizer, loader)
    assert len(first.accountant) == 10
    assert optimizer.steps_taken == 5


@pytest.mark.slow
@pytest.mark.parametrize("what", ["module", "optimizer", "both"])
def test_what_another_engine_has_trained_is_refused(what):
    "A cell that is run again would report its own steps alone, for one target."
    target = dict(target_epsilon=1., target_delta=1e-5, epochs=1, max_grad_norm=1.,
        data_loader=DataLoader(data(), batch_size=8))
    def made(module, optimizer=None): return PrivacyEngine(
        accountant="rdp", secure_mode=False).make_private_with_epsilon(module=module,
        optimizer=optimizer or torch.optim.SGD(module.parameters(), lr=.1), **target)
    module, optimizer, loader = made(*made(network())[:2]) # One that has spent nothing
    train(module, optimizer, loader)
    again = {"module": (module,), "optimizer": (module._module, optimizer), "both": (module,
        optimizer)}[what]
    with pytest.raises(ValueError, match=r"(module|optimizer) must not have been trained by "
        r"another PrivacyEngine, got one with 5 steps in that one's ledger"): made(*again)
    made(module._module) # Said to be for other people's data


def test_hooks_of_the_optimizer_are_the_given_ones():
    seen, (_, module, optimizer, loader) = [], private()
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    train(module, optimizer, loader)
    optimizer.state_dict()
    assert seen == 5*["step"] + ["state"]


def test_groups_that_are_no_tensor_are_refused():
    _, module, optimizer, loader = private(clip_rule=GroupAdaptive(num_groups=3, max_grad_norm=.5),
        max_grad_norm=None)
    x, y = next(iter(loader))
    nn.CrossEntropyLoss()(module(x), y).backward()
    with pytest.raises(ValueError, match="groups must be a tensor of labels, got a list"):
        optimizer.step(groups=y.tolist())


@pytest.mark.slow
def test_schedules_stay_as_they_were_paid_for():
    "A schedule whose value at a step depends on the others would spend more."
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Ramp(StepDecay.__mro__[-2]):
        def factor(self, index): return 1 - .7*index/max(index[-1], 1)
    target = dict(method="make_private_with_epsilon", target_epsilon=2., target_delta=1e-3,
        epochs=4)
    _, _, optimizer, _ = private(noise_schedule=Constant(initial=1.), **target)
    for name in ("noise_schedule", "bound_schedule"):
        with pytest.raises(ValueError, match=f"{name} must be set by an argument of make_private"):
            setattr(optimizer, name, Constant(initial=.5))
    with pytest.raises(ValueError, match="a schedule must give every epoch one value"): private(
        noise_schedule=Ramp(initial=1.), **target)


def test_settings_are_not_set_on_the_optimizer():
    optimizer = private()[2]
    for name in ("clip_rule", "expected_batch_size"):
        with pytest.raises(ValueError, match=f"{name} must be set by an argument of make_private"):
            setattr(optimizer, name, 3)
    with pytest.raises(ValueError, match="secure_mode must be True, False or None, got "
        "secure_mode='no'"): PrivacyEngine(secure_mode="no")
    with pytest.raises(TypeError, match="use opacus.utils.batch_memory_manager.BatchMemoryManager"):
        private(max_physical_batch_size=4)


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("where", ["add_recorded", "finish"])
def test_a_batch_comes_again_until_its_noise_may_be_out(where, secure):
    "Else a record would decide whether it is in a step; one batch has one noise."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(),
        secure_mode=secure)
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
    with pytest.raises(ValueError, match="every batch of the returned data loader must have its "
        "optimizer.step"):
        for k, (x, y) in enumerate(loader):
            F.cross_entropy(module(x), y).backward()
            if k == 0: optimizer.private_step.add_recorded = fail
            try: optimizer.step()
            except ValueError as error:
                if "stopped here" not in str(error): raise
                del optimizer.private_step.add_recorded


def test_counts_of_a_step_that_failed_are_taken_back():
    "Else one batch would be counted as often as its step fails."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(),
        clip_rule=GroupAdaptive(num_groups=2, max_grad_norm=.5))
    before = optimizer.clip_rule
    for _ in range(3):
        x, y = next(iter(loader))
        F.cross_entropy(module(x), y).backward()
        rows, place = optimizer.batches.current_pass.drawn[0]
        optimizer.batches.current_pass.drawn[0] = rows+1, place
        with pytest.raises(ValueError, match="rows fewer than were drawn"): optimizer.step(
            groups=torch.arange(len(x)) % 2)
        assert optimizer.clip_rule == before


@pytest.mark.parametrize("secure", [True, False])
def test_a_batch_in_pieces_that_is_left_comes_again(secure):
    "A loop that leaves where a record is in a piece had it in 1 % of the steps instead of 18."
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(),
        secure_mode=secure, batch_size=20) # Five records or more, but for once in ten million
    def pieces_until(many):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2,
            optimizer=optimizer) as batches:
            for k, (x, y) in enumerate(batches):
                if k == many: return
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                yield x
    left = torch.cat(list(pieces_until(2)))
    assert torch.equal(torch.cat(list(pieces_until(2))), left)
    assert optimizer.steps_taken == 2 # Each time it was paid for


def test_an_earlier_optimizer_is_refused_before_it_is_paid_for():
    model = nn.Linear(6, 3).double()
    given, privacy = torch.optim.SGD(model.parameters(), lr=.1), PrivacyEngine(secure_mode=False)
    def made(): return privacy.make_private(module=model, optimizer=given,
        data_loader=DataLoader(flat_data(40), batch_size=8), noise_multiplier=1., max_grad_norm=1.)
    module, optimizer, loader = made()
    made()
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match="must be the one of the last make_private, got an earlier "
        "one"): optimizer.step()
    assert len(privacy.accountant) == 0


def test_rows_that_are_no_records_are_refused():
    "Time first: ten rows for thirty records, each of which would hold all of them."
    class Tagger(nn.Module):
        def __init__(self): super().__init__(); self.embedding, self.head = nn.Embedding(20,
            4), nn.Linear(4, 3)
        def forward(self, tokens): return self.head(self.embedding(tokens)).mean(1)
    _, module, optimizer, loader = private(
        dataset=TensorDataset(torch.randint(20, (30, 10)), torch.zeros(30).long()), model=Tagger(),
        batch_size=30)
    for x, y in loader:
        loss = nn.CrossEntropyLoss()(module(x.T.contiguous()), y[:10])
        loss.backward()
        with pytest.raises(ValueError, match="got 20 rows fewer than were drawn"): optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_fused_optimizer_steps_in_the_layout_of_its_parameters(kind):
    x, y = torch.randn(8, 3, 3, 3, 3, generator=seeded()), torch.arange(8)%3
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv3d(3, 4, 2), nn.Flatten(), nn.Linear(32, 3)).to(
            memory_format=torch.channels_last_3d)
        _, module, optimizer, loader = private(dataset=TensorDataset(x, y), model=model,
            optimizer=kind(model.parameters(), lr=.1, fused=fused), noise_multiplier=1e-9,
            max_grad_norm=1e3)
        for inputs, targets in loader: F.cross_entropy(module(inputs),
            targets).backward(); optimizer.step()
        ends.append(model[0].weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


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


def test_a_second_step_on_one_batch_is_refused():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward(); optimizer.step()
    F.cross_entropy(module(x), y).backward()
    with pytest.raises(ValueError, match="must have a batch of its own"): optimizer.step()
    assert optimizer.steps_taken == 1


@pytest.mark.parametrize("fails", [False, True])
def test_counts_of_a_step_whose_noise_may_be_out_stay(fails):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double(),
        clip_rule=GroupAdaptive(num_groups=2, max_grad_norm=.5))
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
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2,
        optimizer=optimizer) as batches:
        passes, given = {}, []
        for k in range(2): passes[k] = iter(batches); given = next(passes[k])
        for k in drops: del passes[k]
        F.cross_entropy(module(given[0]), given[1]).backward()
        if drops == [0]: return optimizer.step()
        with pytest.raises(ValueError, match="must be held until its steps are done"):
            optimizer.step()


def test_a_failed_step_leaves_no_gradient():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    drawn = optimizer.batches.current_pass.drawn
    drawn[0] = 0, drawn[0][1]
    with pytest.raises(ValueError, match="rows more than were drawn"): optimizer.step()
    assert not any(p.grad is not None for p in module.parameters())
