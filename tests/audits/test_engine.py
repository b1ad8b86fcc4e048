"`engine.audit(loop=...)`: what it finds through a user's own loop, and that nothing of it stays."
import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.functional import cross_entropy
from user_loops import private, seeded, weights
from torch.utils.data import TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.clipping import GroupAdaptive
import dp_companion.audits.engine # noqa: F401 - it gives `PrivacyEngine` its audit


def rows(n=60, width=6):
    return TensorDataset(torch.randn(n, width, generator=seeded()), torch.arange(n)%3)


def network(dropout=0., width=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Dropout(dropout), nn.ReLU(),
                         nn.Dropout(dropout), nn.Linear(8, 3))


def given(dropout=0., optimizer=torch.optim.SGD, batch_size=10, **options):
    "An engine, and what it made private."
    model = network(dropout)
    return private(dataset=rows(), model=model, batch_size=batch_size,
                   optimizer=optimizer(model.parameters(), lr=.1), **options)


def loop_of(model, optimizer, loader, *, groups=False, before_step=lambda x, loss: None,
            loss_of=cross_entropy, after_step=lambda x: None):
    def one_pass():
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            before_step(x, loss)
            optimizer.step(**({"groups": y} if groups else {}))
            after_step(x)
    return one_pass


def in_pieces(model, optimizer, loader):
    def one_pass():
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3,
                                     optimizer=optimizer)
        with manager as pieces: loop_of(model, optimizer, pieces)()
    return one_pass


def by_losses(model, optimizer, loader):
    def one_pass():
        for x, y in loader:
            optimizer.zero_grad()
            optimizer.backward(cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    return one_pass


def in_bfloat16(model, optimizer, loader):
    def one_pass():
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16): loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return one_pass


def audited(engine, loop, **options): return engine.audit(1e-3, loop=loop, draws=400, **options)


HONEST = {
    "seeded": (loop_of, {}), "secure": (loop_of, dict(secure_mode=True)),
    "Adam": (loop_of, dict(optimizer=torch.optim.Adam)), "pieces": (in_pieces, {}),
    "dropout": (loop_of, dict(dropout=.5)), "losses": (by_losses, {}),
    "bfloat16": (in_bfloat16, {}), "counts": (loop_of, dict(clip_rule="global_adapt")),
    "counts first": (lambda *parts: loop_of(*parts, groups=True),
                     dict(clip_rule=GroupAdaptive(num_groups=3))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_loop_is_found_to_be_what_is_accounted(kind):
    how, options = HONEST[kind]
    engine, *parts = given(**({} if "clip_rule" not in options else {"max_grad_norm": None})
                           | options)
    loop = how(*parts)
    loop()
    report = audited(engine, loop)
    found = report.empirical.nonprivate_loop
    assert "WRONG" not in str(report) and report.empirical.epsilon <= report.epsilon
    assert found.pairs >= 9 and 0 < found.influence <= 1 + found.rounding
    assert found.is_replaced == (kind in ("dropout", "counts first"))
    assert found.others is None if kind == "counts first" else found.others <= found.rounding
    assert found.strength == found.rate == 1


def meeting(engine, model, optimizer):
    "Records meet in a hook on a layer."
    model._module[0].register_forward_hook(lambda layer, args, out: out + 5*out.mean(0))


def first_of_all(engine, model, optimizer):
    "Every row is that of the first record."
    model._module[0].register_forward_pre_hook(lambda layer, args: (args[0]*0 + args[0][:1],)
                                               if len(args[0]) else None)


def divided(engine, model, optimizer):
    "The outputs are divided by the batch's own largest."
    model._module.register_forward_hook(lambda layer, args, out: 20*out/out.detach().abs().amax()
                                        if len(out) else out)


def unclipped(engine, model, optimizer):
    "The private step does not clip."
    optimizer.private_step.scales = lambda norms, groups: torch.full_like(norms, 9.)


def often(engine, model, optimizer):
    "The loader draws at three times the rate."
    draw = engine.batches.draw
    def three(batches):
        drawn = [draw(batches) for _ in range(3)]
        return sorted({k for batch, _ in drawn for k in batch}), drawn[-1][1]
    engine.batches.draw = three


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0., .5])
@pytest.mark.parametrize("plant, sentence", [
    (meeting, "records meet"), (first_of_all, "records meet"), (divided, "records meet"),
    (unclipped, "one record moves more"), (often, "more records are drawn")])
