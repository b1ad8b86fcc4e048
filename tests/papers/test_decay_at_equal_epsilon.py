"The committed arms: their index, their budgets, their seeds, and what is said of them."
from dataclasses import replace

import pytest

from dp_companion.budgets.certified import certify
from dp_companion.budgets.events import MechanismEvent
from dp_companion.papers.decay_at_equal_epsilon.arms import (
    FOLDER, SETTINGS, Arm, arms_index, read_arms)
from dp_companion.papers.decay_at_equal_epsilon.recipes import (
    RECIPES, Recipe, committed_recipes, epsilon_with_tuning, worth)
from dp_companion.papers.decay_at_equal_epsilon.verdicts import arm_verdicts, compare_arms
from dp_companion.papers.verdicts import HOLDS, REFUTED
from dp_companion.training.heads import read_head


@pytest.fixture(scope="module")
def records(root): return read_arms(root/FOLDER)


def arm_of(record):
    return Arm(**{name: record.labels[name] for name in Arm.__dataclass_fields__})


def test_the_index_lists_every_arm_and_no_other(root, records):
    assert (root/FOLDER/"index.csv").read_text(encoding="utf-8") == arms_index(records)
    files = {path.relative_to(root/FOLDER).as_posix() for path in (root/FOLDER).glob("*/*.json")}
    assert {arm_of(r).file for r in records} == files


def test_every_arm_spends_its_epsilon_and_no_more(records):
    assert records
    for r in records:
        assert .97*r.labels["epsilon"] <= r.epsilon <= r.labels["epsilon"], arm_of(r).file
        setting = SETTINGS[r.labels["setting"]]
        steps = sum(event["steps"] for event in r.budget["events"])
        assert steps == arm_of(r).spec.plan(setting.records).steps


def test_a_certificate_is_that_of_its_events(records):
    r = min(records, key=lambda r: len(r.budget["events"]))
    events = tuple(MechanismEvent(**event) for event in r.budget["events"])
    found = certify(events, delta=r.budget["delta"], accountants=("pld",))["pld"].epsilon
    assert found == pytest.approx(r.epsilon, rel=1e-6)


def test_accuracies_are_those_of_the_bits(records):
    for r in records:
        assert len(r.seeds) >= 10
        assert r.right.mean(1) == pytest.approx(r.accuracies)
        assert list(r.labels["tries"]) and f"{r.spec['learning_rate']:g}" in r.labels["tries"]


def test_rates_lie_inside_their_grids(records):
    grids = [sorted(map(float, r.labels["tries"])) for r in records]
    at_the_edge = sum(r.spec["learning_rate"] in (grid[0], grid[-1])
                      for r, grid in zip(records, grids))
    assert at_the_edge <= len(records)//10


def test_every_answer_follows_its_intervals(records):
    "An answer never goes beyond a 95 % interval, and Holm's correction makes it harder only."
    comparisons = compare_arms(records)
    for c in comparisons:
        low, high = c.paired.mean - c.paired.half, c.paired.mean + c.paired.half
        if c.answer == HOLDS: assert low > 0
        if c.answer == REFUTED: assert high < 0
        assert c.adjusted >= c.paired.p
    for verdict in arm_verdicts(comparisons):
        of = [c for c in comparisons if verdict.claim == f"{c.arm} helps everywhere"]
        assert of and (verdict.answer != REFUTED or any(c.answer == REFUTED for c in of))
        assert verdict.answer != HOLDS or all(c.answer == HOLDS for c in of)


@pytest.fixture(scope="module")
def recipes(root): return committed_recipes(root/RECIPES)


def test_every_recipe_has_its_place_and_stays_under_its_epsilon(root, recipes):
    assert recipes
    for r in recipes:
        recipe = Recipe(**{name: r.labels[name] for name in Recipe.__dataclass_fields__})
        assert (root/RECIPES/recipe.file).is_file()
        assert .97*recipe.epsilon <= r.epsilon <= recipe.epsilon
        chosen = recipe.spec.values | {"target_epsilon": recipe.epsilon}
        for name in ("noise", "learning_rate"): chosen[name] = r.spec[name]
        assert chosen == r.spec


def test_counting_tries_costs_and_index_of_runs_is_left_alone(root, recipes):
    first = recipes[0]
    tries = {str(rate): .5 for rate in range(50)}
    more = replace(first, labels=first.labels | {"tries": tries})
    assert first.epsilon < epsilon_with_tuning([first]) < epsilon_with_tuning([more])
    assert "recipes" not in (root/"results"/"index.csv").read_text(encoding="utf-8")
    assert all(points.seeds >= 5 for *_, points in worth(recipes))


def test_every_setting_of_the_recipes_has_a_head_without_privacy(root):
    for setting in {path.parent.name for path in (root/RECIPES).glob("*/*.json")}:
        free = read_head(root/f"results/without_privacy/{setting}.json")
        assert free.spec["noise"] is None and not free.budget["certified"]
        whole = Recipe(setting=setting).spec
        apart = {n for n, v in whole.values.items() if free.spec[n] != v}
        assert apart <= {"noise", "learning_rate"}
