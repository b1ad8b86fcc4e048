"""Time a seed of a linear head on MNIST: `python tests/bench/head_seeds.py RUNS`.

Scattering features of the real images, computed into the folder RUNS where they are not yet there;
30 epochs, expected batch 4,096. Seed 0 alone on one core, then ten seeds at once on two, by the
clock; the machine must do nothing else. A row goes to results/bench/head_seeds.json.
"""
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path

from dp_companion.budgets.schedules import Constant
from dp_companion.training.features import load_features
from dp_companion.training.heads import HeadSpec, train_heads
from dp_companion.training.records import write_json

TO = Path(__file__).parents[2]/"results/bench/head_seeds.json"
SPEC = HeadSpec(dataset="mnist", extractor="scattering", noise=Constant(initial=4.), epochs=30,
                bounds=Constant(initial=1.), expected_batch_size=4096, learning_rate=4.)


def processor():
    "The name of the processor, as Linux gives it."
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")),
                platform.machine())


def timed(seeds, features, threads):
    start = time.perf_counter()
    return train_heads(SPEC, seeds, features, threads), time.perf_counter() - start


def main(runs):
    features = load_features("mnist", "scattering", Path(runs))
    alone, one = timed([0], features, 1)
    together, ten = timed(range(10), features, 2)
    assert together[0] == alone[0], "seed 0 must be the same alone and among ten"
    row = {"date": date.today().isoformat(), "processor": processor(),
           "one_alone_s": round(one, 1), "of_ten_s": round(ten/10, 1)}
    rows = json.loads(TO.read_text()) if TO.exists() else []
    write_json(TO, [*rows, row])
    print(row)


if __name__ == "__main__": main(sys.argv[1])
