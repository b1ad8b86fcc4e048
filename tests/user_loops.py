"Networks, data and loops that the tests of the privacy engine share."
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dp_companion import PrivacyEngine
from dp_companion.budgets.schedules import Constant, LinearDecay, StepDecay


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


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
        nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)


def data(n=40): return TensorDataset(
    torch.randn(n, 1, 8, 8, generator=seeded(), dtype=torch.float64), torch.arange(n)%3)


def private(privacy=None, method="make_private", batch_size=8, dataset=None, model=None,
    secure_mode=False, optimizer=None, **options):
    "An engine, and what `make_private` gives for a small network."
    model, privacy = model or network(), privacy or PrivacyEngine(secure_mode=secure_mode)
    defaults = dict(max_grad_norm=.5)
    if method == "make_private" and "noise_schedule" not in options:
        defaults["noise_multiplier"] = 1.
    torch.manual_seed(1)
    found = getattr(privacy, method)(module=model, optimizer=optimizer
        or torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(dataset or data(), batch_size=batch_size), **{**defaults, **options})
    return privacy, *found


def train(model, optimizer, loader, criterion=nn.CrossEntropyLoss(), groups=None):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step(**({} if groups is None else {"groups": groups(y)}))


def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


SCHEDULES = [Constant(initial=2.), StepDecay(initial=2., decay_rate=.5, drop_every=2),
    LinearDecay(initial=2., decay_rate=.9, unit="step")]


def flat_data(n=40): return TensorDataset(
    torch.randn(n, 6, generator=seeded(), dtype=torch.float64), torch.arange(n)%3)


def flat_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(.5), nn.ReLU(), nn.Linear(8, 3)).double()


def loop():
    "Module, optimizer, criterion and loader of a tiny private loop."
    _, model, optimizer, loader = private(dataset=flat_data(), model=flat_network())
    return model, optimizer, nn.CrossEntropyLoss(), loader


class Noisy(torch.utils.data.Dataset):
    "A data set that augments its images where they are read."
    def __len__(self): return 40
    def __getitem__(self, i): return torch.randn(1, 8, 8, dtype=torch.float64), i % 3


def scaled_by_the_largest(records):
    x, y = default_collate(records)
    return x/x.abs().max(), y
