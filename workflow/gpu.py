"""What a few minutes on a GPU are for: checks, step times, and Table 4 in the paper's own regime.

`make gpu` runs it; `make gpu DEVICE=cpu` does the same in small, on the processor. It needs Python,
torch and the wheels of workflow/gpu_wheels.sh. All that it finds is in one folder, to be committed
as it is: machine.json, log.txt, checks.txt, step_times.json, table4.csv and records/. Unfinished
runs keep their checkpoints in runs/, and the same command goes on with them.
"""
import argparse
import configparser
import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
CHECKS = ("tests/algorithms/test_devices.py", "tests/algorithms/test_private_step.py",
          "tests/training/test_run.py")
METHODS = ("DP-SGD-Global-Adapt-V2-S", "DP-SGD", "Auto-S", "DP-PSAC", "DP-SGD-Global",
           "DP-SGD-Global-Adapt")
SHARED_GPU = 1.3 # how much longer a step takes beside other processes, by guess
WIND_UP = 12 # seconds at the end, for records, the table and the log


class Clock:
    "The time that is left of a budget."
    def __init__(self, minutes): self.start, self.end = time.time(), time.time() + 60*minutes
    def left(self, share=1.): return max(share*(self.end - WIND_UP - time.time()), 1.)


def say(out, text):
    "One line to the log and to whoever watches."
    line = f"{time.strftime('%H:%M:%S')} {text}"
    print(line, flush=True)
    with (out/"log.txt").open("a") as log: log.write(line + "\n")


def started(command, log, **environment):
    "A process of its own group, whose words go to a file."
    place = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
    return subprocess.Popen([sys.executable, *map(str, command)], cwd=HERE, env=place,
                            stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)


def waited(process, seconds):
    "Its exit status; None where it had to be ended."
    try: return process.wait(seconds)
    except subprocess.TimeoutExpired: os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def is_there(name):
    "Whether a distribution is installed."
    try: return bool(version(name))
    except PackageNotFoundError: return False


def use_carried(wheels, site):
    "Install what the machine lacks from a folder of wheels, beside everything that it has."
    places = [str(HERE), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"], sys.path[:0] = os.pathsep.join(places), places[:2]
    lacking = [path for path in sorted(wheels.glob("*.whl"))
               if not is_there(path.name.split("-")[0].replace("_", "-"))]
    if lacking:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index",
                        "--no-deps", "--no-compile", "--target", site, *lacking], check=True)
    if not is_there("dp-companion"):
        said = configparser.ConfigParser(delimiters=["="], interpolation=None)
        said.read(HERE/"settings.ini", encoding="utf-8")
        known = said["DEFAULT"]["version"]
        (folder := site/f"dp_companion-{known}.dist-info").mkdir(parents=True, exist_ok=True)
        (folder/"METADATA").write_text(f"Metadata-Version: 2.1\nName: dp-companion\n"
                                       f"Version: {known}\n")
    if (wheels/"commit").exists():
        os.environ.setdefault("DP_COMPANION_COMMIT", (wheels/"commit").read_text().strip())


def machine(device):
    "What a reader must know of the machine."
    import torch
    from dp_companion.training.records import provenance
    found = provenance(device) | {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
                                  "system": platform.platform(), "opacus": version("opacus")}
    if device == "cpu": return found
    gpu = torch.cuda.get_device_properties(device)
    return found | {"gpu": gpu.name, "memory_gb": round(gpu.total_memory/2**30),
                    "cuda": torch.version.cuda, "bf16": torch.cuda.is_bf16_supported(),
                    "tf32_convolutions": torch.backends.cudnn.allow_tf32}


def check(device, out, clock, is_small):
    "The tests of the device, beside the CPU."
    chosen = ["-k", "cuda or memory_format or devices"] if device != "cpu" else []
    files = CHECKS[:1] if is_small or device == "cpu" else CHECKS
    process = started(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen],
                      out/"checks.txt", DP_COMPANION_DEVICE=device)
    status = waited(process, clock.left(.25))
    last = (out/"checks.txt").read_text().strip().splitlines()[-1:]
    say(out, f"checks: {'cut off' if status is None else ''.join(last)}")
    return status


