"Modules with parameters of their own, and looks that must not end."
import copy
import enum
import io
import random
import warnings
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.gradient_recorder import GradientRecorder
from dp_companion.algorithms.spot_checks import SpotCheck, _check_direction, _check_norm
from dp_companion.algorithms.private_step import PrivateStep
from looked_at import (
    BEYOND, ConditionedNet, N, Net, Scaled, WAYS, clipped_sum, data, moved, one_step)


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, .1), lambda x: x if x.max()>0 else -x])
def test_module_with_own_parameters_says_what_it_must_be(function):
    with pytest.raises(ValueError, match="a module with parameters of its own must treat every "
                       "sample alike, without chance, .*, got a Scaled"):
        one_step(Scaled(function), "step", *data())


@WAYS
def test_a_look_leaves_the_user_s_batch_alone(way):
    "A model may change its own input; a pass that is only a look must not."
    def shifted(model, x): return model.last(model.first(x.sub_(1.)).relu())
    (x, y), net = data(), Net(shifted).double()
    sums = clipped_sum(net, x, y)
    torch.testing.assert_close(one_step(net, way, x.clone(), y), sums, rtol=1e-6, atol=1e-8)


class Attending(nn.Module):
    "A class token of one's own beside attention, whose gradients are formed together."
    def __init__(self):
        super().__init__()
        self.token, self.attention, self.last = nn.Parameter(torch.zeros(1, 1,
            6)), nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)
    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x.unsqueeze(1).expand(-1, 2, -1)], 1)
        return self.last(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_attention_inside_module_with_parameters_of_its_own_is_taken():
    model, x, y = Attending().double(), torch.randn(8, 6, dtype=torch.float64), torch.arange(8)%3
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.),
                       clip_rule=Flat(max_grad_norm=1e6), expected_batch_size=8,
                       noise_multiplier=0.)
    true = torch.autograd.grad(nn.CrossEntropyLoss()(model(x), y), list(model.parameters()))
    step(nn.CrossEntropyLoss(), x, y)
    for p, g in zip(model.parameters(), true): torch.testing.assert_close(p.grad, g)


def test_reentrant_checkpointing_is_refused_in_a_sentence():
    def again(model, x):
        return model.last(checkpoint(torch.relu, model.first(x), use_reentrant=True))
    with pytest.raises(RuntimeError, match="torch.utils.checkpoint is incompatible"):
        one_step(Net(again), "step", *data())


class Masked(ConditionedNet):
    def forward(self, x): return super().forward(x).masked_fill(torch.arange(3) == 2, -torch.inf)


def test_what_is_not_finite_ends_no_look():
    "Neither a masked output, nor another record."
    x, y = data()
    model = Masked().double()
    module, _, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.raises(ValueError, match="must see all of a sample's gradient"): module(x)
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(ConditionedNet(), "step", x.index_fill(0, torch.tensor([2]), torch.nan), y)


def test_a_derivative_that_becomes_an_output_is_refused():
    "A small one is less than a look sees."
    def forced(model, x):
        x = x.detach().requires_grad_(True)
        out = model.last(model.first(x).tanh())
        return out + 1e-6*torch.autograd.grad(out.sum(), x, create_graph=True)[0].pow(2).sum(1,
            keepdim=True)
    with pytest.raises(ValueError, match="as where a derivative is part of the loss"):
        one_step(Net(forced), "step", *data())


def test_a_look_goes_not_back_into_what_made_the_input():
    encoder, model, (x, y) = nn.Linear(5, 5).double(), nn.Linear(5, 3).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=Flat(),
                       expected_batch_size=N, noise_multiplier=1.)
    found = []
    for looks in (True, False):
        if not looks: step.spot_check.passes = (3, 3)
        own = x.clone().requires_grad_(True)
        step(nn.CrossEntropyLoss(), own, y)
        found.append(own.grad)
        step.spot_check.passes = (0, 0)
        step(nn.CrossEntropyLoss(), encoder(x).tanh(), y)
    torch.testing.assert_close(*found)


class Keeping(nn.Module):
    "A parameter of its own, a layer inside with a hook of the user's, and its last output at hand."
    def __init__(self):
        super().__init__()
        self.gain, self.inner, self.act, self.kept = nn.Parameter(torch.full((5,), .7)), nn.Linear(
            5, 5), nn.Tanh(), None
        self.act.register_forward_hook(lambda layer, args, output: 2*output)
    def forward(self, x):
        self.kept = self.act(self.inner(x)*self.gain)
        return self.kept