def test_a_fault_in_module_step_or_loader_is_found(plant, sentence, dropout):
    engine, model, optimizer, loader = given(dropout=dropout)
    loop = loop_of(model, optimizer, loader)
    loop()
    plant(engine, model, optimizer)
    silent, report = audited(engine, None), audited(engine, loop)
    assert silent.empirical.noise == 1 and silent.empirical.epsilon <= silent.epsilon
    assert "were not attacked" in str(silent) and "WRONG" not in str(silent)
    assert f"WRONG: {sentence}" in str(report).replace("one record moves more than is accounted, "
                                                       "records meet", "records meet")


@pytest.mark.slow
def test_attack_exceeds_certificate_where_a_record_moves_several_bounds():
    for plant in (first_of_all, unclipped):
        engine, model, optimizer, loader = given()
        loop = loop_of(model, optimizer, loader)
        loop()
        plant(engine, model, optimizer)
        report = engine.audit(1e-3, loop=loop, draws=4000)
        assert report.empirical.nonprivate_loop.influence > 2
        assert report.empirical.epsilon > report.epsilon


def mean_of_neighbours(model, optimizer, loader):
    "Mixes records in the loop, after the loader."
    def one_pass():
        for x, y in loader:
            optimizer.zero_grad()
            x = (x + x.roll(1, 0))/2
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return one_pass


def raw_rate(model, optimizer, loader):
    def follow(x, loss): optimizer.param_groups[0]["lr"] = .1*float(loss.detach())
    return loop_of(model, optimizer, loader, before_step=follow)


def raw_weights(model, optimizer, loader):
    def write(x): model._module[0].bias.data.add_(x.sum(), alpha=1e-3)
    return loop_of(model, optimizer, loader, after_step=write)


@pytest.mark.slow
@pytest.mark.parametrize("faulty, sentence", [
    (mean_of_neighbours, "records meet"), (raw_rate, "noise is passed by"),
    (raw_weights, "noise is passed by")])
def test_a_fault_in_the_loop_is_found(faulty, sentence):
    engine, *parts = given()
    loop_of(*parts)()
    report = audited(engine, faulty(*parts))
    assert "WRONG" in str(report) and sentence in str(report)
    assert (report.empirical.epsilon > report.epsilon) == (faulty is not mean_of_neighbours)


def test_a_private_gradient_may_be_changed_after_the_noise():
    engine, model, optimizer, loader = given()
    loop = loop_of(model, optimizer, loader)
    loop()
    def shorten(*_): nn.utils.clip_grad_norm_(model.parameters(), .01)
    optimizer.register_step_pre_hook(shorten)
    report = audited(engine, loop)
    assert report.empirical.noise == 1 and "WRONG" not in str(report)


