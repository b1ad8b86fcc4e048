"The private step: noise, rules, failures, several processes."
import copy
import math
from dataclasses import asdict
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from dp_companion.algorithms import per_sample_norms
from dp_companion.algorithms.clipping import (
    AutoS, ClipRule, Flat, GlobalAdapt, GroupAdaptive
)
from dp_companion.algorithms.gradient_recorder import per_sample_losses
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.private_step import PrivateStep
from networks import batch, digits_cnn, mnist_cnn
from steps import LOSS, difference, gradient, network, seeded, step_for
from oracles.opacus_engines import one_by_one


def test_noise_has_the_scheduled_scale_step_by_step():
    "With the exact scaled sum known, what is left is noise at that step's scale and no other."
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    rule = AutoS(max_grad_norm=.7)
    exact = step_for(network(digits_cnn, torch.float64), clip_rule=rule)
    step = step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(4))
    for sigma in (3., 1.5, .75):
        exact.model.load_state_dict(step.model.state_dict())
        exact(LOSS, x, y)
        report = step(LOSS, x, y, noise_multiplier=sigma)
        noise = (gradient(step)-gradient(exact)).numpy()
        scale = sigma*.7/8
        assert report.noise_multiplier == sigma and math.isclose(report.noise_std, scale)
        assert stats.kstest(noise, "norm", args=(0, scale)).pvalue > 1e-3
        for wrong in (2/3, 3/2):
            assert stats.kstest(noise, "norm", args=(0, wrong*scale)).pvalue < 1e-9


def test_secure_noise_is_gaussian_and_independent_between_draws():
    source = GaussianNoise(secure=True)
    first, second = (source.fill_(torch.empty(300_001), 2.).numpy() for _ in range(2))
    for z in (first, second):
        assert stats.kstest(z, "norm", args=(0, 2)).pvalue > 1e-4
        for wrong in (2/3, 3/2): assert stats.kstest(z, "norm", args=(0, 2*wrong)).pvalue < 1e-12
        np.testing.assert_allclose(stats.kurtosis(z.astype(float)), 0, atol=.05)
    assert abs(np.corrcoef(first, second)[0, 1]) < 5/math.sqrt(len(first))
    half = len(first)//2
    assert abs(np.corrcoef(np.abs(first[:half]), np.abs(first[half:2*half]))[0, 1]) < 5/math.sqrt(
        half)


def test_secure_step_never_repeats():
    x, y = batch(digits_cnn, 4)
    found = []
    for _ in range(2):
        step = step_for(network(digits_cnn), secure_noise=True, noise_multiplier=1.)
        step(LOSS, x, y)
        found.append(gradient(step))
    assert not torch.equal(*found)


def test_empty_batch_is_a_step_with_noise():
    x, y = batch(digits_cnn, 4)
    model = network(digits_cnn)
    before = copy.deepcopy(model.state_dict())
    step = step_for(model, generator=seeded(), noise_multiplier=1.)
    report = step(LOSS, x[:0], y[:0])
    assert report.nonprivate_batch_size == 0 and math.isnan(report.nonprivate_loss)
    assert stats.kstest(gradient(step).numpy(), "norm", args=(0, .5/8)).pvalue > 1e-3
    assert all(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_left_out_and_counted(bad):
    x, y = batch(mnist_cnn, 5)
    clean = step_for(network(mnist_cnn))
    clean(LOSS, x, y)
    step = step_for(network(mnist_cnn))
    report = step(LOSS, torch.cat([x[:2], x[:1]*0+bad, x[2:]]), torch.cat([y[:2], y[:1], y[2:]]))
    assert report.nonprivate_not_finite == 1 and report.nonprivate_scales[2] == 0
    assert difference(gradient(step), gradient(clean)) < 1e-5


def test_all_samples_not_finite_is_noise_alone():
    x, y = batch(digits_cnn, 3)
    step = step_for(network(digits_cnn), generator=seeded(), noise_multiplier=1.)
    report = step(LOSS, x*math.nan, y)
    assert report.nonprivate_not_finite == 3
    assert torch.equal(gradient(step), GaussianNoise(generator=seeded()).fill_(
        torch.empty(len(gradient(step))), .5/8))


class Remembers(nn.Module):
    "Keeps a running mean of its input, without noise."
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        self.seen.add_(x.flatten(1).mean(0))
        return self.head(x.flatten(1))


def test_a_changed_buffer_is_named_and_put_back():
    model = network(Remembers)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError,
                       match="no buffer may change in a private step, got a change of 'seen'"):
        step_for(model)(LOSS, *batch(digits_cnn, 4))
    for name, value in model.state_dict().items(): assert torch.equal(value, weights[name])


