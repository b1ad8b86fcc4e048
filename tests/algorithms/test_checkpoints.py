"Runs that are saved, killed and resumed, and checkpoints that are refused."
import json
import random
import signal
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import GlobalAdapt
from user_loops import (Noisy, SCHEDULES, flat_data, flat_network, network, private, seeded,
    train, weights)

pytestmark = pytest.mark.filterwarnings("ignore")

@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_draws_the_batch_that_comes_next(tmp_path, workers):
    "Workers draw ahead, so a checkpoint keeps where the steps are, not the draws."
    def made():
        own = flat_network()[2:]
        privacy = PrivacyEngine()
        model, optimizer, loader = privacy.make_private(module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=.1), noise_multiplier=1.,
            max_grad_norm=1., noise_generator=seeded(),
            data_loader=DataLoader(TensorDataset(torch.randn(40, 8, generator=seeded(),
            dtype=torch.float64), torch.arange(40)%3), batch_size=4, num_workers=workers,
            generator=seeded(1)))
        return privacy, model, optimizer, loader
    def run(privacy, model, optimizer, loader, steps, stop_at=None):
        for x, y in loader:
            optimizer.zero_grad(); nn.CrossEntropyLoss()(model(x), y).backward(); optimizer.step()
            steps.append((x, optimizer.recorder.flat.clone()))
            if optimizer.steps_taken == 3: privacy.save_checkpoint(path=tmp_path/"c.pt",
                module=model, optimizer=optimizer)
            if optimizer.steps_taken == stop_at: return
    whole, resumed, broken = [], [], []
    run(*made(), whole)
    privacy, model, optimizer, loader = made()
    privacy.load_checkpoint(path=tmp_path/"c.pt", module=model, optimizer=optimizer)
    run(privacy, model, optimizer, loader, resumed)
    objects = made()
    run(*objects, broken, stop_at=5)
    run(*objects, broken) # The same pass, left and begun again
    for found, expected in ((resumed, whole[3:]), (broken, whole)):
        assert len(found) == len(expected) and all(torch.equal(a, b)
            for pair in zip(found, expected) for a, b in zip(*pair))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_after_a_resumption_has_the_same_augmented_images(tmp_path, workers):
    def made():
        torch.manual_seed(5)
        model = network()
        return PrivacyEngine(secure_mode=False), model, torch.optim.SGD(model.parameters(),
            lr=.1), DataLoader(Noisy(), batch_size=8, num_workers=workers)
    def private_of(privacy, model, optimizer, loader): return privacy, *privacy.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.,
        max_grad_norm=.5)
    privacy, model, optimizer, loader = private_of(*made())
    train(model, optimizer, loader)
    privacy.save_checkpoint(path=tmp_path/"c.pt", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    other, resumed, optimizer, loader = private_of(*made())
    other.load_checkpoint(path=tmp_path/"c.pt", module=resumed, optimizer=optimizer)
    train(resumed, optimizer, loader)
    assert torch.equal(weights(model), weights(resumed))


def test_a_checkpoint_that_cannot_be_read_is_not_written(tmp_path):
    path = tmp_path/"checkpoint.pt"
    privacy, model, optimizer, _ = private()
    privacy.save_checkpoint(path=path, module=model, optimizer=optimizer)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="a checkpoint must hold tensors and plain values alone"):
        privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={
            "accuracy": np.mean([.9, .8])})
    assert path.read_bytes() == before


