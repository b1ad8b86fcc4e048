"Loops of accelerate, Hugging Face's Trainer and Lightning: the page's blocks run, its table holds."
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from dp_companion import PrivacyEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
PAGE = Path(__file__).parents[2]/"nbs"/"ways"/"trainers.ipynb"
TEXT = "\n".join("".join(cell["source"]) for cell in json.loads(PAGE.read_text())["cells"])
BLOCKS = dict(zip(["accelerate", "transformers", "lightning"],
                  re.findall(r"```python\n(.*?)```", TEXT, re.S), strict=True))
SAID = dict(re.findall(r"^\| (.*?) \| \*(.*?)\* \|", TEXT, re.M))


class Records(Dataset):
    def __len__(self): return 24
    def __getitem__(self, k): return dict(x=torch.linspace(k % 3, 1, 6), labels=torch.tensor(k % 3))


class Net(nn.Module):
    "With its loss inside, as transformers has it."
    config, is_checkpointing = SimpleNamespace(use_cache=False), False
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.smoothing = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), 0.
    def forward(self, x, labels=None):
        logits = (checkpoint(self.layers, x, use_reentrant=False) if self.is_checkpointing
                  else self.layers(x))
        if labels is None: return dict(logits=logits)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return dict(loss=loss, logits=logits)
    def gradient_checkpointing_enable(self, **kwargs): self.is_checkpointing = True