def test_pieces_are_the_whole():
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    whole, pieces = (step_for(network(digits_cnn, torch.float64), generator=seeded(),
                              noise_multiplier=1.,
        max_physical_batch_size=size) for size in (None, 4))
    reports = [step(LOSS, x, y) for step in (whole, pieces)]
    assert difference(gradient(pieces), gradient(whole)) < 1e-12
    torch.testing.assert_close(reports[0].nonprivate_norms, reports[1].nonprivate_norms)


def test_an_interrupted_step_leaves_nothing_behind():
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    step, clean = (step_for(network(digits_cnn, torch.float64)) for _ in range(2))
    step.begin()
    step.accumulate(LOSS, x, y)
    for s in (step, clean): s(LOSS, x, y)
    assert difference(gradient(step), gradient(clean)) < 1e-12


def test_optimizer_may_set_gradients_to_none():
    x, y = batch(digits_cnn, 6)
    a, b = (step_for(network(digits_cnn), generator=seeded(), noise_multiplier=1.,
                     kernels={"0": "matrices", "3": "matrices"}) for _ in range(2))
    for _ in range(2):
        for step in (a, b): step(LOSS, x, y)
        b.optimizer.zero_grad(set_to_none=True)
    for p, q in zip(a.model.parameters(), b.model.parameters()): assert torch.equal(p, q)


def test_rules_with_counts_are_renewed():
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=GlobalAdapt(), generator=seeded())
    step(LOSS, x, y)
    first = step.clip_rule.strict_max_grad_norm
    step(LOSS, x[:0], y[:0])
    assert len({10., first, step.clip_rule.strict_max_grad_norm}) == 3
    step = step_for(network(digits_cnn), clip_rule=GroupAdaptive(num_groups=2), generator=seeded(),
                    noise_multiplier=1.)
    report = step(LOSS, x, y, groups=y%2)
    assert report.sensitivity == step.clip_rule.sensitivity != 2.
    step(LOSS, x[:0], y[:0], groups=y[:0])


def test_a_rule_that_counts_first_takes_pieces():
    x, y = batch(digits_cnn, 7, dtype=torch.float64)
    x[2] = math.nan
    rule = GroupAdaptive(num_groups=10, count_noise=1.)
    whole, pieces = (step_for(network(digits_cnn, torch.float64), clip_rule=rule,
                              generator=seeded(), noise_multiplier=1.,
                              max_physical_batch_size=size) for size in (None, 3))
    for _ in range(2): a, b = (step(LOSS, x, y, groups=y) for step in (whole, pieces))
    assert whole.clip_rule == pieces.clip_rule != rule
    assert a.nonprivate_not_finite == b.nonprivate_not_finite == 1
    assert difference(gradient(pieces), gradient(whole)) < 1e-9 and a.noise_std == b.noise_std
    pieces.begin(); pieces.accumulate(LOSS, x[:3], y[:3], groups=y[:3])
    with pytest.raises(ValueError,
                       match="must see the logical batch in one call, got a second piece"):
        pieces.accumulate(LOSS, x[3:], y[3:], groups=y[3:])


@pytest.mark.parametrize("rule", [GlobalAdapt(count_noise=7.), GroupAdaptive(num_groups=2,
    count_noise=7., group_bounds=(3., 3.))], ids=["after", "before"])
def test_secure_counts_draw_from_the_secure_source(rule, monkeypatch):
    stds, fill = [], GaussianNoise.fill_
    def counted(self, out, std):
        assert self.secure
        stds.append(std)
        return fill(self, out, std)
    def refused(*args, **options): raise AssertionError("torch's generator was asked for noise")
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=rule, secure_noise=True, noise_multiplier=1.)
    monkeypatch.setattr(GaussianNoise, "fill_", counted)
    monkeypatch.setattr(torch, "randn", refused)
    report = step(LOSS, x, y, groups=y%2)
    # DP-F's bounds have mean 2 after any counts, or are all 1
    assert set(stds) == {7., report.noise_std} and step.clip_rule != rule


@pytest.mark.parametrize("loss", [LOSS, nn.functional.cross_entropy,
                                  nn.CrossEntropyLoss(reduction="sum")], ids=["mean", "function",
                                      "sum"])
def test_no_samples_have_no_losses(loss):
    assert per_sample_losses(loss, torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)).shape == (
        0,)
    assert per_sample_losses(loss, torch.zeros(0, 3, 4),
                             torch.zeros(0, 4, dtype=torch.long)).shape == (0,)


