"What has no per-sample gradient is refused when the step is built."
import copy
import json
import re

import pytest
import torch
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.nn.utils import prune, weight_norm

from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep
from networks import batch, digits_cnn
from steps import LOSS, network, step_for


def test_batch_norm_is_refused():
    with pytest.raises(ValueError, match="BatchNorm2d at '1' mixes the samples of a batch"):
        step_for(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)))


def test_a_parameter_without_a_shape_is_refused():
    with pytest.raises(ValueError,
                       match="the lazy parameter at 'weight' has no shape yet; run the model on a "
                       "batch before"):
        step_for(nn.LazyLinear(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_in_coarse_precision_are_refused(dtype):
    with pytest.raises(ValueError,
                       match=rf"the {dtype} parameter at 'weight' is rounded after clipping"):
        step_for(nn.Linear(2, 3).to(dtype))


def hooked(model): model[3].register_forward_hook(lambda layer, args, output: 30*output)


def patched(model): model[3].forward = lambda x: 30*nn.Conv2d.forward(model[3], x)


def weighed(model): model[3].weight.register_hook(lambda g: 100*g)


def pruned(model): prune.l1_unstructured(model[3], "weight", .5)


def normed(model): weight_norm(model[3])


@pytest.mark.parametrize("change, word",
                         [(hooked, "a forward hook at '3' makes a layer do something else"),
                          (patched, "a forward of its own at '3' makes"),
                          (weighed, "the hook on the parameter at '3.weight' changes a gradient"),
                                          *((made, "a weight that a hook makes of other parameters "
                                              "at '3' makes .* or a parametrization")
                                              for made in (pruned, normed))])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_changes_a_layer_behind_its_class_is_refused(change, word):
    model = network(digits_cnn)
    change(model)
    with pytest.raises(ValueError, match=word): step_for(model)
    for p in model[3].parameters(): p.requires_grad_(False)
    step_for(model)(LOSS, *batch(digits_cnn, 4)) # and is nobody's business where nothing is trained


def compiled_in_place(model):
    model.compile()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("made, word", [(lambda model: torch.jit.trace(model, torch.randn(2, 4)),
    "a traced one"), (torch.jit.script, "a traced one"), (torch.compile, "a compiled one"),
    (compiled_in_place, "a compiled one")])
def test_a_module_that_does_not_call_its_layers_is_refused(made, word):
    "Layers of another class would pass every other look at them."
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval().requires_grad_(False),
                          nn.Linear(3, 2))
    def built(held):
        return PrivateStep(held, torch.optim.SGD(held.parameters(), lr=.1),
                           clip_rule=Flat(max_grad_norm=1.), expected_batch_size=2)
    built(model)
    for name, held in (("", made(model)), ("0", nn.Sequential(made(model)))):
        with pytest.raises(ValueError, match=f"at '{name}' does not call its layers one by one"):
            built(held)
    # frozen, it has no gradient by sample
    built(nn.Sequential(made(model.requires_grad_(False)), nn.Linear(2, 2)))


@pytest.mark.parametrize("layer, word",
                         [(nn.LSTM(3, 2),
                           "LSTM at '' computes all its steps in one call.*; use DPLSTM"),
                           (nn.GRUCell(3, 2),
                            "GRUCell at '' computes all its steps.*or their cells"),
                            (nn.EmbeddingBag(5, 2), "use Embedding and a mean"),
                                         (DPMultiheadAttention(4, 2, add_bias_kv=True,
                                             batch_first=True), "at 'seq_bias_k' puts the sequence "
                                             "in front of the batch; .*add_bias_kv=False")])
def test_layers_without_a_gradient_of_each_sample_are_refused(layer, word):
    with pytest.raises(ValueError, match=word): step_for(layer)
    # A frozen one needs none
    step_for(nn.Sequential(copy.deepcopy(layer).requires_grad_(False), nn.Linear(2, 2)))


def test_every_test_of_opacus_passes_or_has_its_row(root):
    "What tests/bench/opacus_tests.py counted is what the page lists, no more and no less."
    record = json.loads((root/"results"/"bench"/"opacus_tests.json").read_text(encoding="utf-8"))
    page = (root/"nbs"/"algorithms"/"model_checks.ipynb").read_text(encoding="utf-8")
    kinds = {kind for module in record["modules"].values() for kind in module["kinds"]}
    assert {"passed", "refused"} <= kinds <= {"passed", "refused", "inside", "skipped", "no engine"}
    words = {text for module in record["modules"].values() for text in module["words"]}
    listed = re.findall(r"\| \*(.*?)\* \||\| an inside of Opacus, `(.*?)` \|", page)
    assert words == {said or inside for said, inside in listed}
