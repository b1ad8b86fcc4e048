"Batches, passes and loaders of a user's loop."
import math
import random
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

from dp_companion import PrivacyEngine
from dp_companion.algorithms.poisson_batches import check_collate
from dp_companion.budgets.schedules import PoissonPlan
from user_loops import (data, flat_data, flat_network, loop, network, private,
    scaled_by_the_largest, seeded, train, weights)

pytestmark = pytest.mark.filterwarnings("ignore")

def test_a_sample_that_is_not_finite_is_left_out():
    broken = data()
    broken.tensors[0][::3] = math.nan
    _, model, optimizer, loader = private(dataset=broken)
    train(model, optimizer, loader)
    assert torch.isfinite(weights(model)).all() and optimizer.report.nonprivate_not_finite > 0


@pytest.mark.slow
@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_draw_the_same_batches(integer):
    "Their shifts overflow: all records were in every batch, or none was."
    sizes = []
    for b in (20, integer(20)):
        _, _, _, loader = private(dataset=flat_data(200), model=flat_network(),
            expected_batch_size=b)
        sizes.append([len(x) for x, _ in loader])
    assert sizes[0] == sizes[1] and 10 < np.mean(sizes[0]) < 30


@pytest.mark.parametrize("way", ["signal", "module"])
def test_no_record_is_in_a_step_twice(way):
    "Opacus's signal for pieces could add a whole batch again, at the price of once."
    model, optimizer, criterion, loader = loop()
    with pytest.raises(ValueError, match="the passes of one step must hold the records of its "
        "batch once, got [0-9]+ rows more"):
        for x, y in loader:
            for more in (True, False) if way == "signal" else (False,):
                optimizer.zero_grad()
                if way == "signal": optimizer.signal_skip_step(more)
                else: x, y = torch.cat([x]*2), torch.cat([y]*2)
                criterion(model(x), y).backward()
                optimizer.step()


@pytest.mark.parametrize("choice", ["batches", "part", "few", "again"])
def test_a_loader_that_chooses_its_samples_is_refused(choice):
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler
    made = flat_data()
    chosen = dict(
        batches=dict(batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 5, False)),
        part=dict(sampler=SequentialSampler(range(10)), batch_size=5),
        few=dict(sampler=RandomSampler(made, num_samples=10), batch_size=5),
        again=dict(sampler=RandomSampler(made, replacement=True), batch_size=5))[choice]
    own = flat_network()
    with pytest.raises(ValueError, match="data_loader must not choose its samples"):
        PrivacyEngine().make_private(module=own, optimizer=torch.optim.SGD(own.parameters(), lr=.1),
            data_loader=DataLoader(made, **chosen), noise_multiplier=1., expected_batch_size=5)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_shared_loader_gives_one_share_of_a_batch(processes):
    from torch.utils.data import DistributedSampler
    made = flat_data()
    shared = DataLoader(made, batch_size=4,
        sampler=DistributedSampler(made, num_replicas=processes, rank=0))
    own = flat_network()
    _, optimizer, _ = PrivacyEngine().make_private(module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=.1), data_loader=shared, noise_multiplier=1.)
    assert optimizer.expected_batch_size == 4*processes
    assert optimizer.batches.plan.sample_rate == 4*processes/len(made)


def test_the_length_of_a_pass_stays():
    _, model, optimizer, loader = private()
    lengths = []
    for x, y in loader:
        optimizer.zero_grad(); nn.CrossEntropyLoss()(model(x), y).backward(); optimizer.step()
        lengths.append(len(loader))
    assert set(lengths[:-1]) == {len(lengths)}


def test_processes_that_would_train_apart_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="module must be in "
        "torch.nn.parallel.DistributedDataParallel before make_private where 2 "
        "processes train, got Sequential"): private()


def test_a_pass_ends_with_its_epoch():
    engine, model, optimizer, loader = private(dataset=flat_data(100), model=flat_network(),
        batch_size=30, noise_multiplier=1.)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (len(engine.accountant),
        PoissonPlan(dataset_size=100, expected_batch_size=30, epochs=1).steps) == (4, 3)


def test_workers_bring_the_same_batches():
    batches = []
    for workers in (0, 2):
        torch.manual_seed(1)
        model = network()
        _, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=.1),
            data_loader=DataLoader(data(), batch_size=8, num_workers=workers), noise_multiplier=1.,
            max_grad_norm=1.)
        batches.append([x for x, _ in loader])
    for a, b in zip(*batches): assert torch.equal(a, b)


