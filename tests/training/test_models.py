"Models: every size, and gradients that agree with the oracles."
import sys
import pytest
import torch
from torch.nn.functional import cross_entropy
from dp_companion.algorithms.clipping import clip_rule
from dp_companion.algorithms.private_step import PrivateStep
from dp_companion.training import models
from dp_companion.training.models import build_model
from oracles.opacus_engines import ORACLES

SMALL = ["mnist_cnn", "unbalanced_mnist_cnn", "small_shufflenet", "cifar_cnn", "small_resnet",
         "maps_cnn"]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "size,channels,classes", [(8, 1, 10), (24, 1, 2), (28, 1, 10), (32, 3, 100)]
)
def test_models_take_every_size_and_keep_no_state(name, size, channels, classes):
    model = build_model(name, seed=0, image_size=size, channels=channels, classes=classes)
    images = torch.randn(4, channels, size, size)
    whole, alone = model(images), torch.cat([model(image[None]) for image in images])
    assert whole.shape == (4, classes)
    assert not list(model.buffers())
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5) # no sample sees another


@pytest.mark.parametrize("name", SMALL)
def test_oracles_agree_on_every_model(name):
    def build(): return build_model(name, seed=0, image_size=24, channels=2, classes=3).double()
    draw = torch.Generator().manual_seed(1)
    rule = clip_rule("global_adapt_v2", max_grad_norm=1., strict_max_grad_norm=3.)
    images = torch.randn(6, 2, 24, 24, generator=draw, dtype=torch.float64)
    labels = torch.randint(3, (6,), generator=draw)
    model = build()
    step = PrivateStep(
        model, torch.optim.SGD(model.parameters(), lr=0.), clip_rule=rule, expected_batch_size=6
    )
    step(cross_entropy, images, labels, noise_multiplier=0.)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    for oracle in ORACLES.values():
        total, _ = oracle(build(), torch.nn.CrossEntropyLoss(), images, labels, rule.scale)
        torch.testing.assert_close(found, total/6, rtol=1e-9, atol=1e-11)


def test_nf_net_without_timm_or_weights_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ImportError, match=r"timm must be installed for the NF-Nets.*dp-companion\[vision\]"
    ):
        build_model("nf_net_f0", seed=0)


@pytest.mark.slow
def test_nf_net_with_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm", reason="timm is not installed (the extra `vision`)")
    from safetensors.torch import save_file
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pre-trained weights must be at"):
        build_model("nf_net_f0", seed=0)
    reference = timm.create_model("dm_nfnet_f0", num_classes=3)
    path = models._weights_file("nf_net_f0")
    path.parent.mkdir()
    save_file(reference.state_dict(), path)
    model = build_model("nf_net_f0", seed=0, classes=5)
    assert torch.equal(model[1].stem.conv1.weight, reference.stem.conv1.weight)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "1.head.fc.weight", "1.head.fc.bias"
    ]
