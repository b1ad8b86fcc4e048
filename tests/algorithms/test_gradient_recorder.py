"What a gradient recorder sees, and what it refuses."
import copy
import math
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dp_companion import PrivacyEngine
from dp_companion.algorithms import book_keeping, spot_checks
from dp_companion.algorithms.clipping import (
    AutoS, Flat, GlobalAdapt
)
from dp_companion.algorithms.private_step import PrivateStep
from networks import batch, digits_cnn
from steps import LOSS, difference, gradient, network, seeded, step_for
from oracles.opacus_engines import opacus_hooks
from private_steps import Pulled, against_oracles


class Meeting(nn.Module):
    "Two layers with a function between them that may look at the whole batch."
    def __init__(self, f):
        super().__init__()
        self.first, self.f, self.last = nn.Linear(6, 6), f, nn.Linear(6, 3)
    def forward(self, x): return self.last(self.f(self.first(x)))


MEETINGS = dict(mean=lambda h: h-h.mean(0), scale=lambda h: h/h.abs().mean(),
                attention=lambda h: (h@h.T/100).softmax(1)@h, turned=lambda h: h.tanh().flip(0),
                before=lambda h: h.cumsum(0), behind=lambda h: h.flip(0).cumsum(0).flip(0))


@pytest.mark.parametrize("f", MEETINGS.values(), ids=MEETINGS)
def test_samples_that_meet_are_refused(f):
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    model = network(lambda: Meeting(f))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        step_for(model)(LOSS, x, y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    apart = step_for(network(lambda: Meeting(torch.tanh)))
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        apart(lambda o, t: nn.functional.cross_entropy(o, t,
            reduction="none")*o.detach().abs().mean() + o.sum(), x, y)


def test_a_sample_that_is_not_finite_meets_no_other():
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    x[1] = math.nan
    assert step_for(network(lambda: Meeting(torch.tanh)))(LOSS, x, y).nonprivate_not_finite == 1


class Twice(nn.Module):
    "A weight that is used by its layer and, where `past`, by a function too."
    past = True
    def __init__(self): super().__init__(); self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(nn.functional.linear(h, self.first.weight) if self.past else h)


def penalised(model, size):
    "A loss with a penalty on the weights, the same for every sample."
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets,
            reduction="none") + size*model.first.weight.square().sum()
    return loss


def test_uses_past_layer_are_refused_from_whatever_step_they_begin():
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    words = "every parameter must be used by its own layer alone"
    for steps in (0, 1, 2):
        model = network(Twice)
        model.past, step = False, step_for(model)
        for _ in range(steps): step(LOSS, x, y)
        model.past = True
        with pytest.raises(ValueError, match=words): step(LOSS, x, y)
    model = network(Twice)
    model.past = False
    with pytest.raises(ValueError, match="the loss must reach"):
        step_for(model)(penalised(model, 10.), x, y)


class Scaled(nn.Linear):
    "A linear layer with a further argument."
    def forward(self, x, factor=None, scale=None):
        return super().forward(x)*(1 if factor is None else factor)*(1 if scale is None else scale)


@pytest.mark.parametrize("call", [lambda layer, x: layer(x, 2.), lambda layer,
                                  x: layer(x, scale=2.), lambda layer, x: layer(x=x)],
                                  ids=["position", "name", "input"])
def test_layers_may_have_arguments_beside_their_input(call):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.layer = Scaled(6, 3)
        def forward(self, x): return call(self.layer, x)
    model, x, y = network(Net), torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    x = x.to(next(model.parameters()))
    true = [torch.cat([g.flatten() for g in torch.autograd.grad(LOSS(model(a[None]), b[None]),
        list(model.parameters()))]).norm() for a, b in zip(x, y)]
    torch.testing.assert_close(step_for(model)(LOSS, x, y).nonprivate_norms, torch.stack(true),
                               rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    "Two layers of which a batch reaches one."
    use = 0
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    def forward(self, x): return self.layers[self.use](x)


def test_layer_that_a_batch_does_not_reach_has_no_gradient():
    x, y = torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(8)%3
    step = step_for(network(Branches, torch.float64))
    for use in (0, 1):
        alone = step_for(network(lambda: nn.Linear(6, 3), torch.float64))
        alone.model.load_state_dict(step.model.layers[use].state_dict())
        step.model.use = use
        found = step(LOSS, x, y)
        assert difference(found.nonprivate_norms, alone(LOSS, x, y).nonprivate_norms) < 1e-9
        assert difference(gradient(step).view(2, -1)[use], gradient(alone)) < 1e-9
        assert not gradient(step).view(2, -1)[1-use].any()


def test_autocast_to_half_precision_is_refused():
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError,
            match="autocast must compute in torch.bfloat16, got torch.float16"):
        step_for(network(digits_cnn))(LOSS, *batch(digits_cnn, 4))