class Words(nn.Module):
    "Predicts the next word from the mean of the words before it, by the weights of the embedding."
    def __init__(self, is_module):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7,
            bias=False) if is_module else None
        if is_module: self.head.weight = self.words.weight

    def forward(self, words):
        mean = torch.tanh(self.words(words).mean(1))
        return self.head(mean) if self.head else nn.functional.linear(mean, self.words.weight)


def test_weight_in_two_modules_is_right_in_a_function_refused():
    words, y = torch.randint(7, (6, 4), generator=seeded()), torch.arange(6)%7
    found = step_for(network(lambda: Words(True), torch.float64), clip_rule=AutoS())
    found(LOSS, words, y)
    weight = network(lambda: Words(True), torch.float64).words.weight.detach()
    def loss(weight, words, y):
        return LOSS((torch.tanh(weight[words].mean(0))@weight.T)[None], y[None])
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, words, y).flatten(1)
    expected = (AutoS().scale(rows.norm(dim=1))[:, None]*rows).sum(0)/8
    assert difference(gradient(found), expected) < 1e-9
    model = network(lambda: Words(False))
    with pytest.raises(ValueError, match="every parameter must be used by its own layer alone, got "
                       "'words.weight' in a function outside of it"):
        step_for(model)(LOSS, words, y)
    assert model.words.weight.requires_grad and not model._forward_hooks
    assert not model.words._forward_pre_hooks


def test_a_weight_in_the_loss_is_refused_at_any_step():
    model, (x, y), penalty = network(digits_cnn), batch(digits_cnn, 4), 0.
    weight = next(model.parameters())
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none") + (
            penalty*weight.square().sum() if penalty else 0)
    step = step_for(model, generator=seeded(), noise_multiplier=1.)
    step(loss, x, y)
    before, penalty = copy.deepcopy(model.state_dict()), 1e3
    with pytest.raises(ValueError, match="the loss must reach parameters through the model's "
                       "layers alone, got a gradient of 1 parameters past them"):
        step(loss, x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    penalty = 0.
    step(loss, x, y) # and the next one is a step again
    assert gradient(step).norm() < 1e3


# one counts after it scales, one before
COUNTING = [GlobalAdapt(strict_max_grad_norm=3.), GroupAdaptive(num_groups=10, count_noise=1.)]


def share(rank, world, rule, out):
    "One of the processes of the test below."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    x, y = batch(digits_cnn, 8, dtype=torch.float64)
    torch.manual_seed(rank)  # DistributedDataParallel starts from rank 0's weights
    model = DistributedDataParallel(network(digits_cnn, torch.float64))
    step = step_for(model, clip_rule=rule, generator=seeded(), noise_multiplier=1.,
                    max_physical_batch_size=4)
    for turn in range(3):
        mine = slice(0, 6) if rank == 0 else slice(6, 8)
        if turn == 1: mine = slice(0, 8) if rank == 0 else slice(0, 0)  # an empty share
        step(LOSS, x[mine], y[mine], groups=y[mine] if rule.needs_groups else None)
    if rank == 0: torch.save((gradient(step), asdict(step.clip_rule)), out)
    else:
        torch.save((torch.cat([p.detach().flatten() for p in model.module.parameters()]),
                    asdict(step.clip_rule)), f"{out}.1")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("rule", COUNTING, ids=["after", "before"])
def test_two_processes_take_the_step_of_one(rule, tmp_path, processes):
    mp.start_processes(share, args=(2, rule, str(tmp_path/"out")), nprocs=2,
                       start_method=processes.get_start_method())
    x, y = batch(digits_cnn, 8, dtype=torch.float64)
    alone = step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(),
                     noise_multiplier=1.)
    for _ in range(3): alone(LOSS, x, y, groups=y if rule.needs_groups else None)
    found, there = torch.load(tmp_path/"out", weights_only=True)
    assert difference(found, gradient(alone)) < 1e-9
    assert there == asdict(alone.clip_rule) != asdict(rule)
    other, second = torch.load(f"{tmp_path/'out'}.1", weights_only=True)
    assert second == there
    weights = torch.cat([p.detach().flatten() for p in alone.model.parameters()])
    assert difference(other, weights) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
def test_cuda_takes_the_step_of_the_cpu():
    x, y = batch(digits_cnn, 6, dtype=torch.float64)
    here, there = (step_for(network(digits_cnn, torch.float64).to(d), generator=seeded(),
                            noise_multiplier=1.) for d in ("cpu", "cuda"))
    here(LOSS, x, y)
    there(LOSS, x.cuda(), y.cuda())
    assert difference(gradient(there).cpu(), gradient(here)) < 1e-9


