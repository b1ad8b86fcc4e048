"Losses of a whole batch: none moves a clipped sum by more than one bound without a word."
import copy
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine

N, T, C = 12, 40, 5


def flat(z, y, **options): return F.cross_entropy(z.flatten(0, 1), y.flatten(), **options)
def valid(y): return (y != -100).unsqueeze(2)
def known(y): return y.clamp(min=0)
def each(z, y): return F.cross_entropy(z.transpose(1, 2), y, reduction="none")
def one_hot(y): return F.one_hot(known(y), C).to(torch.float64)*valid(y)


def masked(z, y): return (each(z, y)*valid(y)[..., 0]).sum()/valid(y).sum()
def masked_number(z, y): return each(z, y).sum()/int(valid(y).sum())
def masked_product(z, y): return each(z, y).sum()*(1/valid(y).sum().item())
def masked_rows(z, y): return (each(z, y)*(valid(y)[..., 0]/valid(y).sum())).sum()
def masked_select(z, y): return each(z, y)[valid(y)[..., 0]].mean()
def mean_of_masked(z, y): return each(z, y).mean()/valid(y).double().mean()
def mean_of_number(z, y): return each(z, y).mean()*(valid(y).numel()/int(valid(y).sum()))
def normalised(z, y): return (each(z, y)*(lambda w: w/w.mean())(valid(y)[..., 0].double())).mean()


def halved(z, y):
    loss = flat(z, y)
    loss /= 2
    loss.mul_(4)
    return loss


def divided_in_place(z, y):
    loss = each(z, y).sum()
    loss /= valid(y).sum()
    return loss


def numbered_in_place(z, y): return each(z, y).sum().div_(int(valid(y).sum()))


def classes_of_batch(z, y):
    counts = torch.bincount(known(y[:, 0]), minlength=C).double() + 1
    return F.cross_entropy(z[:, 0], known(y[:, 0]), weight=len(y)/counts)


def dice(z, y):
    p, t = z.softmax(2), one_hot(y)
    return 1 - 2*(p*t).sum()/(p.sum() + t.sum())


def dice_of_classes(z, y):
    p, t = z.softmax(2), one_hot(y)
    return (1 - 2*(p*t).sum((0, 1))/(p.sum((0, 1)) + t.sum((0, 1)) + 1)).mean()


def contrastive(z, y):
    h = F.normalize(z.mean(1), dim=1)
    return F.cross_entropy(h@h.T/.1, torch.arange(len(h)))


def pairs(z, y): return torch.pdist(z[:, 0]).mean()
def whitened(z, y): return flat((z - z.mean(0))/(z.std(0) + 1e-3), y)
def whitened_in_secret(z, y): return flat((z - z.detach().mean(0))/(z.detach().std(0) + 1e-3), y)
def hardest(z, y): return each(z, y).sum(1).topk(3)[0].mean()
def above_median(z, y): return (lambda x: x[x > x.median()].mean())(each(z, y).sum(1))
def log_of_mean(z, y): return each(z, y).mean().add(1).log()
def root_of_mean(z, y): return z.square().mean().sqrt()
def largest(z, y): return each(z, y).sum(1).max()
def focal_normalised(z, y):
    w = 1 - z.softmax(2).gather(2, known(y).unsqueeze(2))[..., 0].detach()
    return (each(z, y)*w).sum()/w.sum()
def variance(z, y): return z.var(0).mean() + each(z, y).mean()
def positives(z, y):
    t = one_hot(y)
    return F.binary_cross_entropy_with_logits(z, t, pos_weight=(t == 0).sum()/t.sum())
def weighted_bce(z, y):
    w = valid(y)/valid(y).double().mean()
    return F.binary_cross_entropy_with_logits(z, one_hot(y), weight=w.expand(z.shape))
def mixed(z, y): return .5*flat(z, y) + .5*z.square().sum()
def product(z, y): return flat(z, y)*z.square().mean()


LOSSES = {
    "valid tokens": flat, "valid tokens, classes second": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), y),
    "class weights": lambda z, y: flat(z, y, weight=torch.arange(1., C+1, dtype=torch.float64)),
    "smoothed": lambda z, y: flat(z, y, label_smoothing=.1),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(2).flatten(0, 1), y.flatten()),
    "shifted, as a language model's": lambda z, y: flat(z[:, :-1], y[:, 1:]),
} | {f.__name__: f for f in (masked, masked_number, masked_product, masked_rows, masked_select,
    mean_of_masked, mean_of_number, normalised, dice, dice_of_classes, contrastive, pairs, whitened,
    whitened_in_secret, hardest, above_median, log_of_mean, root_of_mean, largest, focal_normalised,
    variance, positives, weighted_bce, mixed, product, halved, divided_in_place,
    numbered_in_place)}
EXACT = {"valid tokens", "valid tokens, classes second", "nll", "class weights",
         "shifted, as a language model's", "halved"}


class Model(nn.Module):
    "One linear layer, with or without the loss inside."
    def __init__(self, loss=None):
        super().__init__()
        self.f, self.loss = nn.Linear(4, C, bias=False), loss
    def forward(self, x, y):
        z = self.f(x)
        return z if self.loss is None else (self.loss(z, y), z)


def records():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, T, 4, generator=g, dtype=torch.float64)*3
    y = torch.full((N, T), -100)
    y[:, 0], y[:, 1], y[0] = torch.arange(N) % 3, torch.arange(N) % C, 2
    return x, y