class Private:
    "What `make_private` returned, and what it was given."
    def __init__(self, model=None, optimizer=None, loader=None, **options):
        self.net = model if model is not None else Net()
        self.plain = optimizer or torch.optim.Adam(self.net.parameters(), lr=.01)
        self.engine = PrivacyEngine()
        self.module, self.optimizer, self.loader = self.engine.make_private(module=self.net,
            optimizer=self.plain, data_loader=loader or DataLoader(Records(), batch_size=8),
            noise_multiplier=1., max_grad_norm=1., **options)
    @property
    def steps(self): return len(self.engine.accountant)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_page_runs(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    if name != "lightning":
        pytest.importorskip("accelerate").state.AcceleratorState._reset_state(True)
    exec(compile(BLOCKS[name], name, "exec"), {"__name__": name})
    assert "certified" in capsys.readouterr().out


def said(row): return pytest.raises(ValueError, match=re.escape(SAID[row]))


# accelerate

def fresh(**options):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    return accelerate.Accelerator(cpu=True, **options)


def loop(accelerator, module, optimizer, loader):
    for batch in loader:
        with accelerator.accumulate(module):
            optimizer.zero_grad()
            accelerator.backward(module(**batch)["loss"])
            accelerator.clip_grad_norm_(module.parameters(), 1e-3)
            optimizer.step()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_afterwards(precision):
    accelerator, p = fresh(mixed_precision=precision), Private()
    loop(accelerator, *accelerator.prepare(p.module, p.optimizer), p.loader)
    assert p.steps == 3 and p.optimizer.report.nonprivate_norms.max() > 1e-3


def prepared(accelerator, *more):
    net = Net()
    return accelerator.prepare(net, torch.optim.Adam(net.parameters()), *more)


def test_accelerate_prepares_before():
    accelerator = fresh()
    p = Private(*prepared(accelerator))
    loop(accelerator, p.module, p.optimizer, p.loader)
    assert p.steps == 3


def test_accelerate_must_not_prepare_the_loader_afterwards():
    accelerator, p = fresh(), Private()
    with said("accelerate: `prepare(loader)` after `make_private`"):
        loop(accelerator, *accelerator.prepare(p.module, p.optimizer, p.loader))


def test_a_loader_that_accelerate_prepared_needs_a_batch_size():
    accelerator = fresh()
    objects = prepared(accelerator, DataLoader(Records(), batch_size=8))
    with said("accelerate: `prepare(loader)` before `make_private`"): Private(*objects)
    p = Private(*objects, expected_batch_size=8)
    loop(accelerator, p.module, p.optimizer, p.loader)
    assert p.steps == 3


def test_accelerate_must_not_round_inside():
    accelerator = fresh(mixed_precision="bf16")
    p = Private(*prepared(accelerator))
    with said("accelerate: `prepare` with bf16 before `make_private`"):
        loop(accelerator, p.module, p.optimizer, p.loader)


def test_accelerate_must_not_accumulate():
    accelerator, p = fresh(gradient_accumulation_steps=2), Private()
    with said("accelerate: `accumulate` over two batches"):
        loop(accelerator, *accelerator.prepare(p.module, p.optimizer), p.loader)


def test_accelerate_must_not_resume(tmp_path):
    accelerator, p = fresh(), Private()
    loop(accelerator, *accelerator.prepare(p.module, p.optimizer), p.loader)
    accelerator.save_state(tmp_path)
    accelerator, p = fresh(), Private()
    accelerator.prepare(p.module, p.optimizer)
    with said("accelerate: `load_state`"): accelerator.load_state(tmp_path)


# Trainer

def trainer(p, folder, *, module=None, optimizers=None, loader=None, **options):
    tf = pytest.importorskip("transformers")
    fresh()
    class Own(tf.Trainer):
        def get_train_dataloader(self): return loader or p.loader
    standard = dict(output_dir=folder, use_cpu=True, num_train_epochs=2, report_to=[],
                    remove_unused_columns=False, save_strategy="no", disable_tqdm=True)
    return Own(model=module or p.module, optimizers=optimizers or (p.optimizer, None),
               args=tf.TrainingArguments(**standard | options))


@pytest.mark.parametrize("options", [{}, dict(bf16=True), dict(max_grad_norm=0.),
    dict(save_strategy="epoch"), dict(max_steps=6), dict(logging_strategy="steps",
    logging_steps=1)], ids=str)
def test_trainer_trains(options, tmp_path):
    p = Private()
    trainer(p, tmp_path, **options).train()
    assert p.steps == 6


def test_trainer_has_smaller_batches_by_a_memory_manager(tmp_path):
    p = Private()
    with BatchMemoryManager(data_loader=p.loader, max_physical_batch_size=4,
                            optimizer=p.optimizer) as loader:
        trainer(p, tmp_path, loader=loader, max_steps=100).train()
    assert p.steps > 6 # Trainer counts pieces, of which a Poisson batch has no fixed number


def test_a_model_smooths_labels(tmp_path):
    p = Private()
    p.net.smoothing = .1
    trainer(p, tmp_path).train()
    assert p.steps == 6


REFUSED = {
    "Trainer: its own loader": lambda p: dict(loader=DataLoader(Records(), batch_size=8)),
    "Trainer: its own optimizer": lambda p: dict(optimizers=(None, None)),
    "Trainer: the model as it was": lambda p: dict(module=p.net),
    "Trainer: `gradient_accumulation_steps=2`": lambda p: dict(gradient_accumulation_steps=2),
    "Trainer: `gradient_checkpointing=True`": lambda p: dict(gradient_checkpointing=True),
    "Trainer: `label_smoothing_factor=0.1`": lambda p: dict(label_smoothing_factor=.1),
}


@pytest.mark.parametrize("row", REFUSED)
def test_trainer_is_refused(row, tmp_path):
    p = Private()
    with said(row): trainer(p, tmp_path, **REFUSED[row](p)).train()


def test_trainer_must_not_resume(tmp_path):
    trainer(Private(), tmp_path, save_strategy="epoch").train()
    with said("Trainer: `resume_from_checkpoint=True`"):
        trainer(Private(), tmp_path, num_train_epochs=3).train(resume_from_checkpoint=True)


# Lightning

def lit(network, optimizer, is_automatic=True):
    lightning = pytest.importorskip("lightning")
    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.automatic_optimization = network, is_automatic
        def configure_optimizers(self): return optimizer
        def training_step(self, batch, number):
            loss = self.network(**batch)["loss"]
            if is_automatic: return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
    return Lit()


def fit(module, loader, ckpt_path=None, **options):
    lightning = pytest.importorskip("lightning")
    standard = dict(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
    found = lightning.Trainer(**standard | options)
    found.fit(module, loader, ckpt_path=ckpt_path)
    return found


@pytest.mark.parametrize("is_automatic", [True, False])
@pytest.mark.parametrize("options", [{}, dict(precision="bf16-mixed")], ids=str)
def test_lightning_trains(is_automatic, options):
    p = Private()
    fit(lit(p.module, p.optimizer, is_automatic), p.loader, **options)
    assert p.steps == 6


def test_lightning_clips_nothing():
    p = Private()
    fit(lit(p.module, p.optimizer), p.loader, gradient_clip_val=1e-3)
    assert p.steps == 6 and p.optimizer.report.nonprivate_norms.max() > 1e-3


def test_lightning_is_refused():
    p = Private()
    with said("Lightning: the network as it was"): fit(lit(p.net, p.optimizer), p.loader)
    p = Private()
    with said("Lightning: the optimizer as it was"): fit(lit(p.module, p.plain), p.loader)
    p = Private()
    with said("Lightning: its own loader"):
        fit(lit(p.module, p.optimizer), DataLoader(Records(), batch_size=8))


@pytest.mark.parametrize("row, options", [
    ("Lightning: `accumulate_grad_batches=2`", dict(accumulate_grad_batches=2)),
    ('Lightning: `precision="bf16-true"`', dict(precision="bf16-true"))])
def test_lightning_is_refused_by_its_options(row, options):
    p = Private()
    with said(row): fit(lit(p.module, p.optimizer), p.loader, **options)


def test_lightning_must_not_resume_but_loads_weights(tmp_path):
    p = Private()
    fit(lit(p.module, p.optimizer), p.loader).save_checkpoint(tmp_path/"all.ckpt")
    q = Private()
    with said("Lightning: `ckpt_path` of a trained run"):
        fit(lit(q.module, q.optimizer), q.loader, ckpt_path=tmp_path/"all.ckpt", max_epochs=3)
    assert all(map(torch.equal, p.net.parameters(), q.net.parameters()))


@pytest.mark.parametrize("is_first", [True, False])
def test_fabric_sets_up(is_first):
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu")
    net = Net()
    objects = net, torch.optim.Adam(net.parameters())
    p = Private(*fabric.setup(*objects) if is_first else objects)
    module, optimizer = (p.module, p.optimizer) if is_first else fabric.setup(p.module, p.optimizer)
    for batch in p.loader:
        optimizer.zero_grad()
        fabric.backward(module(**batch)["loss"])
        optimizer.step()
    assert p.steps == 3


class Holder(nn.Module):
    "As a LightningModule holds the returned module."
    def __init__(self, network):
        super().__init__()
        self.network = network
    def forward(self, **batch): return self.network(**batch)


@pytest.mark.parametrize("held", [lambda module: module, Holder])
def test_trainers_that_wrap_the_returned_module_are_refused(held, tmp_path):
    "In several processes they do; here one of a group stands for them."
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        p = Private()
        wrapped = DistributedDataParallel(held(p.module))
        with said("Trainer, Lightning: several processes"):
            for batch in p.loader: wrapped(**batch)
    finally: dist.destroy_process_group()


def test_every_refusal_of_the_page_is_tested():
    tests = "".join(Path(__file__).with_name(f"test_{name}.py").read_text()
                    for name in ("trainers", "torchrun"))
    assert len(SAID) == 20 and all(f'"{row}"' in tests or f"'{row}'" in tests for row in SAID)