def ending(audits, inside=False, **options):
    "What a run is at its end, audited in the middle or not."
    kernels = {"0": "matrices", "4": "matrices"}
    np.random.seed(0)
    engine, model, optimizer, loader = given(dropout=.5, optimizer=torch.optim.Adam,
        kernels=kernels, **options)
    group, running = optimizer.param_groups[0], []
    def look(x):
        group["weight_decay"] += .001 # As a scheduler that holds the dict
        if not audits or not inside or running or optimizer.steps_taken not in (3, 8): return
        running.append(True)
        audited(engine, loop)
        running.clear()
    loop = loop_of(model, optimizer, loader, after_step=look)
    for _ in range(3):
        loop()
        model.eval()
        if audits and not inside: audited(engine, loop)
        assert not model.training and not model._module.training
    state = [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    return [weights(model), torch.rand(3), torch.tensor(np.random.rand(2)), *state], (
        engine.accountant.events, optimizer.clip_rule, optimizer.steps_taken, group,
        optimizer.private_step.spot_check.passes, optimizer.recorder.book.passes,
        optimizer.batches.passes_used)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_rule": "global_adapt", "max_grad_norm": None}])
@pytest.mark.parametrize("inside", [False, True])
def test_an_audited_run_ends_the_same_to_the_bit(options, inside):
    (ours, ours_too), (theirs, theirs_too) = (ending(audits, inside, **options)
                                              for audits in (True, False))
    assert all(map(torch.equal, ours, theirs))
    for one, other in zip(ours_too, theirs_too):
        if isinstance(one, dict): one, other = ({k: x for k, x in group.items() if k != "params"}
                                                for group in (one, other))
        assert one == other


@pytest.mark.slow
def test_a_finished_run_can_be_audited_and_goes_no_further():
    engine, *parts = given(method="make_private_with_epsilon", target_epsilon=2., epochs=1,
                           target_delta=1e-3, secure_mode=True)
    loop = loop_of(*parts)
    loop()
    optimizer, held = parts[1], [dict(vars(x)) for x in (engine.batches, parts[1].private_step)]
    report = engine.audit(loop=loop, draws=400)
    assert sum(event.steps for event in report.events) == optimizer.steps_taken == 6
    for before, now in zip(held, (engine.batches, optimizer.private_step)):
        kept = ("draw", "place", "waiting", "current_pass", "target_steps", "noise", "clip_rule")
        assert all(before[name] is vars(now)[name] for name in kept if name in before)
    with pytest.raises(ValueError, match="training must stop after the 6 steps"): loop()


def test_a_loop_that_fails_leaves_nothing_behind():
    engine, *parts = given()
    loop = loop_of(*parts)
    loop()
    before, events = weights(parts[0]), engine.accountant.events
    def stop(x): raise RuntimeError("stopped")
    with pytest.raises(RuntimeError, match="stopped"):
        audited(engine, loop_of(*parts, after_step=stop))
    assert torch.equal(weights(parts[0]), before) and engine.accountant.events == events
    loop()


@pytest.mark.slow
def test_what_cannot_be_attacked_is_said():
    engine, model, optimizer, loader = given()
    loop, calls = loop_of(model, optimizer, loader), []
    def falling(x, loss):
        calls.append(0)
        optimizer.param_groups[0]["lr"] = .1/len(calls)
    loop()
    report = audited(engine, loop_of(model, optimizer, loader, before_step=falling))
    assert "clipping was not attacked" in str(report)
    assert report.empirical.nonprivate_loop.pairs == 0
    with pytest.raises(ValueError, match="loop must take one step for each batch"):
        audited(engine, lambda: None)
    with pytest.raises(ValueError, match="the engine must have taken a step"):
        PrivacyEngine().audit(1e-3, loop=loop)


@pytest.mark.slow
def test_workers_fetch_an_audits_batches_only_between_two_passes():
    torch.manual_seed(0)
    model, engine = network(), PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1.,
        data_loader=torch.utils.data.DataLoader(rows(), batch_size=20, num_workers=1))
    loop = loop_of(model, optimizer, loader)
    loop()
    with pytest.raises(ValueError, match="an audit must be between two passes"):
        loop_of(model, optimizer, loader, after_step=lambda x: audited(engine, loop))()
    with engine.batches.rehearsed([3, 4]) as drawn: loop()
    assert drawn == [[3, 4]]


class Erased(torch.utils.data.Dataset):
    "Augments by as many random numbers as it takes, as RandomResizedCrop does."
    def __len__(self): return 60
    def __getitem__(self, k):
        while torch.rand(()) < .5: pass
        return torch.randn(6)*(1 + k%2), k%3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_honest_loops_may_augment_with_any_random_numbers(workers):
    torch.manual_seed(0)
    model, engine = network(), PrivacyEngine(secure_mode=False)
    model, optimizer, loader = engine.make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1.,
        data_loader=torch.utils.data.DataLoader(Erased(), batch_size=10, num_workers=workers))
    loop = loop_of(model, optimizer, loader)
    loop()
    report = audited(engine, loop)
    found = report.empirical.nonprivate_loop
    assert "WRONG" not in str(report) and found.is_replaced and found.pairs > 0
    assert (found.others is None) == bool(workers)