def test_norms_over_positions_are_found_where_terms_cancel():
    "Opacus's own Gram matrices give zero for some of these."
    way = torch.randn(64, 4, generator=seeded())
    x = 1e3 + .01*torch.randn(32, 64, 8, generator=seeded(1))
    step = step_for(Pulled(nn.Linear(8, 4, bias=False), way-way.mean(0)))
    found = step(lambda outputs, targets: outputs, x, torch.zeros(32)).nonprivate_norms.double()
    true = torch.bmm((way-way.mean(0)).double().T.expand(32, -1, -1), x.double()).flatten(1).norm(
        dim=1)
    assert (found >= .99*true).all()


def test_a_look_leaves_the_step_as_it_is(monkeypatch):
    "Dropout and noise draw what they would have drawn."
    def step():
        return step_for(network(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(.5),
            nn.Linear(64, 10))), noise_multiplier=1., generator=seeded())
    x, y = batch(digits_cnn, 8)
    looked, blind = step(), step()
    for each, looks in ((looked, lambda passes: True), (blind, lambda passes: False)):
        monkeypatch.setattr(spot_checks, "is_power_or_zero", looks)
        torch.manual_seed(3)
        for _ in range(3): each(LOSS, x, y)
    assert torch.equal(gradient(looked), gradient(blind))


def test_a_kernel_for_vectors_takes_positions_too():
    step = step_for(network(lambda: nn.Linear(6, 3), torch.float64), clip_rule=AutoS())
    step(LOSS, torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(8)%3)
    x = torch.randn(8, 5, 6, dtype=torch.float64, generator=seeded())
    step(lambda outputs, targets: outputs.square().flatten(1).sum(1), x, torch.zeros(8))
    assert step.kernels == {"": "rank_one"} and gradient(step).isfinite().all()
    again = step_for(copy.deepcopy(step.model), clip_rule=AutoS(), kernels={"": "rank_one"})
    def squared(outputs, targets): return outputs.square().flatten(1).sum(1)
    total, _ = opacus_hooks(copy.deepcopy(step.model), squared, x, torch.zeros(8), AutoS().scale)
    again(squared, x, torch.zeros(8))
    assert difference(gradient(again), total/8) < 1e-9


def test_a_layer_without_a_formula_may_change_between_steps():
    "Opacus keeps a copy of such a layer."
    class Tempered(nn.Module):
        t = 1.
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
        def forward(self, x): return x@self.weight*self.t
    x, y, model = torch.randn(8, 6, dtype=torch.float64, generator=seeded()), torch.arange(
        8)%3, Tempered()
    step = step_for(model, clip_rule=Flat(max_grad_norm=1e9))
    for _ in range(4): step(LOSS, x, y)
    model.t = 10.
    found, = torch.autograd.grad(8*LOSS(model(x), y), list(model.parameters()))
    step(LOSS, x, y)
    assert difference(8*gradient(step), found.flatten()) < 1e-9


def test_what_layer_has_read_may_not_change_before_the_sum():
    model = nn.Linear(3, 2)
    book, x = book_keeping.BookKeeping(model), torch.ones(4, 3)
    with book.recording(): outputs = model(x)
    outputs.sum().backward()
    x.mul_(100)
    with pytest.raises(ValueError, match="the input of layer '' and its output's gradient must not "
                       "be changed in place before the step is over"):
        next(book.samples())
    assert not book.flat.any()


@pytest.mark.parametrize("size", [1e-22, 1e-25])
@pytest.mark.parametrize("positions", [False, True])
def test_vanished_gradients_are_not_amplified(size, positions):
    "Single-precision squares vanish below 1e-22; a zero norm would get c0/z, of any size."
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=1.),
                       clip_rule=GlobalAdapt(max_grad_norm=1., strict_max_grad_norm=1e-28),
                       expected_batch_size=1, noise_multiplier=0.)
    x = torch.randn(1, *[5]*positions, 3, generator=torch.Generator().manual_seed(0))
    step(lambda outputs, targets: size*outputs.flatten(1).sum(1), x,
         torch.zeros(1, dtype=torch.long))
    moved = math.sqrt(sum((p.detach().double() - b).square().sum().item() for p,
                          b in zip(model.parameters(), before)))
    assert moved <= 1.001


def test_vanished_inputs_are_not_amplified():
    "Nor where two small factors are lost in their product alone."
    step = step_for(nn.Linear(4, 3, bias=False), clip_rule=AutoS(stability=1e-29),
                    expected_batch_size=1)
    step(lambda outputs, targets: 1e-14*outputs.sum(1), torch.full((1, 4), 1e-10), torch.zeros(1))
    assert gradient(step).norm() <= 1.001


class Weighted(nn.Module):
    "A layer and a public table, which has no rows of samples."
    def __init__(self): super().__init__(); self.layer = nn.Linear(4, 3)
    def forward(self, x, table): return self.layer(x)*table.sum()


