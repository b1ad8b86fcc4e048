"What the sanitization layer adds to a training step: the median ratio of two steps of one network, with and without it, in one process."
import statistics
import time

import torch
from torch import nn

from dp_companion.algorithms.sanitization import SanitizationLayer, sanitization_cnn


def seconds(model, optimizer, images, labels):
    start = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    return time.process_time() - start


def main(batch=64, steps=33, warm_up=3):
    torch.manual_seed(0)
    models = [sanitization_cnn(50, sanitization=s) for s in (SanitizationLayer(50, .5, 1., .2), nn.Identity())]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
    pairs = [[seconds(m, o, images, labels) for m, o in zip(models, optimizers)] for _ in range(steps)][warm_up:]
    print(f"CNN, batch {batch}: step with the layer over step without, median of {len(pairs)}: {statistics.median(a/b for a, b in pairs):.3f} (goal 1.05)")


if __name__ == "__main__": main()
