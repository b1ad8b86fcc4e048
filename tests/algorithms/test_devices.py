"The private step on the device that DP_COMPANION_DEVICE names, held against the CPU."
import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.private_step import PrivateStep
from networks import batch, digits_cnn, mnist_cnn
from steps import LOSS, difference, gradient, network, seeded, step_for

DEVICE = os.environ.get("DP_COMPANION_DEVICE") or "cpu"


@pytest.fixture(autouse=True)
def whole_precision(monkeypatch):
    "A GPU may round the factors of a convolution to 10 bits, and does so by default."
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Volume(nn.Module):
    "A convolution in space and one in the plane, for the layout of three dimensions."
    def __init__(self):
        super().__init__()
        self.deep, self.flat, self.last = (nn.Conv3d(1, 4, 3, padding=1),
                                           nn.Conv2d(4, 4, 3, padding=1), nn.Linear(64, 10))

    def forward(self, x):
        deep = self.deep(x).relu().amax(2)
        return self.last(nn.functional.max_pool2d(self.flat(deep), 2).flatten(1))


def deep_batch(dtype):
    draw = seeded()
    return torch.randn(6, 1, 4, 8, 8, generator=draw, dtype=dtype), torch.arange(6)%10


CASES = {"contiguous": (digits_cnn, torch.contiguous_format),
         "channels_last": (digits_cnn, torch.channels_last),
         "channels_last_3d": (Volume, torch.channels_last_3d)}


def in_layout(build, dtype, memory_format, dimensions):
    "The network whose weights of that many dimensions lie in memory in another order."
    model = network(build, dtype)
    for p in model.parameters():
        if p.dim() == dimensions: p.data = p.data.contiguous(memory_format=memory_format)
    return model


@pytest.mark.parametrize("dtype, nearly", [(torch.float64, 1e-9), (torch.float32, 1e-4)],
                         ids=["double", "single"])
@pytest.mark.parametrize("sigma", [0., 1.])
@pytest.mark.parametrize("layout", CASES)
def test_step_is_that_of_the_cpu_in_every_memory_format(layout, sigma, dtype, nearly):
    "Noise fills memory in order: it is compared between models of one layout alone."
    build, memory_format = CASES[layout]
    x, y = deep_batch(dtype) if build is Volume else batch(build, 6, dtype=dtype)
    usual = torch.contiguous_format if sigma == 0 else memory_format
    here, there = (step_for(in_layout(build, dtype, order, x.dim()).to(device),
                            generator=seeded(), noise_multiplier=sigma)
                   for device, order in (("cpu", usual), (DEVICE, memory_format)))
    here(LOSS, x, y)
    report = there(LOSS, x.to(DEVICE).contiguous(memory_format=memory_format), y.to(DEVICE))
    assert report.nonprivate_norms.device.type == torch.device(DEVICE).type
    assert difference(gradient(there).cpu(), gradient(here)) < nearly


def test_five_steps_of_adam_end_with_weights_of_the_cpu():
    x, y = batch(mnist_cnn, 16, dtype=torch.float64)
    def trained(device):
        model = network(mnist_cnn, torch.float64).to(device)
        step = PrivateStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3),
                           clip_rule=Flat(), expected_batch_size=16, generator=seeded(),
                           noise_multiplier=.5)
        for _ in range(5): step(LOSS, x.to(device), y.to(device))
        return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    assert difference(trained(DEVICE), trained("cpu")) < 1e-7


def test_an_empty_batch_is_a_step_of_noise_alone():
    x, y = batch(digits_cnn, 4)
    steps = [step_for(network(digits_cnn).to(d), generator=seeded(), noise_multiplier=1.)
             for d in ("cpu", DEVICE)]
    for step, device in zip(steps, ("cpu", DEVICE)): step(LOSS, x[:0].to(device), y[:0].to(device))
    assert torch.equal(gradient(steps[1]).cpu(), gradient(steps[0])) and gradient(steps[0]).any()


def test_distributed_data_parallel_of_one_process_takes_the_same_step(tmp_path):
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        x, y = (values.to(DEVICE) for values in batch(digits_cnn, 6, dtype=torch.float64))
        plain = network(digits_cnn, torch.float64).to(DEVICE)
        wrapped = DistributedDataParallel(copy.deepcopy(plain))
        steps = [step_for(model, generator=seeded(), noise_multiplier=1.)
                 for model in (plain, wrapped)]
        for step in steps: step(LOSS, x, y)
        assert difference(gradient(steps[1]), gradient(steps[0])) < 1e-12
    finally: dist.destroy_process_group()


def test_secure_noise_is_gaussian_where_it_is_needed():
    "Mean, spread, two tails, and no two draws alike, by bounds that a fair draw leaves at 6 sigma."
    n = 200_001
    first, second = (GaussianNoise(secure=True).fill_(torch.empty(n, device=DEVICE), 2.)
                     for _ in range(2))
    assert first.device.type == torch.device(DEVICE).type and not torch.equal(first, second)
    values = first.double().cpu().numpy()/2
    assert abs(values.mean()) < 6/n**.5 and abs(values.var() - 1) < 6*(2/n)**.5
    for bound, share in ((1., .3173105), (3., .0026998)):
        assert abs((np.abs(values) > bound).mean() - share) < 6*(share/n)**.5
    assert abs(np.corrcoef(values, second.double().cpu().numpy())[0, 1]) < 6/n**.5


def test_half_precision_parameters_are_refused_and_autocast_is_not():
    x, y = (values.to(DEVICE) for values in batch(digits_cnn, 4))
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        report = step_for(network(digits_cnn).to(DEVICE))(LOSS, x, y)
    assert report.nonprivate_norms.dtype == torch.float32 and report.nonprivate_not_finite == 0
    with pytest.raises(ValueError, match="bfloat16"):
        step_for(network(digits_cnn, torch.bfloat16).to(DEVICE))(LOSS, x.bfloat16(), y)