@WAYS
def test_a_layer_may_keep_its_output_and_hold_hooks_inside(way):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(Keeping(), nn.Linear(5, 3)).double()
    model, (x, y), expected = build(), data(), 0
    for a, b in zip(x, y):
        g = torch.cat([p.flatten() for p in torch.autograd.grad(F.cross_entropy(model(a[None]),
            b[None]), list(model.parameters()))])
        expected = expected + g*min(1, 1/g.norm())
    torch.testing.assert_close(one_step(build(), way, x, y), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("padding", [0, (1,), "same", "valid"])
@pytest.mark.parametrize("kernel", ["matrices", "grouped", "gram", "gram_product", "opacus"])
def test_a_padding_may_be_written_as_torch_takes_it(padding, kernel):
    def build():
        layer = nn.Conv2d(1, 4, 3, padding=1)
        layer.padding = padding
        return nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert moved(build, x, torch.arange(8) % 3, 1, kernels={"0": kernel}) <= 1 + 1e-9


class TiedWords(nn.Module):
    "A language model with one table for words and answers, and a parameter of its own for places."
    def __init__(self):
        super().__init__()
        self.words, self.places, self.inner, self.answers = nn.Embedding(7,
            4), nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.answers.weight = self.words.weight
    def forward(self, x):
        return self.answers(self.inner(self.words(x) + self.places).tanh()).mean(1)


@WAYS
def test_weights_may_be_tied_beside_parameter_of_the_model_itself(way):
    "Opacus's copy of such a module reads memory that nobody has written."
    torch.manual_seed(0)
    model, x = TiedWords(), torch.randint(7, (N, 5), generator=torch.Generator().manual_seed(0))
    expected = clipped_sum(model, x, data()[1])
    torch.testing.assert_close(one_step(model, way, x, data()[1]), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("function, word", [(lambda x: F.dropout(x, .1), "without chance"),
    (lambda x: x if random.random() < 2 else -x, "without chance"),
    (lambda x: x*(np.random.random() < 2), "without chance")])
def test_chance_beside_own_parameter_is_refused_at_first_draw(function, word):
    "A second run of it, for its rows, draws other numbers."
    with pytest.raises(ValueError, match=word): one_step(Scaled(function), "step", *data())


@pytest.mark.parametrize("generator", [random.Random(0), np.random.default_rng(0),
                                       torch.Generator()])
def test_a_generator_beside_a_parameter_of_its_own_is_refused(generator):
    model = Scaled(lambda x: x)
    model.draws = generator
    with pytest.raises(ValueError, match="the .* 'draws' inside Scaled at '' gives another result"):
        one_step(model, "step", *data())


class Counted(nn.Module):
    "Counts its passes, as a warm-up of one's own does."
    def __init__(self): super().__init__(); self.last, self.passes = nn.Linear(5, 3), 0
    def forward(self, x):
        self.passes += 1
        return self.last(x)/self.passes


@WAYS
def test_look_is_no_pass_to_a_model_that_counts_them(way):
    model = Counted()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="Secure RNG|Full backward hook")
        one_step(model, way, *data())
    assert model.passes == 1


def test_a_count_beside_a_parameter_of_its_own_is_refused():
    def slower(x):
        model.passes += 1
        return x/model.passes
    model = Scaled(slower)
    model.passes = 0
    with pytest.raises(ValueError, match="which changes 'passes'"): one_step(model, "step", *data())


class Remembering(nn.Module):
    "Keeps what came, and what it has made for batches of a size."
    class Mode(enum.IntEnum): A = 1
    def __init__(self):
        super().__init__()
        (self.scale, self.last, self.made, self.history, self.rows, self.mode,
         self.activations) = (nn.Parameter(torch.ones(5)), nn.Linear(5, 3), {}, [], 0,
                              self.Mode.A, [torch.tanh])
    def forward(self, x):
        self.rows = len(x)
        self.history.append(x.detach())
        if self.rows not in self.made: self.made[self.rows] = x.new_ones(self.rows, 5)
        return self.last(self.activations[0](x*self.made[self.rows]*self.scale).view(self.rows, -1))


@WAYS
def test_a_module_with_parameters_of_its_own_may_remember(way):
    model, (x, y) = Remembering().double(), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert list(model.made) == [N] and len(torch.cat(model.history)) == N and model.rows == N


@WAYS
def test_a_model_may_call_its_functions_activations(way):
    model, (x, y) = Net(lambda m, x: m.last(m.activations[0](m.first(x)))).double(), data()
    model.activations = [torch.tanh]
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert model.activations == [torch.tanh]


class Answer:
    "A plain object, as some models give."
    def __init__(self, logits): self.logits, self.itself = logits, self


def test_an_empty_batch_has_an_answer_of_any_kind():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.last = nn.Linear(5, 3)
        def forward(self, x): return Answer(self.last(x))
    model, (x, y) = Model().double(), data()
    made = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=1))
    sizes = []
    for inputs, targets in made[-1]:
        answer = made[0](inputs)
        assert answer.logits.shape == (len(inputs), 3) and answer.itself is answer
        (F.cross_entropy(answer.logits, targets, reduction="sum")/max(len(targets), 1)).backward()
        made[1].step()
        sizes.append(len(inputs))
    assert 0 in sizes and max(sizes) > 0


