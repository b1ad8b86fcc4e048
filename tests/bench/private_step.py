"""Time of one private step over one ordinary step.

`python tests/bench/private_step.py [--rows mnist,cifar,resnet] [--steps 30]`

One process, two threads, the variants taken in turn, medians after warm-up; noise and optimizer
step included; the C library's memory is kept in the process for all variants unless
--default-memory is given.
"""
import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

sys.path.insert(0, str(Path(__file__).parents[1]))
from networks import (
    batch, cifar_cnn, group_norm_resnet18, mnist_cnn, opacus_resnet18, opacus_small_image_resnet18,
    opacus_transformer, small_image_resnet18, transformer
)
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep, keep_freed_memory
from dp_companion.files import write_whole

ROWS = {  # name: network, batch, goal where one was set; network for Opacus
    "mnist-64": (mnist_cnn, 64, 1.30, mnist_cnn), "mnist-256": (mnist_cnn, 256, 1.20, mnist_cnn),
    "cifar-64": (cifar_cnn, 64, 1.40, cifar_cnn), "cifar-256": (cifar_cnn, 256, 1.30, cifar_cnn),
    "resnet-32": (small_image_resnet18, 32, 1.35, opacus_small_image_resnet18),
    # an eighth of the time for as many weights
    "pooled-resnet-32": (group_norm_resnet18, 32, None, opacus_resnet18),
    "transformer-32": (transformer, 32, 1.35, opacus_transformer),
}
OPACUS = dict(noise_multiplier=1., max_grad_norm=1.)


def sgd(model): return torch.optim.SGD(model.parameters(), lr=1e-4)


def ordinary(model, x, y):
    "An ordinary step."
    optimizer, loss = sgd(model), nn.CrossEntropyLoss()
    def step():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return step


def book(model, x, y, **noise):
    "This package's step."
    private = PrivateStep(model, sgd(model), clip_rule=Flat(), expected_batch_size=len(x),
                          noise_multiplier=1., **noise)
    step = lambda: private(nn.CrossEntropyLoss(), x, y)
    step.private = private
    return step


def hooks(model, x, y):
    "Opacus's step on per-sample gradients."
    model, loss = GradSampleModule(model), nn.CrossEntropyLoss()
    optimizer = DPOptimizer(sgd(model), expected_batch_size=len(x), **OPACUS)
    def step():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return step


def ghost(model, x, y):
    "Opacus's step with ghost clipping."
    model = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.)
    optimizer = DPOptimizerFastGradientClipping(sgd(model), expected_batch_size=len(x), **OPACUS)
    loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
    def step():
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return step


def variants(build, opacus_build, size, device="cpu"):
    "Name -> step, each on a network of its own with the same weights."
    x, y = (values.to(device) for values in batch(build, size))
    torch.manual_seed(0)
    model = build().to(device)
    last = lambda t: t.to(memory_format=torch.channels_last) if x.dim() == 4 else t
    other = opacus_build().to(device)
    if build is not transformer: other.load_state_dict(model.state_dict()) # Else others' names
    new = lambda: copy.deepcopy(model)
    return {
        "ordinary": ordinary(new(), x, y), "book": book(new(), x, y,
            generator=torch.Generator().manual_seed(0)),
        "book, secure": book(new(), x, y, secure_noise=True),
        "ordinary, channels-last": ordinary(last(new()), last(x), y),
        "book, channels-last": book(last(new()), last(x), y, secure_noise=True),
        "ghost": ghost(copy.deepcopy(other), x, y), "hooks": hooks(copy.deepcopy(other), x, y),
    }


def finished(device):
    "Wait for what was given to a GPU."
    if device != "cpu": torch.cuda.synchronize()


def medians(steps, repeats, warm_up, device="cpu"):
    "Name -> median and least seconds, the variants taken in turn."
    times = {name: [] for name in steps}
    for turn in range(warm_up+repeats):
        for name, step in steps.items():
            finished(device)
            start = time.perf_counter()
            step()
            finished(device)
            if turn >= warm_up: times[name].append(time.perf_counter()-start)
    return {name: statistics.median(values) for name, values in times.items()}, {name: min(values)
        for name, values in times.items()}


def row(name, repeats, only, device="cpu"):
    "Ratios to the ordinary step of one network and batch."
    build, size, goal, opacus_build = ROWS[name]
    steps = {k: v for k, v in variants(build, opacus_build, size, device).items()
             if not only or k in only or k == "ordinary"}
    seconds, fastest = medians(steps, repeats, warm_up=5, device=device)
    ratios = {k: round(v/seconds["ordinary"], 4) for k, v in seconds.items()}
    lowest = {k: round(v/fastest["ordinary"], 4) for k, v in fastest.items()}
    kernels = {k: s.private.kernels for k, s in steps.items() if hasattr(s, "private")}
    return dict(row=name, goal=goal, ordinary_ms=round(1e3*seconds["ordinary"], 2), ratios=ratios,
                lowest=lowest, kernels=kernels)