def measure(device, out, clock, is_small):
    "Step times beside an ordinary step, Opacus's hooks and its ghost clipping."
    rows, steps = ("mnist-64", 2) if is_small else ("mnist,cifar,resnet", 30)
    only = ["--only", "book;ghost;hooks", "--threads", 1] if is_small else []
    process = started(["tests/bench/private_step.py", "--rows", rows, "--steps", steps, "--device",
                       device, "--times-only", "--json", out/"step_times.json", *only],
                      out/"step_times.txt")
    status = waited(process, clock.left(.4 if is_small else .25))
    say(out, f"step times: {'cut off' if status is None else (out/'step_times.txt').name}")
    return status


def table4(runs, is_small):
    "The runs of Table 4 by their worth: the headline's cells and all of their seeds first."
    from dataclasses import replace
    from dp_companion.papers.global_adapt_v2.grid import method_specs, profile_named
    size = profile_named("digits" if is_small else "paper")
    if is_small: size = replace(size, epochs=2, drop_every=1, seeds=2)
    cells = [(1., METHODS[:2])] if is_small else [(1., METHODS[:2]), (1., METHODS[2:])] + [
        (target, METHODS) for target in (3., 8., 5., 10.)]
    return [spec for target, methods in cells for spec in method_specs(size, targets=(target,),
        methods=methods, accountings=("as_printed",), runs=runs, workers=1)]


def runs_of(names, out):
    "Specs by their names, in that order, and the data of all."
    from dp_companion.training.datasets import load_dataset
    from dp_companion.training.spec import spec_from_dict
    specs = [spec_from_dict(json.loads((out/"specs"/f"{name}.json").read_text())) for name in names]
    return specs, load_dataset(specs[0].dataset)


def chunks(values, size): return [values[k:k + size] for k in range(0, len(values), size)]