def share(rank, world, out):
    "One of the processes of the test below."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=world)
    model = DistributedDataParallel(network())
    torch.manual_seed(rank)
    privacy, module, optimizer, loader = private(model=model, batch_size=4)
    sizes = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(module(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
    torch.save((weights(model), sizes, len(privacy.accountant)), f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_stay_together(tmp_path, processes):
    mp.start_processes(share, args=(2, str(tmp_path/"out")), nprocs=2,
        start_method=processes.get_start_method())
    (w0, n0, t0), (w1, n1, t1) = (torch.load(f"{tmp_path/'out'}.{rank}", weights_only=True)
        for rank in (0, 1))
    assert torch.equal(w0, w1) and t0 == t1 == 10 and len(n0) == len(n1) == 10
    assert .5 < (sum(n0)+sum(n1))/40 < 1.7


BASE = data()


@pytest.mark.parametrize("dataset, times", [(Subset(BASE, [0]*3 + list(range(1, 40))), 3),
    (ConcatDataset([BASE, BASE]), 2), (Subset(BASE, [-1, 39]), 2),
    (ConcatDataset([Subset(BASE, range(5, 20)), Subset(BASE, range(10, 30))]), 2),
    (Subset(ConcatDataset([BASE, BASE]), [1, 41]), 2)])
def test_a_record_twice_in_the_data_set_is_refused(dataset, times):
    with pytest.raises(ValueError, match="data_loader must hold every record once, got one that "
        f"is in its data set {times} times"): private(dataset=dataset, batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Subset(BASE, torch.arange(0, 40, 2)),
    ConcatDataset([BASE, data()]),
    ConcatDataset([Subset(BASE, range(20)), Subset(BASE, range(20, 40))]),
    Subset(Subset(BASE, range(10, 30)), [0, 1, 19]), Subset({f"k{i}": BASE[i] for i in range(40)}, [
    "k3", "k7", "k9"])])
def test_data_sets_of_parts_are_taken(dataset): train(*private(dataset=dataset, batch_size=1)[1:])


def rolled(records):
    x, y = default_collate(records)
    return .7*x + .3*x.roll(1, 0), y


def mixed(records):
    x, y = default_collate(records)
    share = np.random.beta(.4, .4)
    return share*x + (1 - share)*x[torch.randperm(len(x))], y


def soft(records): # As MixUp's targets
    x, y = default_collate(records)
    y = F.one_hot(y, 3).double()
    return x, .7*y + .3*y.roll(1, 0)


def now_and_then(records): return rolled(records) if torch.rand(()) < .5 else default_collate(
    records)


def made_with(collate, dataset=BASE):
    model = network()
    return PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(dataset, batch_size=8, collate_fn=collate), noise_multiplier=1.,
        max_grad_norm=1.)


@pytest.mark.parametrize("collate", [rolled, mixed, soft, now_and_then])
def test_a_collate_function_that_mixes_records_is_refused(collate):
    with pytest.raises(ValueError, match="collate_fn must not mix records"): made_with(collate)


def noisy(records): return default_collate(
    [(x + torch.randn_like(x) + np.random.normal(), y) for x, y in records])


def in_order(records): return default_collate(sorted(records, key=lambda r: r[0].sum().item()))


def shuffled(records): return default_collate(random.sample(records, len(records)))


def with_sizes(records): return [*default_collate(records),
    torch.tensor([sum(x.sum() for x, _ in records),
    max(x.max() for x, _ in records) + len(records)])] # Two numbers, of the batch


# Two rows, of each record
def with_a_list(records): return [*default_collate(records), [x[0, :2] for x, _ in records]]


def emptied(records):
    for r in records: r.pop("extra")
    return default_collate([(r["x"], r["y"]) for r in records])


@pytest.mark.parametrize("collate", [noisy, in_order, shuffled, emptied, with_sizes, with_a_list])
def test_a_collate_function_that_keeps_records_apart_is_taken(collate):
    class Records(torch.utils.data.Dataset):
        def __len__(self): return 40
        def __getitem__(self, k): return dict(x=BASE[k][0], y=BASE[k][1], extra=1)
    dataset = Records() if collate is emptied else BASE
    # Which have no empty batches
    if collate in (with_sizes, with_a_list): return check_collate(collate, dataset)
    module, optimizer, loader = made_with(collate, dataset)
    if collate is not emptied: train(module, optimizer, loader)


def test_two_passes_at_once_are_refused():
    "Seeded batches would be drawn twice, and counted as if they were others."
    privacy, *_, loader = private()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ValueError, match="a pass over the returned data loader must end before the "
        "next begins"): next(first)