class Negative(ClipRule):
    def scale(self, norms, groups=None): return torch.full_like(norms, -1e6)


class NotANumber(ClipRule):
    def scale(self, norms, groups=None): return torch.full_like(norms, math.nan)


class ByTheLargest(ClipRule):
    def scale(self, norms, groups=None): return torch.ones_like(norms)/norms.max()


@pytest.mark.parametrize("rule", [Negative(), NotANumber()])
def test_what_rule_must_not_say_is_a_scale_of_zero(rule):
    step = step_for(network(digits_cnn), clip_rule=rule)
    report = step(LOSS, *batch(digits_cnn, 5))
    assert torch.equal(report.nonprivate_scales, torch.zeros(5))
    assert torch.equal(gradient(step), torch.zeros_like(gradient(step)))


def test_a_rule_that_lets_samples_meet_is_refused():
    step = step_for(network(digits_cnn), clip_rule=ByTheLargest())
    with pytest.raises(ValueError,
                       match="clip_rule must scale a sample by its own norm alone, got .* from "
                       "ByTheLargest"):
        step(LOSS, *batch(digits_cnn, 5))


def test_a_rule_with_groups_sees_each_sample_with_its_own(small_pieces):
    "Late gradients come a few at a time; DP-F takes all to count, then a few at a time."
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    rule = GroupAdaptive(num_groups=10, count_noise=1., group_bounds=tuple(.1 + .1*k
        for k in range(10)))
    book, pieces = (step_for(network(digits_cnn, torch.float64), clip_rule=rule, generator=seeded(),
                             kernels={"0": "matrices", "3": "matrices"}, **more)
                             for more in ({}, dict(max_physical_batch_size=6)))
    for step in (book, pieces): step(LOSS, x, y, groups=y)
    total, _ = one_by_one(network(digits_cnn, torch.float64), LOSS, x, y, book.clip_rule.scale,
                          groups=y)
    for step in (book, pieces):
        assert difference(gradient(step), total/8) < 1e-9
        assert step.clip_rule == book.clip_rule != rule


def test_late_gradients_never_need_more_room_than_the_backward_pass():
    late = per_sample_norms.LatePart("weight", 1000, (torch.zeros(64, 30), torch.zeros(64, 20)),
                                     None)
    for freed in (0, 3_200, 20_000, 64_000):
        at = per_sample_norms.pieces([late], 64, freed)
        assert [i for s in at for i in range(64)[s]] == list(range(64))
        assert max(len(range(64)[s]) for s in at)*1000 <= max(freed, 1000)


def test_a_step_that_failed_half_way_cannot_go_on(small_pieces, monkeypatch):
    x, y = batch(digits_cnn, 11, dtype=torch.float64)
    step = step_for(network(digits_cnn, torch.float64), kernels={"0": "matrices", "3": "matrices"})
    form, calls = per_sample_norms.weight_matrices, []
    def fails(*args):
        calls.append(args)
        if len(calls) == 4: raise MemoryError("no room for the next piece")
        return form(*args)
    monkeypatch.setattr(per_sample_norms, "weight_matrices", fails)
    step.begin()
    with pytest.raises(MemoryError): step.accumulate(LOSS, x, y)
    for go_on in (step.finish, lambda: step.accumulate(LOSS, x, y)):
        with pytest.raises(ValueError, match="begin must be called before"): go_on()
    clean = step_for(network(digits_cnn, torch.float64), kernels={"0": "matrices", "3": "matrices"})
    monkeypatch.undo()
    for s in (step, clean): s(LOSS, x, y)
    assert difference(gradient(step), gradient(clean)) < 1e-12


def test_groups_must_fit_the_batch():
    x, y = batch(digits_cnn, 6)
    step = step_for(network(digits_cnn), clip_rule=GroupAdaptive(num_groups=10), generator=seeded())
    with pytest.raises(ValueError,
                       match="groups must have one label per sample, got 7 labels for 6 samples"):
        step(LOSS, x, y, groups=torch.zeros(7, dtype=torch.long))


@pytest.mark.parametrize("options, word",
                         [({"max_physical_batch_size": -1}, "max_physical_batch_size must be"),
                          ({"expected_batch_size": 2.5},
                           "expected_batch_size must be a whole number"),
                           ({"expected_batch_size": math.inf}, "expected_batch_size must be"),
                           ({"clip_rule": "flat"},
                            "clip_rule must be a ClipRule, got clip_rule='flat'"),
                            ({"generator": 1}, "generator must be a torch.Generator or None, got "
                             "generator=1")])
