"Measure the accountants: python tests/bench/budgets.py"
import subprocess
import sys
import time
from functools import partial

from dp_companion.budgets.certified import _CALIBRATORS, calibrate, certify
from dp_companion.budgets.events import gaussian_events
from dp_companion.budgets.schedules import LinearDecay, PoissonPlan, StepDecay

PLAN = PoissonPlan(dataset_size=60000, expected_batch_size=64, epochs=100)
STEP = StepDecay(initial=1, decay_rate=0.5, drop_every=10)
LINEAR = LinearDecay(initial=1, decay_rate=0.97)


def seconds(work, repeats=1):
    "Least wall time of `repeats` runs, and the last result."
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        spans.append(time.perf_counter() - start)
    return min(spans), result


def import_time(module, absent):
    "Seconds of one import in a fresh process (least of three), and which of `absent` it loads."
    code = (f"import sys, time; t = time.perf_counter(); import {module}; "
            f"print(time.perf_counter() - t, *[m for m in {absent!r} if m in sys.modules])")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            .stdout.split() for _ in range(3)]
    return min(float(run[0]) for run in runs), runs[0][1:]


def rows():
    "What was measured, its seconds, its limit, and the result."
    for module in ("dp_companion.budgets", "dp_companion.budgets.certified"):
        took, loaded = import_time(module, ("torch", "opacus", "dp_accounting"))
        yield (f"import {module}", took, 0.5, f"loads {', '.join(loaded)}" if loaded
               else "without torch, opacus, dp_accounting")
    for sigma in (0.1916, 1.906, 17.98):
        events = gaussian_events(STEP.rescaled(sigma), PLAN)
        for accountant, limit, repeats in (("rdp", 0.05, 5), ("pld", 3, 1)):
            took, got = seconds(partial(certify, events, delta=1e-5, accountants=(accountant,)),
                                repeats)
            yield (f"epsilon by {accountant}, step decay from {sigma}", took, limit,
                   f"{got[accountant].epsilon:,.4f}")
    for target in (1, 8):
        for accountant in _CALIBRATORS:
            took, sigma = seconds(partial(calibrate, STEP, PLAN, target_epsilon=target, delta=1e-5,
                                          accountant=accountant))
            yield (f"calibration by {accountant} to {target}, step decay", took,
                   20 if accountant == "pld" else 1, f"{sigma:.4f}")
    took, sigma = seconds(partial(calibrate, LINEAR, PLAN, target_epsilon=8, delta=1e-5,
                                  accountant="rdp"))
    yield "calibration by rdp to 8, linear decay (100 phases)", took, 1, f"{sigma:.4f}"


if __name__ == "__main__":
    print(f"{'measure':<52} {'seconds':>9} {'limit':>6}  result")
    for name, took, limit, result in rows():
        print(f"{name:<52} {took:>9.4f} {limit:>6}  {result}{'' if took <= limit else '  OVER'}",
              flush=True)