def step_time(specs, data, device, steps):
    "Milliseconds of a step of these runs together; of the first one alone where there is one."
    import torch
    from dp_companion.training import run as runs
    from dp_companion.training.stacked import _Stack
    made = [runs.Run(spec, data, device) for spec in specs]
    stack, times = _Stack(made) if len(made) > 1 else None, []
    for k, batches in enumerate(zip(*(run.training.batches for run in made))):
        if k == 2*steps: break
        sigmas, start = [float(run.training.multipliers[k]) for run in made], time.perf_counter()
        if stack: stack.step(list(batches), sigmas, stack.gradients.fixed_room)
        else: runs.step(made[0].training, batches[0], sigmas[0])
        if device != "cpu": torch.cuda.synchronize()
        times.append(1e3*(time.perf_counter() - start))
    late = sorted(times[len(times)//2:])
    return late[len(late)//2], bool(stack and stack.gradients.graph)


def try_stacks(names, out, device):
    "What a step of one run, and of several together, takes on this device."
    specs, data = runs_of(names, out)
    sizes, steps = (1, 2) if device == "cpu" else (1, 2, 3, 5), 2 if device == "cpu" else 20
    found = {size: step_time(specs[:size], data, device, steps) for size in sizes}
    content = {str(size): dict(zip(("step_ms", "is_graph"), of)) for size, of in found.items()}
    (out/"stack_times.json").write_text(json.dumps(content, indent=1) + "\n")


def best_stack(specs, device, out, clock):
    "The most runs at once that all end in the time that is left; else the most steps a second."
    from dp_companion.budgets.schedules import PoissonPlan
    process = started([__file__, "--try", *(spec.name for spec in specs[:5]), "--out", out,
                       "--device", device], out/"stack_times.txt")
    status = waited(process, clock.left(.3))
    if status != 0:
        say(out, f"stacks: not measured, {(out/'stack_times.txt').read_text().strip()[-300:]}")
        return 1
    took = {int(size): found["step_ms"]/1e3 for size, found
            in json.loads((out/"stack_times.json").read_text()).items()}
    size, batch = (1437, 64) if device == "cpu" else (60000, 64)
    steps = PoissonPlan(dataset_size=size, expected_batch_size=batch, epochs=specs[0].epochs).steps
    fit = [size for size, seconds in took.items() if SHARED_GPU*steps*seconds < clock.left()]
    chosen = max(fit) if fit else max(took, key=lambda size: size/took[size])
    said = ", ".join(f"{size}: {1e3*seconds:.1f} ms" for size, seconds in took.items())
    say(out, f"stacks: a step of 1 or more runs takes {said}; {chosen} together")
    return chosen


def train_until(names, out, until, stack):
    "Train stacks one after the other; stop between two epochs when another would end too late."
    import torch
    from dp_companion.training.stacked import train_stacked
    from dp_companion.training.training import train
    torch.set_num_threads(1)
    (specs, data), last = runs_of(names, out), [time.time(), 0.]

    def told(done, epochs):
        last[:] = time.time(), max(time.time() - last[0], last[1])
        if done < epochs and time.time() + 1.2*last[1] > until: raise SystemExit(0)
    for together in chunks(specs, stack):
        last[:] = time.time(), 0.
        if len(together) == 1: train(together[0], out/"runs", data, told)
        else: train_stacked(together, out/"runs", data, told)


def train_table(device, out, clock, is_small):
    "As many runs as the time allows: some together in a process, and processes side by side."
    from dp_companion.papers.grids import write_specs
    workers = 1 if is_small else max(1, min(6, len(os.sched_getaffinity(0)) - 2))
    specs = table4(out/"runs", is_small)
    write_specs(specs, out/"specs")
    stack = best_stack(specs, device, out, clock)
    until, groups = clock.end - WIND_UP, chunks(specs, stack)
    say(out, f"table 4: {len(specs)} runs, {workers} processes, {clock.left():.0f} s")
    shares = [[spec.name for group in groups[k::workers] for spec in group] for k in range(workers)]
    processes = [started([__file__, "--train", *share, "--out", out, "--until", until, "--stack",
                          stack], out/f"train_{k}.txt", DP_COMPANION_DEVICE=device)
                 for k, share in enumerate(shares) if share]
    statuses = [waited(process, max(until + WIND_UP/2 - time.time(), 1)) for process in processes]
    failed = [k for k, status in enumerate(statuses) if status not in (0, None)]
    for k in failed: say(out, f"process {k}: {(out/f'train_{k}.txt').read_text().strip()[-300:]}")
    for k in set(range(len(processes))) - set(failed): (out/f"train_{k}.txt").unlink()
    write_table(specs, out)
    return len(failed)


def progress(spec, runs):
    "(epochs that are done, the last of them) of a run, whether its record is there or not."
    from dp_companion.algorithms.checkpoints import read_checkpoint
    from dp_companion.training.records import find_record, record_path
    record = find_record(spec, runs)
    if record: return record.epochs
    path = record_path(spec, runs).with_name("checkpoint.pt")
    return read_checkpoint(path)["epochs"] if path.exists() else []


def write_table(specs, out):
    "One row a run that has begun, and the whole records by themselves."
    from dp_companion.training.records import record_path
    (out/"records").mkdir(exist_ok=True)
    whole = 0
    with (out/"table4.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("method", "target_epsilon", "seed", "run", "epochs_done", "epochs",
                        "test_accuracy"))
        for spec in specs:
            if not (epochs := progress(spec, out/"runs")): continue
            table.writerow((spec.method.name, spec.target_epsilon, spec.seed, spec.name,
                            len(epochs), spec.epochs, round(epochs[-1]["test_accuracy"], 4)))
            if not (path := record_path(spec, out/"runs")).exists(): continue
            shutil.copyfile(path, out/"records"/f"{spec.name}.json")
            whole += 1
    say(out, f"table 4: {whole} of {len(specs)} records; the others' epochs are in table4.csv")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for small sizes")
    parser.add_argument("--minutes", type=float, default=8., help="for everything")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--wheels", type=Path, default=HERE/"gpu_wheels", help="what the "
                        "machine may lack, from workflow/gpu_wheels.sh")
    parser.add_argument("--parts", default="checks,times,table", help="which of these to do")
    for name in ("--train", "--try"): parser.add_argument(name, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--stack", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.train: return train_until(args.train, args.out, args.until, args.stack)
    if tried := vars(args)["try"]: return try_stacks(tried, args.out, args.device)
    clock, is_small = Clock(args.minutes), args.device == "cpu"
    use_carried(args.wheels, args.wheels.with_name("gpu_site"))
    args.out.mkdir(parents=True, exist_ok=True)
    known = machine(args.device)
    (args.out/"machine.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    say(args.out, f"{known.get('gpu', 'no GPU')}, {known['cores']} cores, {args.minutes:g} minutes")
    parts = {"checks": check, "times": measure, "table": train_table}
    failed = [parts[name](args.device, args.out, clock, is_small) != 0
              for name in args.parts.split(",")]
    say(args.out, f"{(time.time() - clock.start)/60:.1f} minutes")
    sys.exit(int(any(failed)))


if __name__ == "__main__": main()
