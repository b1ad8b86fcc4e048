"Heads on public features: the same step, the same batches and the same seeds as everywhere else."
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.privacy_engine import PrivacyEngine
from dp_companion.budgets.events import gaussian_events
from dp_companion.budgets.schedules import Constant, LinearDecay, StepDecay
from dp_companion.training import features as features_module
from dp_companion.training.features import EXTRACTORS, Features, load_features
from dp_companion.training.heads import (
    HeadSpec, _add_clipped, _check_ledger, _Head, _judged, _Rows, calibrated_head, head_budget,
    head_events, head_record, train_heads)
from dp_companion.training.run import stream_seed


@pytest.fixture
def features():
    "Sixty rows of five numbers in three classes, and thirty to judge."
    draw = np.random.default_rng(0)
    labels = torch.arange(90)%3
    rows = (draw.normal(size=(90, 5)) + 2*np.eye(3, 5)[labels]).astype(np.float16)
    return Features(dataset="made_up", extractor="none", train=rows[:60], test=rows[60:],
        train_labels=labels[:60], test_labels=labels[60:], classes=3, source="made up")


@pytest.fixture
def spec():
    return HeadSpec(dataset="made_up", extractor="none", epochs=3, expected_batch_size=20,
        noise=LinearDecay(initial=2., decay_rate=.5), learning_rate=.5,
        bounds=StepDecay(initial=1., decay_rate=.8, drop_every=1, decay_of="value"))


def test_the_engine_takes_the_same_step():
    "Clipped sum and noise are those of PrivacyEngine on a linear layer."
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw), torch.randint(3, (30,), generator=draw)
    data = torch.utils.data.TensorDataset(x, y)
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    model, optimizer, loader = PrivacyEngine().make_private(module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=1.),
        data_loader=torch.utils.data.DataLoader(data, batch_size=10), noise_multiplier=1.5,
        max_grad_norm=.9, noise_generator=torch.Generator().manual_seed(7))
    rows, labels = next(iter(loader))
    nn.CrossEntropyLoss()(model(rows), labels).backward()
    state = optimizer.private_step.noise.generator.get_state()
    optimizer.step()
    flat = torch.empty(15)
    source = torch.Generator()
    source.set_state(state)
    GaussianNoise(generator=source).fill_(flat, 1.5*.9/10)
    gradient = flat[:12].view(3, 4), flat[12:]
    _add_clipped(gradient, before, rows, labels, Flat(max_grad_norm=.9), 10)
    for old, part, new in zip(before, gradient, (layer.weight, layer.bias)):
        torch.testing.assert_close(old - part, new.detach(), atol=1e-6, rtol=0)


def test_the_closed_form_is_the_norm_of_every_gradient():
    "A bound below all norms leaves unit gradients, which autograd finds one by one."
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 4, generator=draw), torch.randint(3, (6,), generator=draw)
    weight, bias = torch.randn(3, 4, generator=draw), torch.randn(3, generator=draw)
    total = torch.zeros(15)
    for row, label in zip(x, y):
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        nn.functional.cross_entropy((w@row + b)[None], label[None]).backward()
        one = torch.cat([w.grad.flatten(), b.grad])
        total += one/one.norm()*1e-3
    gradient = torch.zeros(3, 4), torch.zeros(3)
    _add_clipped(gradient, (weight, bias), x, y, Flat(max_grad_norm=1e-3), 1)
    found = torch.cat([gradient[0].flatten(), gradient[1]])
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-8)


def test_seed_is_same_to_the_bit_alone_and_in_company(spec, features):
    together = train_heads(spec, [3, 0, 7], features, threads=3)
    assert together == {seed: train_heads(spec, [seed], features)[seed] for seed in (3, 0, 7)}
    assert len({r["loss"] for r in together.values()}) == 3


def test_batches_are_those_of_a_run_of_the_seed(spec, features):
    head = _Head(spec, _Rows(spec, features), seed=4)
    stream = torch.Generator().manual_seed(stream_seed(4, "sampling"))
    drawn = []
    for batch in head.batches:
        drawn.append(batch)
        head.step(batch)
    wanted = [(torch.rand(60, generator=stream) < 1/3).nonzero().flatten().tolist() for _ in drawn]
    assert drawn == wanted


