"""A search on CIFAR-10 for a recipe in which the layer of paper sanitization keeps all ten classes.

Layer as printed (σ = 1, C = 0.5, n = 50), the CNN of half width, cross-entropy, Adam or SGD. What
varies: what stands between the last weights and the clip, learning rate, batch, schedule, epochs.
Each recipe takes minutes; finished ones are found in results/bench/layer_search.json.

    DP_COMPANION_DATA=... python tests/bench/layer_search.py
"""
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, layer_norm

from dp_companion.algorithms.sanitization import SanitizationLayer, sanitization_cnn
from dp_companion.training.datasets import load_dataset
from dp_companion.training.models import HALF_FILTERS
from dp_companion.training.records import write_json

PLACE = Path(__file__).parents[2]/"results"/"bench"/"layer_search.json"
CLIP, WIDTH = .5, 50


class Rows(nn.Module):
    "What stands between the last weights and the clip, as a function of rows."
    def __init__(self, function):
        super().__init__()
        self.forward = function


def batch_norm(std):
    return nn.Sequential(nn.BatchNorm1d(WIDTH, affine=False), Rows(lambda x: std*x))


BELOW_THE_CLIP = {
    "as they are": lambda: Rows(lambda x: x),
    "tanh": lambda: Rows(lambda x: CLIP*torch.tanh(x/CLIP)),
    "straight-through": lambda: Rows(lambda x: x + (x.clamp(-CLIP, CLIP) - x).detach()),
    "layer norm to C": lambda: Rows(lambda x: CLIP*layer_norm(x, x.shape[1:])),
    "batch norm to C": lambda: batch_norm(CLIP),
    "batch norm to 2C": lambda: batch_norm(2*CLIP),
    "batch norm to C, tanh": lambda: nn.Sequential(
        batch_norm(CLIP), Rows(lambda x: CLIP*torch.tanh(x/CLIP))),
}
NAMES = ("rows", "optimizer", "learning_rate", "batch_size", "schedule", "epochs", "seed")
RECIPES = (
    ("as they are", "adam", 1e-4, 64, "cosine", 4, 0),
    ("batch norm to C", "adam", 1e-3, 64, "cosine", 4, 0),
    ("tanh", "adam", 1e-3, 64, "cosine", 4, 0),
    ("straight-through", "adam", 1e-3, 64, "cosine", 4, 0),
    ("as they are", "adam", 1e-4, 512, "one_cycle", 4, 0),
    *(("batch norm to C", "adam", 3e-4, 256, "one_cycle", 4, seed) for seed in range(10)),
    ("as they are", "sgd", 1e-2, 64, "cosine", 4, 0),
    ("layer norm to C", "adam", 1e-3, 64, "cosine", 4, 0),
    ("batch norm to C, tanh", "adam", 1e-3, 256, "one_cycle", 4, 0),
    ("batch norm to C", "adam", 3e-4, 256, "one_cycle", 10, 0),
    ("batch norm to 2C", "adam", 3e-4, 256, "one_cycle", 10, 0),
    ("batch norm to C", "adam", 6e-4, 512, "one_cycle", 10, 0),
    ("batch norm to C", "adam", 3e-4, 1024, "one_cycle", 8, 0),
    *(("batch norm to 2C", "adam", 1e-4, 256, "one_cycle", 8, seed) for seed in range(10)),
)


def network(rows):
    layer = nn.Sequential(BELOW_THE_CLIP[rows](), SanitizationLayer(WIDTH, CLIP, 1.))
    return sanitization_cnn(WIDTH, sanitization=layer, image_size=32, channels=3,
                            filters=HALF_FILTERS).to(memory_format=torch.channels_last)


def optimizer_of(model, name, rate, schedule, steps):
    if name == "adam": made = torch.optim.Adam(model.parameters(), rate, fused=True)
    else: made = torch.optim.SGD(model.parameters(), rate, momentum=.9)
    if schedule == "cosine":
        return made, torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)
    return made, torch.optim.lr_scheduler.OneCycleLR(made, rate, total_steps=steps, pct_start=.2)


@torch.no_grad()
def accuracies(model, data):
    "Of each class of the test images."
    model.eval()
    found = torch.cat([model(images).argmax(1) for images in data.test_images.split(1000)])
    return [(found == k)[data.test_labels == k].float().mean().item() for k in range(10)]


def trained(data, rows, optimizer, learning_rate, batch_size, schedule, epochs, seed):
    torch.manual_seed(seed)
    model = network(rows)
    steps = len(data.train_labels)//batch_size
    descend, rate = optimizer_of(model, optimizer, learning_rate, schedule, steps*epochs)
    course = []
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(data.train_labels))
        for at in order[:steps*batch_size].split(batch_size):
            descend.zero_grad()
            cross_entropy(model(data.train_images[at]), data.train_labels[at]).backward()
            descend.step()
            rate.step()
        of_class = accuracies(model, data)
        course.append(round(sum(of_class)/10, 3))
    return {"accuracy_by_epoch": course, "least_class": round(min(of_class), 3),
            "never_predicted": sum(a == 0 for a in of_class)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = load_dataset("cifar10")
    for recipe in RECIPES:
        said = dict(zip(NAMES, recipe))
        found = json.loads(PLACE.read_text()) if PLACE.exists() else []
        if any(said.items() <= row.items() for row in found): continue
        row = said | trained(data, *recipe)
        write_json(PLACE, [*found, row])
        print(row, flush=True)
