"Models whose samples silently pass their bound: the step and training loops refuse each."
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep
from looked_at import BEYOND, ConditionedNet, Net, Scaled, WAYS, clipped_sum, data, moved, one_step


pytestmark = pytest.mark.filterwarnings("ignore")


def centred(x): return x - x.mean(0)


def standard_in_secret(z): return (z - z.detach().mean(0))/z.detach().std(0)


MEETING = {
    "before the first layer": lambda: Net(lambda m, x: m.last(m.first(100*centred(x)))),
    "in statistics that no gradient sees": lambda: Net(lambda m,
        x: m.last(standard_in_secret(m.first(x)).tanh())),
    "behind a frozen layer": lambda: Net(lambda m, x: m.last(centred(m.first(x)).tanh()),
        frozen=True),
    "beside a parameter of the model": lambda: Scaled(centred),
}


UNSEEN = {
    "a function of a weight": lambda: Net(lambda m, x: m.last(.001*m.first(x))
        + 30*x@m.first.weight[:3].T),
    "a weight as a second layer": lambda: Net(lambda m,
        x: m.last(F.linear(m.first(x), m.first.weight))),
}


@WAYS
@pytest.mark.parametrize("where", MEETING)
def test_samples_that_meet_are_refused_wherever_they_do(way, where):
    with pytest.raises(ValueError, match="samples must not meet in the model or in the loss"):
        one_step(MEETING[where](), way, *data())


@WAYS
@pytest.mark.parametrize("what", UNSEEN)
def test_a_gradient_that_the_engine_does_not_see_is_refused(way, what):
    with pytest.raises(ValueError, match="must see all of a sample's gradient|must be used by its "
                       "own layer alone|must not exceed its samples' clipped norms"):
        one_step(UNSEEN[what](), way, *data())


@WAYS
def test_layer_called_on_one_row_is_expanded_over_the_batch(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.ones_like(x[:1]))*x.mean(1, keepdim=True)
                                            + .001*m.first(x))), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


class Places(nn.Module):
    "What GPT-2 and T5 do: positions are looked up once, for one sample or for none."
    def __init__(self, look):
        super().__init__()
        self.table, self.last, self.look = nn.Embedding(9, 1), nn.Linear(5, 3), look
    def forward(self, x): return self.last((x.unsqueeze(1) + self.look(self.table)).mean(1).tanh())


def relative(table):
    at = torch.arange(5)
    return table(at[:, None] - at + 4).squeeze(-1)


@WAYS
@pytest.mark.parametrize("look", [lambda table: table(torch.arange(5)[None]).transpose(1, 2),
    relative, lambda table: table(torch.arange(5)).T.repeat(2, 1)])
def test_what_all_samples_share_has_gradients_of_batches_of_one(way, look):
    model, (x, y) = Places(look), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


@WAYS
def test_windows_of_a_sample_are_one_input_of_it(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.stack([x, 2*x], 1).flatten(0, 1)).tanh()
                                            .unflatten(0, (-1, 2)).mean(1))), data()
    true = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), true, rtol=1e-6, atol=1e-8)


@WAYS
def test_batch_in_another_order_than_samples_is_refused_or_right(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(torch.stack([x, 2*x], 0).flatten(0, 1)).tanh()
                                            .unflatten(0, (2, -1)).mean(0))), data()
    with pytest.raises(ValueError, match="samples must not meet|must see all of a sample's"):
        one_step(model, way, x, y)


@WAYS
def test_layer_that_keeps_its_batch_as_an_attribute_is_refused(way):
    "Under vmap every row would have the whole batch: 38 bounds for one record."
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(ConditionedNet(), way, *data())


@WAYS
@pytest.mark.parametrize("what", BEYOND)
def test_a_gradient_that_only_the_engine_sees_is_refused(way, what):
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(Net(BEYOND[what]), way, *data())


@pytest.mark.parametrize("kernel", ["matrices", "grouped", "gram", "gram_product", "opacus"])
def test_a_convolution_s_padding_is_what_it_is_now(kernel):
    "As when networks are rebuilt for dilation: an unpadded corner moved the sum by 125 bounds."
    def build():
        layer = nn.Conv2d(1, 4, 3, padding=4)
        layer.padding = (0, 0)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(4*36, 3))
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    x[1, 0, 5:, 5:] = 1e3
    assert moved(build, x, torch.arange(8) % 3, 1, kernels={"0": kernel}) <= 1 + 1e-9


