"Runs: batches, devices, kernels and checkpoints."
import numpy as np
import pytest
import torch
from dp_companion.training.records import write_json
from dp_companion.training import run
from dp_companion.training.spec import run_spec
from dp_companion.training.training import train


def test_an_epoch_without_a_step_is_refused(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match="expected_batch_size must leave a step to every epoch, got expected_batch_size=1000 "
              "of 1437 records; use at most 718"
    ):
        short_run(tmp_path, monkeypatch, "cpu", expected_batch_size=1000)


def test_a_bound_that_follows_counts_takes_no_schedule(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="bound_decay_rate must be None with clip_rule=global_adapt"
    ):
        short_run(
            tmp_path, monkeypatch, "cpu", "global_adapt", strict_max_grad_norm=10.,
            bound_decay_rate=.5, drop_every=1
        )


def short_run(runs, monkeypatch, device, name="flat", **values):
    monkeypatch.setenv("DP_COMPANION_DEVICE", device)
    return train(
        run_spec(**dict(
            paper="global_adapt_v2", method=name, dataset="digits", model="mnist_cnn",
            clip_rule=name, noise_multiplier=1., accounting="as_printed", target_epsilon=1.,
            epochs=2, expected_batch_size=128, seed=0
        ) | values),
        runs
    )


def test_a_step_in_pieces_is_the_step_at_once(tmp_path, monkeypatch):
    made, build = [], run._build_step
    monkeypatch.setattr(run, "_build_step", lambda *given: made.append(build(*given)) or made[-1])
    def losses(folder): return [e["nonprivate_train_loss"] for e in short_run(tmp_path/folder,
        monkeypatch, "cpu", dataset="digits_maps", model="maps_cnn").epochs]
    pieces = losses("pieces")
    monkeypatch.setitem(run.PHYSICAL_BATCHES, "maps_cnn", 1437)
    np.testing.assert_allclose(pieces, losses("at once"), rtol=1e-4)
    assert {step.max_physical_batch_size for step in made} == {64, 1437}


def test_the_trainers_batches_are_independent_draws():
    "Marginals and all pairs of records, at the exact rate; every draw is of another step."
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler
    n, q, draws = 50, .2, 20_000
    member = np.zeros((draws, n))
    for row, batch in zip(
        member,
        UniformWithReplacementSampler(
            num_samples=n, sample_rate=q, generator=torch.Generator().manual_seed(0), steps=draws
        )
    ):
        row[batch] = 1
    pairs = (member.T@member)[np.triu_indices(n, 1)]/draws
    following = (member[1:].T@member[:-1])/(draws - 1)
    for found, rate, most in ((member.mean(0), q, 4), (pairs, q*q, 5), (following, q*q, 5)):
        assert np.abs(found - rate).max() < most*np.sqrt(rate*(1 - rate)/draws)


@pytest.mark.parametrize("device", ["gpu7", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_one_sentence(tmp_path, monkeypatch, device):
    with pytest.raises(
        ValueError,
        match=f"DP_COMPANION_DEVICE must be a device that torch can use here, got {device!r}; "
              "unset it"
    ):
        short_run(tmp_path, monkeypatch, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a CUDA device")
@pytest.mark.parametrize("name", ["flat", "global_adapt", "group_adaptive"])
def test_a_run_on_cuda_takes_the_steps_of_the_cpu(tmp_path, monkeypatch, name):
    here, there = (
        short_run(tmp_path/device, monkeypatch, device, name) for device in ("cpu", "cuda")
    )
    assert there.provenance["device"] == "cuda"
    assert here.budget == there.budget
    for a, b in zip(here.epochs, there.epochs):
        assert a["nonprivate_train_loss"] == pytest.approx(b["nonprivate_train_loss"], rel=1e-3)


def test_a_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    from dp_companion.algorithms.checkpoints import read_checkpoint
    torch.save({"weights": torch.zeros(5000)}, path := tmp_path/"checkpoint.pt")
    assert len(read_checkpoint(path)["weights"]) == 5000
    content = bytearray(path.read_bytes())
    content[len(content)//2] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["weights"].any() # torch does not see it
    with pytest.raises(ValueError, match="checkpoint must be whole"):
        read_checkpoint(path)


def test_run_that_is_killed_before_its_record_has_its_time(tmp_path, monkeypatch):
    def no_record(path, content):
        if path.name == "record.json": raise KeyboardInterrupt
        write_json(path, content)
    monkeypatch.setattr(run, "write_json", no_record)
    with pytest.raises(KeyboardInterrupt): short_run(tmp_path, monkeypatch, "cpu")
    folder, = tmp_path.glob("*/timing.json")
    assert not folder.with_name("record.json").exists()