@pytest.mark.parametrize("owns", [False, True])
def test_a_copy_of_a_private_model_is_the_users_own(owns):
    "In the middle of a step, when layers hold raw batches."
    model, (x, y) = (Scaled(torch.tanh) if owns else Net(lambda m,
        x: m.last(m.first(x)))).double(), data()
    expected = model(x).detach()
    made = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    inputs, targets = next(iter(made[-1]))
    F.cross_entropy(made[0](inputs), targets).backward()
    assert copy.copy(made[0]) is model
    own = copy.deepcopy(made[0])
    assert type(own) is type(model)
    F.cross_entropy(own(x), y).backward() # As any other model's
    torch.testing.assert_close(own.eval()(x), expected)
    model.function, buffer = None, io.BytesIO() # It has no name that pickle knows
    torch.save(made[0], buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).state_dict().keys() == own.state_dict().keys()


class Forces(nn.Module):
    "A layer that is used for a gradient on the way, and again."
    def __init__(self):
        super().__init__()
        self.inner, self.energy, self.last = nn.Linear(5, 5), nn.Linear(5, 1), nn.Linear(5, 3)
    def forward(self, x):
        x = x.detach().requires_grad_()
        force, = torch.autograd.grad(self.energy(self.inner(x).tanh()).sum(), x)
        return self.last(self.inner(x).tanh() + force)


@WAYS
def test_layer_may_be_used_for_a_gradient_on_the_way(way):
    model, (x, y) = Forces().double(), data()
    expected, found = clipped_sum(model, x, y), one_step(model, way, x, y)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("what", BEYOND)
def test_a_record_that_is_not_finite_ends_no_look(what):
    x, y = data()
    with pytest.raises(ValueError, match="must see all of a sample's gradient"):
        one_step(Net(BEYOND[what]), "step", x.index_fill(0, torch.tensor([2]), torch.nan), y)


def test_a_look_leaves_an_input_its_gradient():
    def adversarial(m, x):
        g, = torch.autograd.grad(F.cross_entropy(m.last(m.first(x).tanh()),
            torch.zeros(len(x), dtype=torch.long), reduction="sum"), x)
        return m.last(m.first(x + .01*g.sign()).tanh())
    x, y = data()
    one_step(Net(adversarial), "step", x.requires_grad_(True), y)


def test_looks_take_other_samples_in_turn():
    model = nn.Linear(5, 3)
    looks, found = SpotCheck(model, GradientRecorder(model)), []
    for _ in range(9):
        if looks.is_due(N): found.append(looks.sample(N))
        looks.count(N)
    assert found == [8, 9, 10, 12, 0] and looks.passes == (0, 9)


def test_a_step_counts_its_passes():
    model, (x, y) = nn.Linear(5, 3).double(), data()
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=N, noise_multiplier=1.)
    for rows in (1, N, N): step(nn.CrossEntropyLoss(), x[:rows], y[:rows])
    assert step.spot_check.passes == (1, 2)


@pytest.mark.parametrize("found, lone, fits", [(1., 1., True), (.9999, 1., False), (1.02, 1., True),
    (0., 1e-19, True), (torch.inf, 1e19, True), (torch.inf, 1., False)])
def test_a_norm_is_held_to_the_one_of_ordinary_differentiation(found, lone, fits):
    if fits: return _check_norm(found, lone)
    with pytest.raises(ValueError, match="must see all of a sample's gradient, got a norm of"):
        _check_norm(found, lone)


@pytest.mark.parametrize("found, lone, fits", [([1., 1e-7], [1., 0.], True),
    ([1., .02], [1., 0.], False), ([1., .005], [1., 0.], False),
    ([0., 1e-19], [1e-19, 0.], True),
    ([1., torch.inf], [1., 0.],
        True)])
def test_a_gradient_is_held_to_the_one_of_ordinary_differentiation(found, lone, fits):
    flat = torch.tensor(found, dtype=torch.float64)
    recorder = SimpleNamespace(flat=flat, slots=dict(weight=SimpleNamespace(shaped=flat)))
    if fits: return _check_direction(recorder, (torch.tensor(lone, dtype=torch.float64),))
    with pytest.raises(ValueError, match="got one that is 0.0.* of its norm away"):
        _check_direction(recorder, (torch.tensor(lone, dtype=torch.float64),))


class MaskedScores(ConditionedNet):
    def forward(self, x):
        out = super().forward(x)
        return out, out.sum(1).masked_fill(torch.ones(len(x), dtype=torch.bool), -torch.inf)


def test_one_number_that_is_not_finite_ends_no_look():
    model, (x, y) = MaskedScores().double(), data()
    module, *_ = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.raises(ValueError, match="must see all of a sample's gradient"): module(x)


def test_outputs_without_a_batch_in_front_warn_once():
    model, (x, y) = Net(lambda m, x: m.last(m.first(x)).T).double(), data()
    module, *_ = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), noise_multiplier=1., max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=N))
    with pytest.warns(UserWarning, match="no output of the module has the batch in front"):
        module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2): module(x)


def test_derivative_as_output_is_refused_where_it_hides_a_layer():
    def forced(m, x):
        x = x.detach().requires_grad_(True)
        return m.last(x + 1e-6*torch.autograd.grad(m.first(x).sum(), x, create_graph=True)[0])
    with pytest.raises(ValueError, match="as where a derivative is part of the loss"):
        one_step(Net(forced), "step", *data())