class Tempered(nn.Module):
    "A layer with a parameter of its own, and a number that the loop changes."
    def __init__(self):
        super().__init__()
        self.gain, self.last, self.heat = nn.Parameter(torch.ones(5)), nn.Linear(5,
            3).requires_grad_(False), .05
    def forward(self, x): return self.last(x*self.gain*self.heat)


def test_a_layer_is_measured_as_it_is_now():
    def change(model, t): model[0].heat = .05 if t < 5 else 5.
    x, y = data()
    assert moved(lambda: nn.Sequential(Tempered()), x, y, 3, steps=7, change=change) <= 1 + 1e-9


@WAYS
def test_autocast_inside_a_model_is_refused(way):
    def rounded(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16): return model.last(model.first(x)).double()
    with pytest.raises(ValueError, match="must run in one precision, got autocast inside"):
        one_step(Net(rounded), way, *data())


def test_looks_are_not_spent_on_batches_of_one():
    model, (x, y) = MEETING["behind a frozen layer"]().double(), data()
    step = PrivateStep(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad],
        lr=.1), clip_rule=Flat(), expected_batch_size=8, noise_multiplier=1.)
    for k in range(3): step(nn.CrossEntropyLoss(), x[k:k+1], y[k:k+1])
    with pytest.raises(ValueError, match="samples must not meet"): step(nn.CrossEntropyLoss(), x, y)


@WAYS
def test_a_model_may_take_a_gradient_on_its_way(way):
    "As adversarial examples do: what it asks of its layers then is not the loss's."
    def adversarial(model, x):
        z = x.detach().requires_grad_(True)
        g, = torch.autograd.grad(F.cross_entropy(model.last(model.first(z).tanh()),
            torch.zeros(len(x), dtype=torch.long), reduction="sum"), z)
        return model.last(model.first(x + .01*g.sign()).tanh())
    torch.manual_seed(0)
    model, (x, y) = Net(adversarial).double(), data()
    expected = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for a, b in zip(x, y):
        g = torch.cat([p.flatten() for p in torch.autograd.grad(F.cross_entropy(model(a[None]),
            b[None]), list(model.parameters()))])
        expected += g*min(1, 1/g.norm())
    torch.testing.assert_close(one_step(model, way, x, y), expected, rtol=1e-9, atol=1e-10)


def test_hook_that_comes_later_is_a_function_behind_its_layer():
    model, (x, y) = Net(lambda m, x: m.last(m.first(x))).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                       clip_rule=Flat(max_grad_norm=1.), expected_batch_size=1, noise_multiplier=0.)
    for _ in range(3): step(nn.CrossEntropyLoss(), x, y)
    model.first.register_forward_hook(lambda layer, args, output: 5*output)
    step(nn.CrossEntropyLoss(), x, y) # Which nobody looks at
    torch.testing.assert_close(step.recorder.flat, clipped_sum(model, x, y), rtol=1e-9, atol=1e-10)


class Listed(nn.Module):
    "Parameters in a container."
    def __init__(self):
        super().__init__()
        self.held = nn.ParameterList([torch.full((5,), 2.), torch.zeros(5)])
    def forward(self, x): return x*self.held[0] + self.held[1]


OWNED = {
    "parameters in a list": Listed,
    "a parametrization of all there is": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5,
        5, bias=False)),
    "a hook in front": lambda: hooked_in_front(nn.PReLU(5)),
}


def hooked_in_front(layer):
    layer.register_forward_pre_hook(lambda layer, args: (3*args[0],))
    return layer


@WAYS
@pytest.mark.parametrize("what", OWNED)
def test_a_layer_without_a_formula_is_measured_as_it_computes(way, what):
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(OWNED[what](), nn.Linear(5, 3)).double(), data()
    expected = clipped_sum(model, x, y)
    torch.testing.assert_close(one_step(model, way, x, y), expected, rtol=1e-9, atol=1e-10)


def test_words_may_be_a_view():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(4, 5), nn.Linear(5, 3)
        def forward(self, x):
            return self.last(x + self.words(torch.arange(2).expand(len(x), 2)).sum(1))
    one_step(Words(), "step", *data())


@WAYS
def test_a_layer_may_be_called_again(way):
    model, (x, y) = Net(lambda m, x: m.last(m.first(x) + m.first(2*x))), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
