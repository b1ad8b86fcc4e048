"Every broken engine is caught, and the correct one passes."
import json
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bugs import (
    ATTACKED, BATCH_NORM, BATCH_NORM_WITHOUT_STATISTICS, NO_BUFFERS, NO_COPIES, NO_MEETING,
    NO_REFUSAL, PLACES, SEEDLESS, ZOO, Patch, checks_at, failures
)
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.privacy_engine import PrivacyEngine
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.audits.invariants import ALARM
from dp_companion.audits.lasting_invariants import LASTING
from dp_companion.training.models import build_model

ATTACK = "no attack beats the certificate"
pytestmark = pytest.mark.filterwarnings("ignore")


def names(found): return {check.name for _, check in found}


@pytest.mark.parametrize("bug", ZOO, ids=lambda bug: bug.name)
def test_bug_is_caught(bug):
    before = [patch.found for patch in bug.patches]
    with bug.planted():
        assert bug.check in names(failures([bug.place]))
        assert all(patch.found is not real for patch, real in zip(bug.patches, before))
    assert [patch.found for patch in bug.patches] == before


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in ZOO if bug.place not in SEEDLESS],
                         ids=lambda bug: bug.name)
def test_bug_is_caught_at_another_seed(bug):
    with bug.planted(): assert bug.check in names(failures([bug.place], 1))


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in ZOO if bug.name in ATTACKED],
                         ids=lambda bug: bug.name)
def test_attack_catches_what_changes_the_mechanism(bug):
    with bug.planted(): assert ATTACK in names(failures(["attack"]))


@pytest.fixture(scope="module")
def correct(): return [check for place in PLACES for check in checks_at(place, 0)]


@pytest.mark.slow
def test_correct_engine_passes(correct):
    assert [check for check in correct if not check.holds] == []


@pytest.mark.slow
def test_two_hundred_checks_raise_no_false_alarm():
    places = [place for place in PLACES if place not in SEEDLESS]
    found = [check for seed in range(1, 5) for place in places for check in checks_at(place, seed)]
    assert len(found) >= 200
    assert [check for check in found if not check.holds] == []


@pytest.mark.slow
def test_false_alarms_are_rare_and_every_check_has_a_bug(correct):
    "The attack's confidence is 1 - ALARM; a check by size has no false alarm."
    assert sum(check.bound == ALARM or check.name == ATTACK for check in correct)*ALARM < 1e-4
    assert {check.name for check in correct} == {bug.check for bug in ZOO} | {ATTACK}
    assert len({bug.name for bug in ZOO}) == len(ZOO) and ATTACKED <= {bug.name for bug in ZOO}


def test_forty_faults_and_two_of_every_kind_that_lasts():
    counts = Counter(bug.check for bug in ZOO if bug.place in LASTING)
    assert len(ZOO) >= 40 and len(counts) == len(LASTING) + 1
    assert min(counts.values()) >= 2


def test_a_patch_that_fits_nowhere_is_an_error():
    before = GaussianNoise.fill_
    with pytest.raises(LookupError, match="old must be once in fill_, got it 0 times"):
        with Patch(GaussianNoise, "fill_", "no such text", "").planted(): pass
    assert GaussianNoise.fill_ is before


@pytest.mark.parametrize("patches, message", [([BATCH_NORM], "mixes the samples of a batch"),
    ([BATCH_NORM_WITHOUT_STATISTICS], "mixes the samples of a batch"),
                                              ([BATCH_NORM, NO_REFUSAL],
                                                  "samples must not meet"),
                                                  ([BATCH_NORM_WITHOUT_STATISTICS, NO_REFUSAL],
                                                      "samples must not meet"),
                                              ([BATCH_NORM_WITHOUT_STATISTICS, NO_REFUSAL,
                                                  NO_MEETING], "samples must not meet"),
                                                  ([BATCH_NORM_WITHOUT_STATISTICS, NO_REFUSAL,
                                                      NO_COPIES], "samples must not meet"),
                                              ([BATCH_NORM, NO_REFUSAL, NO_BUFFERS, NO_MEETING,
                                                  NO_COPIES], "must treat every sample alike")],
                         ids=["as it is", "without statistics", "with statistics",
                              "where samples meet", "by copies", "by gradients",
                              "by the second run alone"])
def test_batch_norm_is_refused_around_the_patch(patches, message):
    with ExitStack() as stack:
        for patch in patches: stack.enter_context(patch.planted())
        model = build_model("small_shufflenet", seed=0, image_size=8)
        with pytest.raises(ValueError, match=message):
            step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                               expected_batch_size=4)
            step(nn.CrossEntropyLoss(), torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]),
                 noise_multiplier=1.)


def test_loop_leaves_the_buffers_of_batch_norm_as_they_were():
    "Even where nothing but the look at gradients is in the way."
    with ExitStack() as stack:
        for patch in (BATCH_NORM, NO_REFUSAL, NO_BUFFERS, NO_MEETING, NO_COPIES):
            stack.enter_context(patch.planted())
        model = build_model("small_shufflenet", seed=0, image_size=8)
        before = {name: x.clone() for name, x in model.named_buffers()}
        data = DataLoader(TensorDataset(torch.randn(8, 1, 8, 8), torch.zeros(8).long()),
                          batch_size=4)
        module, *_ = PrivacyEngine(secure_mode=False).make_private(module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=data,
            noise_multiplier=1., max_grad_norm=1.)
        with pytest.raises(ValueError, match="must treat every sample alike"):
            module(torch.randn(4, 1, 8, 8))
        assert before and all(torch.equal(x, before[name]) for name, x in model.named_buffers())


def test_a_step_that_fails_leaves_no_buffer_changed():
    def fails(outputs, targets): raise ArithmeticError
    model = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(),
                          nn.Linear(64, 2))
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=.1), clip_rule=Flat(),
                       expected_batch_size=4)
    with pytest.raises(ArithmeticError):
        step(fails, torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]), noise_multiplier=1.)
    assert not model[0].running_mean.any()


def test_a_forward_pass_that_fails_leaves_no_buffer_changed():
    class Fails(nn.Module):
        def forward(self, x): raise ArithmeticError
    model = nn.Sequential(nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(),
                          nn.Linear(64, 2), Fails())
    data = torch.utils.data.TensorDataset(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
    module, _, _ = PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=2),
                                                noise_multiplier=1., max_grad_norm=1.)
    with pytest.raises(ArithmeticError): module(data.tensors[0])
    assert not model[0].running_mean.any()


def test_page_shows_the_zoo(root):
    cells = json.loads((root/"nbs"/"audits"/"bug_zoo.ipynb").read_text(encoding="utf-8"))["cells"]
    tables = ["".join(output["data"]["text/markdown"]) for cell in cells
              for output in cell.get("outputs", []) if "text/markdown" in output.get("data", {})]
    table = "\n".join(tables)
    assert [(bug.name, bug.sentence) for bug in ZOO
            if f"| {bug.name} | {bug.sentence} |" not in table] == [], "run `make pages`"