def clipped_sum(loss, inside, x, y):
    torch.manual_seed(0)
    model = Model(loss if inside else None).double()
    before = model.f.weight.detach().clone()
    private, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.), noise_multiplier=1e-12,
        max_grad_norm=.01, expected_batch_size=len(x),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)))
    for a, b in loader:
        found = private(a, b)
        (found[0] if inside else loss(found, b)).backward()
        optimizer.step()
        break
    return (before - model.f.weight.detach())*len(x)/.01


def said_or_moved(loss, inside):
    "In bounds, or the error."
    x, y = records()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try: return (clipped_sum(loss, inside, x, y) - clipped_sum(loss, inside, x[1:],
            y[1:])).norm().item()
        except ValueError as error: return str(error)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_moves_a_clipped_sum_beyond_one_bound(name, inside):
    found = said_or_moved(LOSSES[name], inside)
    if name in EXACT: assert isinstance(found, float), found
    assert isinstance(found, str) or found <= 1 + 1e-6


def alone(loss, x, y):
    torch.manual_seed(0)
    model, total = Model().double(), 0
    for k in range(len(x)):
        g, = torch.autograd.grad(loss(model(x[k:k+1], y[k:k+1]), y[k:k+1]), [model.f.weight])
        total = total + g*min(1, .01/g.norm())
    return total/.01


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", sorted(EXACT - {"class weights"}))
def test_mean_over_valid_tokens_is_loop_of_batches_of_one(name, inside):
    x, y = records()
    torch.testing.assert_close(clipped_sum(LOSSES[name], inside, x, y), alone(LOSSES[name], x, y),
                               rtol=1e-7, atol=1e-8)


def make(model, x, y, **options):
    return PrivacyEngine(secure_mode=False).make_private(module=model, noise_multiplier=1e-12,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.), max_grad_norm=.01,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), **options)


def test_one_loss_per_sample_is_always_right():
    x, y = records()
    torch.manual_seed(0)
    model = Model().double()
    before = model.f.weight.detach().clone()
    private, optimizer, loader = make(model, x, y)
    for a, b in loader:
        losses = each(private(a, b), b).sum(1)/valid(b).sum((1, 2))
        optimizer.backward(losses)
        optimizer.step()
    found = (before - model.f.weight.detach())*len(x)/.01
    torch.testing.assert_close(found, alone(flat, x, y), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("losses, text", [
    (lambda z, y: each(z, y).mean(), r"one loss per sample, of shape \(12,\), got shape \(\)"),
    (each, r"got shape \(12, 40\)"),
    (lambda z, y: (each(z, y) - each(z, y).mean(0)).square().sum(1), "depends on other samples"),
])
def test_what_is_no_loss_of_a_sample_is_refused(losses, text):
    x, y = records()
    private, optimizer, loader = make(Model().double(), x, y)
    a, b = next(iter(loader))
    with pytest.raises(ValueError, match=text): optimizer.backward(losses(private(a, b), b))


@pytest.mark.parametrize("backward", [
    lambda z: z.as_subclass(torch.Tensor).square().mean().backward(),
    lambda z: torch.autograd.grad(z.square().mean(), [z]),
])
def test_a_loss_that_nobody_read_makes_no_step(backward):
    x, y = records()
    private, optimizer, loader = make(Model().double(), x, y)
    a, b = next(iter(loader))
    z = private(a, b)
    backward(z)
    with pytest.raises(ValueError, match="got one that nobody could read|got neither or one"):
        optimizer.step()


@pytest.mark.parametrize("said, loss", [("sum", torch.mean), ("mean", torch.sum)])
def test_sum_that_was_announced_as_mean_is_refused_and_reverse(said, loss):
    x, y = records()
    private, optimizer, loader = make(Model().double(), x, y, loss_reduction=said)
    a, b = next(iter(loader))
    with pytest.raises(ValueError, match="loss_reduction must be what the loop's loss does"):
        loss(private(a, b).square()).backward()


def test_outputs_are_ordinary_tensors_to_the_loop():
    x, y = records()
    private, optimizer, loader = make(Model().double(), x, y)
    a, b = next(iter(loader))
    z = private(a, b)
    assert isinstance(z, torch.Tensor) and z.argmax(2).shape == b.shape
    assert z.detach().numpy().shape == z.shape and type(torch.stack([z, z]).sum().item()) is float
    copied = copy.deepcopy(z.detach())
    assert type(copied) is torch.Tensor and torch.equal(copied, z.detach())


PENALTIES = {
    "squares": lambda p: p.pow(2).sum(), "norm": lambda p: p.norm(),
    "sizes": lambda p: p.abs().sum(),
    "mean": lambda p: p.square().mean(), "largest": lambda p: p.abs().max(),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_is_told_of_weight_decay_which_works(penalty):
    model = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(N, 6), torch.arange(N) % 3)
    module, optimizer, loader = PrivacyEngine().make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1, weight_decay=1e-3), max_grad_norm=1.,
        data_loader=DataLoader(data, batch_size=N))
    for x, y in loader:
        loss = F.cross_entropy(module(x), y)
        with pytest.raises(ValueError, match="for a penalty on weights use the optimizer's "
                           "weight_decay"):
            (loss + 1e-3*sum(map(PENALTIES[penalty], model.parameters()))).backward()
            optimizer.step()
    for x, y in loader: # The advice works
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert optimizer.steps_taken >= 1


@pytest.mark.parametrize("page", ["index", "ways/use", "ways/reference", "own_methods", "travels"])
def test_page_with_a_loop_shows_one_loss_per_sample_first(page, root):
    cells = json.loads((root/"nbs"/f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code[:code.index(".backward(")].endswith("optimizer")