def resumed(folder):
    "Twelve epochs from wherever the checkpoint in `folder` is; a process of the test below."
    torch.set_num_threads(1)
    model, path = nn.Sequential(nn.Dropout(.2), *network()), folder/"checkpoint.pt"
    privacy, model, optimizer, loader = private(model=model, noise_schedule=SCHEDULES[2],
        clip_rule=GlobalAdapt(max_grad_norm=.5), kernels={"1": "matrices"})
    if path.exists(): privacy.load_checkpoint(path=path, module=model, optimizer=optimizer)
    for epoch in range(optimizer.epoch, 12):
        for x, y in loader:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(model(x), y).backward()
            optimizer.step()
            privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={
                "epoch": epoch})
            time.sleep(.02)
    report = privacy.budget(1e-4).to_dict()
    (folder/"record.json").write_text(
        json.dumps([report, weights(model).tolist(), optimizer.clip_rule.strict_max_grad_norm]))


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_record(tmp_path, processes):
    def start(folder):
        folder.mkdir(exist_ok=True)
        process = processes.Process(target=resumed, args=(folder,))
        process.start()
        return process
    def ends(process):
        process.join(300)
        return process.exitcode
    def written(folder): return (folder/"checkpoint.pt").stat().st_mtime_ns if (folder/
        "checkpoint.pt").exists() else 0
    assert ends(start(tmp_path/"whole")) == 0
    killed = tmp_path/"killed"
    for wait in (.01, .3):
        seen, process, deadline = written(killed), start(killed), time.monotonic() + 120
        while written(
            killed) == seen and process.is_alive() and time.monotonic() < deadline: time.sleep(.005)
        time.sleep(wait)
        process.kill()
        assert ends(process) == -signal.SIGKILL
    assert not (killed/"record.json").exists()
    assert ends(start(killed)) == 0
    assert (killed/"record.json").read_bytes() == (tmp_path/"whole"/"record.json").read_bytes()


@pytest.mark.slow
def test_checkpoints_do_not_go_back_or_elsewhere(tmp_path):
    path = tmp_path/"checkpoint.pt"
    privacy, model, optimizer, loader = private()
    train(model, optimizer, loader)
    privacy.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"note":
        "kept"})
    with pytest.raises(ValueError, match="load_checkpoint must come before the first step, got 5 "
        "steps"): privacy.load_checkpoint(path=path, module=model, optimizer=optimizer)
    other, *objects = private(noise_multiplier=2.)
    with pytest.raises(ValueError, match="noise_schedule must be the checkpoint's"):
        other.load_checkpoint(path=path, module=objects[0], optimizer=objects[1])
    other, *objects = private(max_grad_norm=2.)
    with pytest.raises(ValueError, match=r"clip_rule must be the checkpoint's "
        r"Flat\(max_grad_norm=0.5\), got"): other.load_checkpoint(path=path, module=objects[0],
        optimizer=objects[1])
    fresh, *objects = private()
    checkpoint = fresh.load_checkpoint(path=path, module=objects[0], optimizer=objects[1])
    assert checkpoint["note"] == "kept"
    assert torch.equal(weights(objects[0]), weights(model)) and fresh.budget(
        1e-4) == privacy.budget(1e-4)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="checkpoint must be whole"): private()[0].load_checkpoint(
        path=path, module=model, optimizer=optimizer)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_checkpoints_belong_to_their_engine(tmp_path):
    (one, module, optimizer, loader), (two, other, others, _) = private(), private()
    train(module, optimizer, loader)
    one.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="module must be the one of the last make_private"):
        one.save_checkpoint(path=tmp_path/"run.pt", module=other, optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer must be the one of the last make_private"):
        two.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="module must be the one of the last make_private"):
        two.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=others)
    small, smaller, its, _ = private(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double())
    with pytest.raises(ValueError, match="checkpoint must be of this module, got"):
        small.load_checkpoint(path=tmp_path/"run.pt", module=smaller, optimizer=its)
    torch.save(module.state_dict(), tmp_path/"weights.pt")
    with pytest.raises(ValueError): two.load_checkpoint(path=tmp_path/"weights.pt", module=other,
        optimizer=others)
    assert len(small.accountant) == len(two.accountant) == 0
    two.load_checkpoint(path=tmp_path/"run.pt", module=other, optimizer=others)
    assert len(two.accountant) == 5 and torch.equal(weights(other), weights(module))