def peak_memory(variant, build, size):
    "Peak sums of live tensor bytes, parameters and batch included: of most steps, of all nine."
    torch.set_num_threads(2)
    looks = (1, 2, 3, 5, 9) # When the engine looks whether samples meet
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        step = {"ordinary": ordinary, "book": book}[variant](build(), *batch(build, size))
        for k in range(1, 10):
            with torch.profiler.record_function("look" if k in looks else "step"): step()
    live, kind, peaks = 0, "look", dict(step=0, look=0)
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() in peaks: kind = event.name()
        if event.name() == "[memory]":
            live += event.nbytes()
            peaks[kind] = max(peaks[kind], live)
    return dict(variant=variant, peak_mb=peaks["step"]/2**20,
                with_looks_mb=max(peaks.values())/2**20)


def processor(device="cpu"):
    "What the machine, or its GPU, calls itself."
    if device != "cpu": return torch.cuda.get_device_name(device)
    try:
        found = [line.split(":", 1)[1].strip()
                 for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")]
    except OSError: found = []
    return found[0] if found else platform.processor() or platform.machine()


def rates(device="cpu"):
    "Billions of operations a second in a matrix product and an equal convolution; they can differ."
    x, w, a, b = (torch.randn(*size, device=device)
                  for size in ((32, 64, 32, 32), (64, 64, 3, 3), (64, 32*1024), (32*1024, 576)))
    with torch.no_grad():
        _, fastest = medians({"product": lambda: a @ b, "convolution": lambda: nn.functional.conv2d(
            x, w, padding=1)}, repeats=20, warm_up=3, device=device)
    return {name: round(2e-9*a.numel()*b.shape[1]/seconds) for name, seconds in fastest.items()}


def memory(name):
    "Peak memory of the ordinary and of the private step, each in a process of its own."
    command = [sys.executable, __file__, "--peak"]
    return [json.loads(subprocess.run([*command, f"{name}:{v}"], check=True, capture_output=True,
                                      text=True).stdout.splitlines()[-1])
            for v in ("ordinary", "book")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--only", default="", help="variants, separated by ;")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1, help="measure every row so often, and "
                        "keep the round with the fastest ordinary step: the one least disturbed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--default-memory", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, where the file has no "
                        "peak memory")
    parser.add_argument("--times-only", action="store_true", help="no peak memory in that file")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--kernels", action="store_true", help="print the chosen kernels")
    parser.add_argument("--json", type=Path, help="write the rows with the machine's description "
                        "to this file, for the page of step times")
    parser.add_argument("--peak", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        name, variant = args.peak.split(":")
        return print(json.dumps(peak_memory(variant, ROWS[name][0], ROWS[name][1])))
    names = [name for name in ROWS if any(name.startswith(word) for word in args.rows.split(","))]
    if args.memory:
        for name in names:
            for found in memory(name): print(name, found, flush=True)
        return
    torch.set_num_threads(args.threads)
    if not args.default_memory: keep_freed_memory()
    settings = "default memory settings" if args.default_memory else "freed memory kept"
    print(f"{processor(args.device)}, torch {torch.__version__}, {torch.get_num_threads()} "
          f"threads, {settings}, medians of {args.steps}")
    rows = []
    for name in names:
        only = [word for word in args.only.split(";") if word]
        found = min((row(name, args.steps, only, args.device) for _ in range(args.rounds)),
                    key=lambda r: r["ordinary_ms"])
        rows.append(found)
        print(f"{found['row']}: goal {found['goal']}, ordinary {found['ordinary_ms']} ms, "
              f"{found['ratios']}; of the least times {found['lowest']}", flush=True)
        if args.kernels: print(found["kernels"], flush=True)
    if args.json:
        measured = () if args.times_only or args.device != "cpu" else ("mnist-64", "mnist-256")
        content = dict(processor=processor(args.device), rates=rates(args.device),
                       instructions=torch.backends.cpu.get_cpu_capability(),
                       cores=len(os.sched_getaffinity(0)), torch=torch.__version__,
                       opacus=version("opacus"), threads=args.threads,
                       freed_memory_kept=not args.default_memory, medians_of=args.steps,
                       rounds=args.rounds, rows=rows,
                       memory={name: memory(name) for name in measured})
        write_whole(args.json, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


if __name__ == "__main__": main()
