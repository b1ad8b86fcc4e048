"Committed records of real data are what the grids and calibrations ask for; the index lists all."
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.budgets.schedules import Constant, PoissonPlan
from dp_companion.papers.global_adapt_v2.grid import PROFILES
from dp_companion.papers.adaptive_noise.grid import ADAPTIVE_PROFILES
from dp_companion.papers.sad.grid import SAD_PROFILES
from dp_companion.training.multipliers import calibration_key, first_multiplier
from dp_companion.papers.adaptive_noise.method import shared_with_loss
from dp_companion.papers.sanitization.grid import (
    FEATURE_PROFILES, LAYER_PROFILES, PRINTED, SWEEPS, flag_profiles, layer_specs, sweep_specs
)
from dp_companion.papers.results import index_text, read_records, reference_of, result_path, slug
from dp_companion.training.records import read_record

NOISE = ("noise_multiplier", "signal_noise", "layer_noise_multiplier") # what calibration gives
GIVEN = ("accounting", "target_epsilon", "seed", *NOISE)


@pytest.fixture(scope="module")
def records(root):
    return {path: read_record(path) for path in (root/"results").glob("*/*/*/*.json")}


@pytest.fixture(scope="module")
def specs(records): return [r.spec for r in records.values()]


def values_of(spec):
    return {name: value for name, value in spec.values.items() if name not in GIVEN
            and value is not None}


def question(spec):
    "What the first multiplier of a run depends on."
    sizes = {p.dataset: p.dataset_size for profiles in (PROFILES, SAD_PROFILES, ADAPTIVE_PROFILES)
             for p in profiles["laptop"].values()} | {"cifar10_maps": 50000}
    plan = PoissonPlan(dataset_size=sizes[spec.dataset],
                       expected_batch_size=spec.expected_batch_size, epochs=spec.epochs)
    return calibration_key(values_of(spec), plan, spec.accounting, spec.target_epsilon)


def test_the_index_lists_every_record_and_no_other(root, records):
    assert (root/"results"/"index.csv").read_text(encoding="utf-8") == index_text(records.values())
    assert {path for path, r in records.items() if path != result_path(r.spec,
        root/"results")} == set()


def test_records_are_found_by_paper_data_set_and_method(root, records):
    found = read_records(root/"results", paper="sad", dataset="ham10000_efficientnet",
                         method="SAD-DPSGD")
    alike = [path for path in records if path.parts[-4:-1] == ("sad", "ham10000_efficientnet",
        slug("SAD-DPSGD"))]
    assert len(found) == len(alike) > 3 and {r.spec.method.name for r in found} == {"SAD-DPSGD"}


def test_no_run_stands_twice_with_different_noise(specs):
    runs = Counter(tuple((k, v) for k, v in s.values.items() if k not in NOISE) for s in specs)
    assert len(specs) > 200
    assert [dict(run)["method"] for run, times in runs.items() if times > 1] == []


@pytest.mark.slow
def test_gradients_have_the_noise_that_is_calibrated_today(specs):
    "A search by PLD takes seconds: one for each paper, kind of schedule and noise of counts."
    asked = {s: question(s) for s in specs if s.paper != "sanitization" and s.accounting != "none"}
    kinds = {(s.paper, type(key[0]), key[-1]) if key[2] == "certified" else key: key
             for s, key in asked.items()}
    found = {key: first_multiplier(*key) for key in kinds.values()}
    for spec, key in ((s, key) for s, key in asked.items() if key in found):
        is_loss = getattr(spec.method, "adapt_to", None) == "loss"
        today = shared_with_loss(found[key]) if is_loss else {"noise_multiplier": found[key]}
        # Noise that changes was calibrated on a wider grid: up to 0.4 % more or less of it
        near = 1e-6 if spec.accounting != "certified" or isinstance(key[0], Constant) else 4e-3
        for name, value in today.items():
            assert getattr(spec.method, name) == pytest.approx(value, rel=near), (spec.paper,
                spec.method.name, spec.target_epsilon)


@pytest.mark.slow
def test_layers_are_those_of_the_grid(specs, tmp_path):
    asked = {s.name for target in (1., 3., 8.) for s in layer_specs(FEATURE_PROFILES["laptop"],
        methods=("Frozen", "One release", "DP-SGD below", "DP-SGD"), target_epsilon=target,
        runs=tmp_path)}
    for stands_for, size in LAYER_PROFILES["laptop"].items():
        # the tables' second row of each
        loose = layer_specs(size, methods=("Frozen", "One release"), target_epsilon=8.,
                            runs=tmp_path)
        watched = layer_specs(flag_profiles("laptop")[stands_for], methods=PRINTED, runs=tmp_path)
        swept = [s for name in SWEEPS for moving in (False, True) for of in sweep_specs(size, name,
            moving=moving).values() for s in of]
        asked |= {s.name for s in (*layer_specs(size, runs=tmp_path), *loose, *watched, *swept)}
    committed = {s.name for s in specs if s.paper == "sanitization"}
    assert committed and committed <= asked


@pytest.mark.slow
def test_reference_records_are_found_from_a_folder_below(root, monkeypatch):
    monkeypatch.chdir(root/"nbs"/"papers"/"sad"/"experiments") # as Jupyter does
    below = reference_of("sad")
    monkeypatch.chdir(root)
    assert below and below == reference_of("sad")
    assert reference_of("sad", folder=Path("no/such/folder")) == []


@pytest.mark.slow
def test_the_sampler_of_24_bits_stays_within_the_target():
    "Opacus's sampler draws on a grid of 2^-24, so a record's probability is q rounded up."
    grid, found = 2**24, {}
    for r in reference_of("global_adapt_v2"):
        if (r.spec.accounting == "certified" and r.spec.dataset == "mnist"
                and r.spec.method.name in ("DP-SGD", "DP-SGD-Global-Adapt-V2-S")):
            found[r.spec.method.name, r.spec.target_epsilon] = r
    assert len(found) == 2*4 # methods, targets
    for (_, target), r in found.items():
        events = [MechanismEvent(**e) for e in r.budget["events"]]
        assert all(math.ceil(e.sample_rate*grid)/grid > e.sample_rate for e in events)
        drawn = [replace(e, sample_rate=math.ceil(e.sample_rate*grid)/grid) for e in events]
        asked, spent = (certify(of, delta=r.spec.delta, accountants=("pld",))["pld"].epsilon
                        for of in (events, drawn))
        assert asked < spent <= target