def test_a_public_table_stays_whole():
    x, y, table, model = torch.randn(5, 4, generator=seeded()), torch.arange(5)%3, torch.arange(
        7.), Weighted()
    whole, pieces = (step_for(copy.deepcopy(model), **options)
                     for options in ({}, {"max_physical_batch_size": 2}))
    for step in (whole, pieces): step(LOSS, (x, table), y)
    for i in range(5): # alone
        model.zero_grad()
        LOSS(model(x[i:i+1], table), y[i:i+1]).backward()
        alone = torch.cat([p.grad.flatten() for p in model.parameters()])
        found = step_for(copy.deepcopy(model))(LOSS, (x[i:i+1], table), y[i:i+1]).nonprivate_norms
        assert found.item() == pytest.approx(alone.norm().item(), rel=1e-5)
    assert difference(gradient(pieces), gradient(whole)) < 1e-6
    with pytest.raises(ValueError, match="batch"): whole(LOSS, (x, table), y[:3])


class Keeper(nn.Module):
    "A buffer that a batch may change in value, shape or kind."
    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 3), change
        self.register_buffer("kept", torch.tensor([math.nan, 1.]))
    def forward(self, x): self.change(self); return self.layer(x)


CHANGES = {"shape": lambda m: setattr(m, "kept", torch.zeros(3)), "kind": lambda m: setattr(m,
    "kept", m.kept.double()), "value": lambda m: m.kept.fill_(2.)}


@pytest.mark.parametrize("kind", [*CHANGES, "none"])
def test_buffers_stay_in_value_shape_and_kind(kind):
    model, x, y = Keeper(CHANGES.get(kind, lambda m: None)), torch.randn(4, 4), torch.arange(4)%3
    if kind == "none": step_for(model)(LOSS, x, y)
    else:
        with pytest.raises(ValueError,
                           match="no buffer may change in a private step, got a change of 'kept'"):
            step_for(model)(LOSS, x, y)
    torch.testing.assert_close(model.kept, torch.tensor([math.nan, 1.]), equal_nan=True)


def test_layer_norm_takes_inputs_in_any_order_of_memory():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm([4, 3]), nn.Linear(12,
                3)
        def forward(self, x):
            return self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).flatten(1))
    x, y = torch.randn(6, 3, 4, generator=seeded(), dtype=torch.float64), torch.arange(6)%3
    against_oracles(lambda: network(Turned, torch.float64), x, y, names=["one_by_one", "hooks"])


def test_group_norm_takes_vectors_in_any_order_of_memory():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)
        def forward(self, x): return self.last(self.norm(self.first(x).T.contiguous().T))
    x, y = torch.randn(6, 4, generator=seeded(), dtype=torch.float64), torch.arange(6)%3
    against_oracles(lambda: network(Turned, torch.float64), x, y, names=["one_by_one", "hooks"])


class Viewed(nn.Module):
    "A layer whose output is a view: a part of a larger one, or turned."
    def __init__(self, kind): super().__init__(); self.layer, self.kind = nn.Linear(6, 8), kind
    def forward(self, x):
        y = self.layer(x)
        return y[..., :5] if self.kind == "part" else y.transpose(1,
            2) if self.kind == "turned" else y


class InPlace(nn.Module):
    "Positions, and a change in place of what the layer gave."
    def __init__(self, layer): super().__init__(); self.layer, self.last = layer, nn.LazyLinear(3)
    def forward(self, x): return self.last(self.layer(x).tanh_().flatten(1))


@pytest.mark.parametrize("way", ["step", "loop"])
@pytest.mark.parametrize("kind", ["positions", "instance norm", "part", "turned"])
def test_output_that_is_a_view_may_be_changed_in_place(kind, way):
    "A linear layer's output at positions is a view. Three passes are checked, the fourth is not."
    x, y = torch.randn(8, 5, 6, generator=seeded(), dtype=torch.float64), torch.arange(8)%3
    torch.manual_seed(0)
    model = InPlace({"positions": lambda: nn.Linear(6, 8),
                     "instance norm": lambda: nn.InstanceNorm1d(5, affine=True)}.get(kind,
                         lambda: Viewed(kind))()).double()
    LOSS(model(x), y).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    still, options = torch.optim.SGD(model.parameters(), lr=0.), dict(noise_multiplier=1e-12,
        expected_batch_size=8)
    if way == "step":
        step = PrivateStep(model, still, clip_rule=Flat(max_grad_norm=10.), **options)
        for _ in range(4): step(LOSS, x, y)
    else:
        made, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
            optimizer=still, max_grad_norm=10., data_loader=DataLoader(TensorDataset(x, y),
                batch_size=8), **options)
        for _ in range(4):
            for inputs, targets in loader:
                LOSS(made(inputs), targets).backward()
                optimizer.step()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), wanted,
                               rtol=1e-6, atol=1e-9)


def test_a_model_may_ask_for_gradients_on_its_way():
    "Hooks of its own while it trains, as for a map of what it looks at."
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        def forward(self, x):
            h = self.first(x).tanh()
            if self.training: h.register_hook(lambda b: None)
            return self.last(h)
    x, y = torch.randn(8, 6, generator=seeded()), torch.arange(8)%3
    step = step_for(Mapped())
    for _ in range(4): step(LOSS, x, y)
