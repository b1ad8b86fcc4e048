"""What the sanitization layer adds to the time of a training step.

`python tests/bench/sanitization_layer.py [--json results/bench/sanitization_layer.json]`

The layer's median time alone, forward and backward on a batch's features, over the median step of
the network without it: one process, one thread, processor time. Comparing steps with and without
the layer does not measure it: steps of one network differ by more.
"""
import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from dp_companion.algorithms.private_step import keep_freed_memory
from dp_companion.algorithms.sanitization import (
    SanitizationLayer, sanitization_cnn, sanitization_resnet18
)
from dp_companion.files import write_whole

GOAL = 1.05
ROWS = {  # name: network around a layer, its width, shape of a batch, steps
    "CNN, MNIST, batch 64": (lambda layer: sanitization_cnn(50, sanitization=layer), 50,
                             (64, 1, 28, 28), 30),
    "CNN, CIFAR-10, batch 64": (lambda layer: sanitization_cnn(50, sanitization=layer,
        image_size=32, channels=3), 50, (64, 3, 32, 32), 30),
    "ResNet-18, CIFAR-10, batch 250": (lambda layer: sanitization_resnet18(sanitization=layer), 512,
                                       (250, 3, 32, 32), 5),
}


def seconds(step, times, warm_up=2):
    "Median processor time of a call."
    found = []
    for _ in range(times + warm_up):
        start = time.process_time()
        step()
        found.append(time.process_time() - start)
    return statistics.median(found[warm_up:])


def training_step(model, optimizer, images, labels):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


def measured(network, width, shape, steps):
    "Medians of the layer alone and of a step without it, in milliseconds."
    torch.manual_seed(0)
    model, layer, features = network(nn.Identity()), SanitizationLayer(width, .5, 1., .2,
        rows="nonnegative"), torch.randn(shape[0], width, requires_grad=True)
    optimizer, images, labels, above = torch.optim.Adam(model.parameters(), lr=1e-3), torch.randn(
        shape), torch.randint(10, shape[:1]), torch.randn(shape[0], width)
    return 1e3*seconds(lambda: layer(features).backward(above), 300), 1e3*seconds(
        lambda: training_step(model, optimizer, images, labels), steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = []
    for name, row in ROWS.items():
        layer, plain = measured(*row)
        rows.append({"row": name, "ratio": round(1 + layer/plain, 4), "layer_ms": round(layer, 3),
                     "plain_ms": round(plain, 1), "goal": GOAL, "steps": row[3]})
        print(f"{name}: {1 + layer/plain:.4f} of a step without the layer ({layer:.3f} ms more "
              f"than {plain:.1f} ms; goal {GOAL})", flush=True)
    if arguments.json:
        write_whole(arguments.json,
                    (json.dumps({"machine": platform.machine(), "torch": torch.__version__,
                                 "threads": 1, "rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__": main()
