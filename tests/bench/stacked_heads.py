"""Time of a step of stacked linear heads over one head: `python tests/bench/stacked_heads.py`.

Features of the size of CIFAR-10's, 50,000 of 1,280 numbers, made at random; batches of 64. One
thread, the three loops in turn, medians of the processor's time. On two cores ten seeds are two
processes of five each. A row goes to results/bench/stacked_heads.csv.
"""
import csv
import statistics
import time
from pathlib import Path

import torch

from dp_companion.training.datasets import Dataset
from dp_companion.training.run import Run, multipliers_ahead, step
from dp_companion.training.spec import run_spec
from dp_companion.training.stacked import _Stack

TO = Path(__file__).parents[2]/"results/bench/stacked_heads.csv"
BLOCKS, AT_ONCE = 60, {1: 8, 5: 4, 10: 2} # Steps of a block, by runs


def features():
    "50,000 vectors with labels."
    def made(count): return torch.randn(count, 1280, 1, 1), torch.randint(10, (count,))
    (train, labels), (test, test_labels) = made(50_000), made(1000)
    return Dataset(name="cifar10_efficientnet", train_images=train, train_labels=labels,
                   test_images=test, test_labels=test_labels, classes=10, source="random numbers")


def run_of(seed, data):
    return Run(run_spec(paper="global_adapt_v2", method="DP-SGD-Global-Adapt-V2",
        clip_rule="global_adapt_v2", strict_max_grad_norm=3., noise_multiplier=1.,
        dataset="cifar10_efficientnet", model="linear", accounting="as_printed", target_epsilon=3.,
        epochs=2, expected_batch_size=64, learning_rate=1e-4, seed=seed), data)


def steps_of_one(data):
    run = run_of(0, data)
    for batch, sigma in zip(run.training.batches, multipliers_ahead(run.training)):
        yield step(run.training, batch, sigma)


def steps_of_stack(count, data):
    stack = _Stack([run_of(seed, data) for seed in range(count)])
    for batches in zip(*(run.training.batches for run in stack.runs)):
        yield stack.step(list(batches), [1.]*count)


def seconds(steps, count):
    start = time.process_time()
    for _ in range(count): next(steps)
    return (time.process_time() - start)/count


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = features()
    loops = {1: steps_of_one(data), 5: steps_of_stack(5, data), 10: steps_of_stack(10, data)}
    found = {count: [] for count in loops}
    for _ in range(BLOCKS):
        for count, steps in loops.items(): found[count].append(seconds(steps, AT_ONCE[count]))
    one, five, ten = (1e3*statistics.median(found[count][5:]) for count in loops)
    row = {"one_ms": round(one, 2), "five_ms": round(five, 2), "ten_ms": round(ten, 2),
           "ten_on_one_core": round(ten/one, 2), "ten_on_two_cores": round(five/one, 2)}
    with TO.open("w", newline="") as file:
        table = csv.DictWriter(file, row, lineterminator="\n")
        table.writeheader()
        table.writerow(row)
    print(row)


if __name__ == "__main__": main()