def test_settings_without_a_meaning_are_refused(options, word):
    with pytest.raises(ValueError, match=word): step_for(nn.Linear(4, 3), **options)


def test_a_kernel_for_one_group_is_not_pinned_on_two():
    with pytest.raises(ValueError, match="got 'gram_product'"):
        step_for(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), kernels={"0": "gram_product"})


def test_groups_and_their_bounds_are_legal():
    with pytest.raises(ValueError, match="groups must be whole numbers"):
        GroupAdaptive(num_groups=2).scale(torch.ones(2), torch.tensor([.9, 0.]))
    with pytest.raises(ValueError, match="max_grad_norm must be in"):
        GroupAdaptive(num_groups=2, max_grad_norm=6e29)
    with pytest.raises(ValueError, match="group_bounds must be in"):
        GroupAdaptive(num_groups=2, group_bounds=(1., 1e30))


@pytest.mark.parametrize("name, value", [("clip_rule", Flat(max_grad_norm=100.)),
    ("expected_batch_size", 1)])
def test_what_noise_is_for_stays_until_the_step_is_over(name, value):
    model, x, y = nn.Linear(4, 3), torch.randn(4, 4), torch.arange(4)%3
    step = step_for(model)
    step.begin()
    step.accumulate(LOSS, x[:2], y[:2])
    setattr(step, name, value)
    with pytest.raises(ValueError,
                       match="clip_rule and expected_batch_size must stay from begin to finish"):
        step.accumulate(LOSS, x[2:], y[2:])


def test_a_loop_that_seeds_torch_again_draws_no_noise_twice():
    model, empty = nn.Linear(4, 3), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    step, drawn = step_for(model), []
    for _ in range(2):
        torch.manual_seed(7)
        step(LOSS, *empty, noise_multiplier=1.)
        drawn.append(gradient(step))
    assert not torch.equal(*drawn) and drawn[0].norm() > 0


class OwnScale(Flat):
    def scale(self, norms, groups=None): return torch.full_like(norms, 5.)


class OwnWeight(Flat):
    def weight(self, n, groups=None): return torch.full_like(n, 3.)


class OwnShape(Flat):
    def scale(self, norms, groups=None): return torch.ones(1)


def test_own_rule_is_held_to_its_sensitivity():
    x, y = 10*torch.randn(8, 4, generator=seeded()), torch.arange(8)%3
    for rule in (OwnScale(max_grad_norm=.01), OwnWeight(max_grad_norm=.01)):
        report = step_for(nn.Linear(4, 3), clip_rule=rule)(LOSS, x, y)
        assert (report.nonprivate_norms*report.nonprivate_scales).max() <= .01*(1+1e-6)
    with pytest.raises(ValueError, match=r"clip_rule must give one scale a sample, got shape "
                       r"\(1,\) from OwnShape for 8 samples"):
        step_for(nn.Linear(4, 3), clip_rule=OwnShape())(LOSS, x, y)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="optimizer must hold the trainable parameters of module "
                       "and no others, got 2 that it misses and 2 that are not the module's"):
        PrivateStep(nn.Linear(4, 3), torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=.1),
                    clip_rule=Flat(), expected_batch_size=8)


@pytest.mark.parametrize("changed, sentence", [
    (dict(model="m"), "module must be a torch Module, got a str"), (dict(optimizer="sgd"),
        "optimizer must be a torch Optimizer, got a str"),
    (dict(clip_rule="auto_s"), "clip_rule must be a ClipRule, got clip_rule='auto_s'"),
    (dict(noise_multiplier="1"),
     "noise_multiplier must be finite and > 0, got noise_multiplier='1'"),
    (dict(kernels=["gram"]),
     "kernels must be a dict of layer names and kernels, got kernels=\\['gram'\\]"),
     (dict(model=nn.TransformerEncoderLayer(8, 2)),
      "MultiheadAttention at 'self_attn' has the sequence in front of the batch")])
def test_what_makes_no_step_is_said_in_a_sentence(changed, sentence):
    model = changed.pop("model", nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters() if isinstance(model, nn.Module)
                                else [torch.zeros(1)], lr=.1)
    with pytest.raises(ValueError, match=sentence):
        PrivateStep(model, **dict(optimizer=optimizer, clip_rule=Flat(), expected_batch_size=4,
                                  noise_multiplier=1.) | changed)


def test_targets_must_be_a_tensor():
    model = nn.Linear(3, 2)
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=4, noise_multiplier=1.)
    with pytest.raises(ValueError,
                       match="targets must be a tensor with the batch in front, got a list"):
        step(nn.CrossEntropyLoss(), torch.randn(4, 3), [0, 1, 0, 1])