def test_noise_and_bound_follow_their_schedules(spec, features):
    head, seen = _Head(spec, _Rows(spec, features), seed=0), []
    account = head.account
    head.account = lambda: seen.append(account()) or seen[-1]
    for _ in range(spec.epochs):
        for batch in head.batches: head.step(batch)
    sigmas = [2*.5**(e/2) for e in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    bounds = [.8**e for e in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    np.testing.assert_allclose([rule.max_grad_norm for rule, _ in seen], bounds)
    np.testing.assert_allclose([std for _, std in seen], np.multiply(sigmas, bounds)/20)
    assert tuple(head.ledger.events) == gaussian_events(spec.noise, spec.plan(60))


def test_held_out_records_train_nothing(spec, features):
    rows = _Rows(replace(spec, held_out=20), features)
    assert len(rows.kept) == 40 and len(rows.judged) == 20
    spoiled = replace(features, train=features.train.copy())
    apart = sorted(set(range(60)) - set(rows.kept.tolist()))
    spoiled.train[apart] = 100
    same = [_Head(replace(spec, held_out=20), _Rows(replace(spec, held_out=20), f), 0)
            for f in (features, spoiled)]
    for head in same:
        for batch in head.batches: head.step(batch)
    assert torch.equal(same[0].flat, same[1].flat)


def test_averaged_weights_are_the_mean_of_the_last_steps(spec, features):
    head, seen = _Head(replace(spec, averaged=.5), _Rows(spec, features), 0), []
    for _ in range(spec.epochs):
        for batch in head.batches:
            head.step(batch)
            seen.append(head.flat.clone())
    torch.testing.assert_close(head.mean, torch.stack(seen[-4:]).mean(0))


def test_a_row_moves_the_mean_by_its_sensitivity(spec, features):
    "However long the row: the noise is for √d over n."
    centred, seen = replace(spec, mean_noise=4.), []
    for length in (0, 1, 1e4):
        train = features.train.copy()
        train[7] = length*np.array([3, 0, 4, 0, 0])/5
        rows = _Rows(centred, replace(features, train=train))
        seen.append(_Head(centred, rows, seed=0).mean_row)
    moved = [60*torch.linalg.vector_norm(mean - seen[0]).item() for mean in seen[1:]]
    np.testing.assert_allclose(moved, [1, 5**.5], rtol=1e-4)


def test_the_mean_has_its_noise_and_every_seed_its_own(spec, features):
    noisy = replace(spec, mean_noise=30.)
    rows = _Rows(noisy, features)
    means = torch.stack([_Head(noisy, rows, seed).mean_row for seed in range(400)])
    lengths = np.linalg.norm(features.train.astype(float), axis=1)
    scales = np.minimum(1, 5**.5/lengths)
    wanted = (features.train*scales[:, None]).mean(0)
    std = 30*5**.5/60
    np.testing.assert_allclose(means.mean(0), wanted, atol=5*std/400**.5)
    np.testing.assert_allclose(means.std(), (std**2 + wanted.var())**.5, rtol=.05)


def test_a_centred_head_is_a_head_on_centred_rows(spec, features):
    centred = replace(spec, mean_noise=4.)
    head = _Head(centred, _Rows(centred, features), seed=3)
    rows = _Rows(spec, replace(features, train=(features.train - head.mean_row.numpy()),
        test=features.test - head.mean_row.numpy()))
    plain = _Head(spec, rows, seed=3)
    plain.packed = plain.wide.clone()
    for one in (head, plain):
        for _ in range(spec.epochs):
            for batch in one.batches: one.step(batch)
    torch.testing.assert_close(head.flat, plain.flat, atol=1e-5, rtol=1e-4)
    assert _judged(head)["right"] == _judged(plain)["right"]


@pytest.mark.slow
def test_the_mean_is_part_of_the_budget(tmp_path, spec, features):
    centred = calibrated_head(replace(spec, delta=1e-3, mean_noise=4.), 60, 2., tmp_path)
    assert .98*2 <= head_budget(centred, 60, tmp_path).epsilon <= 2
    without = replace(centred, mean_noise=0.)
    assert head_budget(without, 60, tmp_path).epsilon < .99*2
    mean, *gradients = head_events(centred, 60)
    assert (mean.query, mean.noise_multiplier, mean.sample_rate, mean.steps) == ("mean", 4., 1., 1)
    assert tuple(gradients) == gaussian_events(centred.noise, centred.plan(60))
    head = _Head(centred, _Rows(centred, features), seed=0)
    assert head.ledger.events == [mean]
    for _ in range(spec.epochs):
        for batch in head.batches: head.step(batch)
    _check_ledger(head)
    head.ledger._runs.pop(0)
    with pytest.raises(RuntimeError, match="certifies nothing"): _check_ledger(head)


def test_a_mean_needs_noise_beside_it(spec):
    with pytest.raises(ValueError, match="mean_noise must be 0, or > 0 beside noise"):
        replace(spec, noise=None, mean_noise=3.)
    with pytest.raises(ValueError, match="mean_noise"): replace(spec, mean_noise=-1.)


def test_more_seeds_leave_the_first_as_they_are(tmp_path, spec, features):
    first = head_record(spec, [0], features, tmp_path)
    both = head_record(spec, [0, 1], features, tmp_path)
    assert both.seeds["0"] == first.seeds["0"] and set(both.seeds) == {"0", "1"}
    np.testing.assert_allclose(both.right.mean(1), both.accuracies)


@pytest.mark.slow
def test_calibrated_noise_spends_its_target_and_no_more(tmp_path, spec):
    made = calibrated_head(replace(spec, delta=1e-3), 60, 2., tmp_path)
    assert .98*2 <= head_budget(made, 60, tmp_path).epsilon <= 2
    assert made.noise.decay_rate == .5 and made.target_epsilon == 2.


def test_names_tell_settings_apart(spec):
    names = {spec.name, replace(spec, momentum=0.).name, replace(spec, noise=None).name,
             replace(spec, noise=Constant(initial=2.)).name,
             replace(spec, bounds=Constant(initial=1.)).name}
    assert len(names) == 5 and replace(spec).name == spec.name


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(features_module.importlib, "import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name, name=name)))
    with pytest.raises(ModuleNotFoundError, match="kymatio must be installed .* pretrained"):
        EXTRACTORS["scattering"].build(28)


def test_a_killed_extraction_leaves_nothing(tmp_path, monkeypatch):
    pytest.importorskip("kymatio")
    whole = features_module._write_features
    monkeypatch.setattr(features_module.os, "replace",
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt): load_features("digits", "small_scattering", tmp_path)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] in ([], [".lock"])
    monkeypatch.undo()
    assert features_module._write_features is whole
    assert load_features("digits", "small_scattering", tmp_path).train.shape == (1437, 144)


@pytest.mark.slow
def test_imagenet_features_are_of_one_image_alone():
    pytest.importorskip("efficientnet_lite_pytorch")
    extract = EXTRACTORS["efficientnet_lite0"].build(32)
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    other = torch.cat([pixels[:3], 1 - pixels[3:]])
    with torch.no_grad(): first, second = extract(pixels), extract(other)
    assert first.shape == (4, 1280) and torch.equal(first[:3], second[:3])
    assert not torch.equal(first[3], second[3])


@pytest.mark.slow
def test_folded_norms_leave_the_network_as_it_is():
    efficientnet = pytest.importorskip("efficientnet_lite_pytorch")
    pixels = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    network = efficientnet.EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(features_module._lite_weights(), weights_only=True))
    with torch.no_grad():
        maps = network.extract_features((255*pixels - 127)/128)
        wanted = nn.functional.group_norm(maps.mean((2, 3)), 16)
        found = EXTRACTORS["efficientnet_lite0"].build(96)(pixels)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
