"""Learning rates of linear heads on features, tried on training records that are held out.

Papers sad (HAM10000 by lesion) and adaptive_noise (CIFAR-10): DP-SGD at every rate and, for sad,
its own method, seeds from 1000 up. A fifth of the lesions, or a tenth of the images, is held out.
The test images are not looked at. Tries in results/bench/feature_rates.json are not made again.

    DP_COMPANION_DATA=... python tests/bench/feature_rates.py
"""
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dp_companion.papers.adaptive_noise.grid import adaptive_profile, adaptive_values
from dp_companion.papers.sad.grid import sad_profile, sad_values
from dp_companion.training.datasets import load_dataset
from dp_companion.training.grid import specs_of
from dp_companion.training.records import write_json
from dp_companion.training.stacked import train_stacked

PLACE = Path(__file__).parents[2]/"results"/"bench"/"feature_rates.json"
TRIES = (
    *(("sad", "DP-SGD", 3., 2.**k) for k in (-7, -5, -3, -2, -1, 1, 3)),
    *(("sad", "SAD-DPSGD", 3., 2.**k) for k in (-7, -5, -3, -2, -1, 1, 3)),
    *(("sad", m, 16., 2.**k) for m in ("DP-SGD", "SAD-DPSGD") for k in (-7, -5, -3, -2, -1)),
    *(("adaptive_noise", "DP-SGD", 1., 2.**k) for k in (-1, 1, 3)),
    *(("adaptive_noise", "DP-SGD", t, 2.**k) for t in (.5, 10.) for k in (-5, -3, -1)),
)
PROFILES = {"sad": (sad_profile("laptop"), sad_values, 3),
            "adaptive_noise": (adaptive_profile("laptop", "CIFAR-10"), adaptive_values, 2)}


def held_out(data):
    "Which training records are held out."
    if data.train_units is not None:
        lesions = np.unique(data.train_units.numpy())
        chosen = np.random.default_rng(0).permutation(lesions)[:len(lesions)//5]
        return torch.from_numpy(np.isin(data.train_units.numpy(), chosen))
    count = len(data.train_labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return torch.isin(torch.arange(count), order[:count//10])


def without(data, out):
    "The data with the records that are held out as the test set."
    units = None if data.train_units is None else data.train_units[~out]
    return replace(data, train_images=data.train_images[~out], train_units=units,
                   train_labels=data.train_labels[~out], test_images=data.train_images[out],
                   test_labels=data.train_labels[out])


def accuracies(paper, method, target, rate, data, runs):
    profile, values_of, seeds = PROFILES[paper]
    size = replace(profile, seeds=seeds, learning_rate=rate, dataset_size=len(data.train_labels))
    (specs,) = specs_of(size, [(values_of(size, method), "certified", target)], runs=runs)
    tried = [spec.varied(seed=1000 + spec.seed) for spec in specs]
    return [round(r.final["test_accuracy"], 4) for r in train_stacked(tried, runs, data)]


if __name__ == "__main__":
    data = {}
    for paper, method, target, rate in TRIES:
        said = {"paper": paper, "method": method, "epsilon": target, "rate": rate}
        found = json.loads(PLACE.read_text()) if PLACE.exists() else []
        if any(said.items() <= row.items() for row in found): continue
        if paper not in data:
            whole = load_dataset(PROFILES[paper][0].dataset)
            data = {paper: without(whole, held_out(whole))}
        with tempfile.TemporaryDirectory() as runs:
            row = said | {"accuracies": accuracies(*said.values(), data[paper], Path(runs))}
        write_json(PLACE, [*found, row])
        print(row, flush=True)