Pair = namedtuple("Pair", "x y")


class Pairs(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, k): return Pair(torch.zeros(1, 8, 8), 0)


def test_batches_that_cannot_be_empty_are_refused_at_once():
    with pytest.raises(ValueError, match="data_loader must give batches that can be empty"):
        private(dataset=Pairs())


def test_a_batch_that_was_only_looked_at_comes_again():
    "Else a loop could choose batches by what is in them, unknown to the ledger."
    data = TensorDataset(torch.randn(200, 6), torch.cat([torch.ones(1), torch.zeros(199)]).long())
    for secure in (True, False):
        model, engine = nn.Linear(6, 2), PrivacyEngine(secure_mode=secure)
        module, optimizer, loader = engine.make_private(module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=.1),
            data_loader=DataLoader(data, batch_size=10), noise_multiplier=1., max_grad_norm=1.)
        looked_at = [x for x, _ in loader]
        firsts = [next(iter(loader))[0] for _ in range(5)]
        assert all(torch.equal(x, y) for x, (y, _) in zip(looked_at, loader, strict=True))
        assert all(torch.equal(first, firsts[0]) for first in firsts)
        for x, y in loader:
            assert optimizer.steps_taken or torch.equal(x, firsts[0])
            optimizer.zero_grad(); F.cross_entropy(module(x), y).backward(); optimizer.step()
        assert optimizer.steps_taken == 20 and not torch.equal(next(iter(loader))[0], firsts[0])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_pieces_are_refused_after_a_look_at_another_pass(workers):
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.Linear(6, 3).double()
        _, module, optimizer, loader = (None,
            *PrivacyEngine(secure_mode=False).make_private(module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=.1),
            data_loader=DataLoader(flat_data(40), batch_size=8, num_workers=workers),
            noise_multiplier=1., max_grad_norm=1.))
        with pytest.raises(ValueError, match="must be held until its steps are done|must end "
            "before the next begins|must hold the records of its batch once"):
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4,
                optimizer=optimizer) as batches:
                for k, (x, y) in enumerate(batches):
                    if k == 1: next(iter(batches))
                    F.cross_entropy(module(x), y).backward()
                    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [2, 3])
def test_epochs_of_large_batches_end_without_an_error(epochs):
    model = nn.Linear(6, 3).double()
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(flat_data(40), batch_size=32), target_epsilon=3., target_delta=1e-3,
        epochs=epochs, max_grad_norm=1.)
    next(iter(loader)) # A look is no epoch
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    assert optimizer.steps_taken == epochs*40//32
    with pytest.raises(ValueError, match="look at records through a loader of your own"): next(
        iter(loader))


def sorted_and_dropped(records):
    records = sorted(records, key=lambda record: -record[1])
    x = torch.stack([x for x, _ in records])
    return x*(torch.rand(x.shape) > .2), torch.tensor([y for _, y in records])


def test_a_collate_function_that_sorts_and_augments_is_taken():
    records = [(torch.randn(6, generator=torch.Generator().manual_seed(k)), k % 7)
        for k in range(12)]
    check_collate(sorted_and_dropped, records)


def test_a_collate_function_with_its_own_generator_gives_a_warning():
    "Nobody can look whether it mixes."
    own = np.random.default_rng(3)
    def mixed(records):
        x, y = torch.utils.data.default_collate(records)
        share = own.uniform(.3, .7)
        return share*x + (1-share)*x[torch.from_numpy(own.permutation(len(x)))], y
    with pytest.warns(UserWarning, match="nobody checks whether it mixes records"): check_collate(
        mixed, [(torch.randn(6), k) for k in range(5)])