def test_a_checkpoint_of_other_groups_changes_nothing(tmp_path):
    def grouped(*parts):
        torch.manual_seed(0)
        model, privacy = flat_network(), PrivacyEngine(secure_mode=False)
        parameters = list(model.parameters())
        groups = [dict(params=parameters[a:b]) for a, b in parts]
        return privacy, *privacy.make_private(module=model,
            optimizer=torch.optim.SGD(groups, lr=.1),
            data_loader=DataLoader(flat_data(), batch_size=8), noise_multiplier=1.,
            max_grad_norm=1.)
    n = len(list(flat_network().parameters()))
    privacy, module, optimizer, loader = grouped((0, n))
    train(module, optimizer, loader)
    privacy.save_checkpoint(path=tmp_path/"one.pt", module=module, optimizer=optimizer)
    privacy, module, optimizer, _ = grouped((0, 1), (1, n))
    before = weights(module).clone()
    with pytest.raises(ValueError, match=rf"checkpoint must be of an optimizer with parameters in "
        rf"groups of \[1, {n-1}\], got \[{n}\]"): privacy.load_checkpoint(path=tmp_path/"one.pt",
        module=module, optimizer=optimizer)
    assert len(privacy.accountant) == 0 and torch.equal(weights(module), before)


def test_a_pass_from_before_a_resumption_is_refused(tmp_path):
    "It would draw the first batches of the run again."
    def fresh():
        torch.manual_seed(0)
        return private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    privacy, module, optimizer, loader = fresh()
    for _, (x, y) in zip(range(3), loader):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    privacy.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    privacy, module, optimizer, loader = fresh()
    opened = iter(loader)
    next(opened)
    privacy.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    with pytest.raises(ValueError, match="must end before the next begins"): next(opened)


def test_random_numbers_of_numpy_and_python_go_on(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, k): return torch.full((6,), np.random.rand() + random.random(),
            dtype=torch.float64), k % 3
    def run(stop=None):
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        privacy, module, optimizer, loader = private(dataset=Noisy(),
            model=nn.Linear(6, 3).double())
        if stop is None: privacy.load_checkpoint(path=tmp_path/"run.pt", module=module,
            optimizer=optimizer)
        while optimizer.steps_taken < (stop or 7):
            for x, y in loader:
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                if optimizer.steps_taken == (stop or 7): break
        if stop == 3: privacy.save_checkpoint(path=tmp_path/"run.pt", module=module,
            optimizer=optimizer)
        return torch.cat([p.detach().flatten() for p in module.parameters()])
    whole = run(7)
    run(3)
    random.random(), np.random.rand()
    assert torch.equal(run(), whole)


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(tmp_path):
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = nn.Linear(6, 3).double()
        engine, module, optimizer, _ = private(dataset=flat_data(), model=model,
            optimizer=kind(model.parameters(), lr=.1))
        if kind is torch.optim.SGD: engine.save_checkpoint(path=tmp_path/"made.pt", module=module,
            optimizer=optimizer)
        else:
            with pytest.raises(ValueError, match="optimizer must be the checkpoint's SGD, got "
                "optimizer=Adam"): engine.load_checkpoint(path=tmp_path/"made.pt", module=module,
                optimizer=optimizer)


def test_a_checkpoint_with_torch_randomness_alone_is_taken():
    privacy, module, optimizer, loader = private(dataset=flat_data(40),
        model=nn.Linear(6, 3).double())
    for _, (x, y) in zip(range(2), loader): F.cross_entropy(module(x),
        y).backward(); optimizer.step()
    state = {name: value for name, value in privacy.state_dict().items() if name not in ("python",
        "numpy")}
    privacy, module, optimizer, loader = private(dataset=flat_data(40),
        model=nn.Linear(6, 3).double())
    privacy.load_state_dict(state)
    assert len(loader) == len(list(loader)) == 3


def test_a_run_with_another_generator_of_numpy_s_is_saved(tmp_path):
    before = np.random.get_bit_generator()
    def fresh(): return private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    try:
        np.random.set_bit_generator(np.random.PCG64(0))
        privacy, module, optimizer, _ = fresh()
        privacy.save_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
        privacy, module, optimizer, _ = fresh()
        privacy.load_checkpoint(path=tmp_path/"run.pt", module=module, optimizer=optimizer)
    finally: np.random.set_bit_generator(before)