def test_two_passes_are_refused_where_workers_hold_one():
    model = nn.Linear(6, 3).double()
    *_, loader = PrivacyEngine().make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(flat_data(24), batch_size=8, num_workers=1, prefetch_factor=4),
        noise_multiplier=1., max_grad_norm=1.)
    one, other = iter(loader), iter(loader)
    next(one); next(other)
    with pytest.raises(ValueError, match="a pass over the returned data loader must end before the "
        "next begins"): next(one)


def test_waiting_for_another_batch_ends():
    _, _, _, loader = private(dataset=TensorDataset(torch.randn(200, 6)), model=nn.Linear(6, 2),
        batch_size=1)
    with pytest.raises(ValueError, match="an empty one too, got 1000 passes without one"):
        while True: next(iter(loader))


def test_two_models_on_one_loader_have_their_own_batches():
    data = flat_data(200)
    loader, engine, made = DataLoader(data, batch_size=20, generator=seeded()), PrivacyEngine(
        secure_mode=False), []
    for _ in range(2):
        model = nn.Linear(6, 3).double()
        made.append(engine.make_private(module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=loader,
            noise_multiplier=1., max_grad_norm=1.)[-1])
    first, second = (next(iter(batches))[0] for batches in made)
    assert first.shape != second.shape or not torch.equal(first, second)


def test_a_collate_function_is_asked_for_each_of_three_records():
    for seed in range(20):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(ValueError, match="collate_fn must not mix records"): check_collate(
            scaled_by_the_largest, TensorDataset(x, torch.zeros(3)))


def test_a_left_out_batch_is_noticed_where_workers_fetch_ahead():
    model = nn.Linear(6, 3).double()
    module, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1),
        data_loader=DataLoader(flat_data(40), batch_size=8, num_workers=1), noise_multiplier=1.,
        max_grad_norm=1.)
    def train_on(left_out):
        for k, (x, y) in enumerate(loader):
            if k == left_out: continue
            F.cross_entropy(module(x), y).backward(); optimizer.step()
    train_on(None)
    with pytest.raises(ValueError, match="must have its optimizer.step, an empty one too, got 1 "
        "without one"): train_on(1)


def test_a_left_out_batch_is_noticed_behind_another_loader():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    with pytest.raises(ValueError, match="must have its optimizer.step, an empty one too, got 1 "
        "without one"):
        for k, (x, y) in enumerate(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler,
            collate_fn=loader.collate_fn)):
            if k == 1: continue
            F.cross_entropy(module(x), y).backward(); optimizer.step()


def test_an_earlier_pass_in_pieces_draws_no_more():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2,
        optimizer=optimizer) as batches:
        earlier, later = iter(batches), iter(batches)
        next(earlier), next(later)
        with pytest.raises(ValueError, match="must end before the next begins"): list(earlier)


def test_the_length_of_a_pass_is_what_it_gives(tmp_path):
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    for _, (x, y) in zip(range(2), loader): F.cross_entropy(module(x),
        y).backward(); optimizer.step()
    batches = iter(loader)
    next(batches)
    assert len(loader) == 1 + len(list(batches)) == 3


def padded_to_the_longest(records):
    return nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True), torch.tensor(
        [y for _, y in records])


@pytest.mark.parametrize("collate", [default_collate, padded_to_the_longest])
def test_a_collate_function_is_taken_without_a_word(collate):
    lengths = dict(
        zip(range(4), [2, 3, 4, 5])) if collate is padded_to_the_longest else dict.fromkeys(
        range(4), 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_collate(collate, [(torch.randn(n), k) for k, n in lengths.items()])


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), np.random.rand, random.random])
def test_checking_collate_fn_draws_no_random_numbers(draw):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self): return 5
        def __getitem__(self, k): return torch.rand(6)*np.random.rand()*random.random(), k
    def drawn(looks):
        for seed in (torch.manual_seed, np.random.seed, random.seed): seed(0)
        if looks: check_collate(default_collate, Noisy())
        return draw()
    assert drawn(True) == drawn(False)


def test_passes_without_a_step_are_counted_from_the_last_step():
    _, module, optimizer, loader = private(dataset=flat_data(40), model=nn.Linear(6, 3).double())
    optimizer.batches.idle_passes = 999
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward(); optimizer.step()
    for _ in range(1000): optimizer.batches.begin_pass()
    with pytest.raises(ValueError, match="got 1000 passes without one"): [
        optimizer.batches.begin_pass() for _ in range(2)]
    next(iter(loader)) # Once refused, a loop may go on
