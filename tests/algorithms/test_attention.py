"torch's attention and its transformer layers as they come."
import pytest
import torch
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_companion import PrivacyEngine
from dp_companion.algorithms.attention import SplitAttention, split
from dp_companion.algorithms.clipping import Flat
from dp_companion.algorithms.private_step import PrivateStep

N, T, WIDTH, C = 6, 6, 8, .2 # As many positions as samples: a mask is no batch
LAYER = dict(dim_feedforward=12, dropout=0., batch_first=True)


def causal(): return torch.ones(T, T).triu(1).bool()


def attend(layer, x, **masks):
    found = layer(x, x, x, **masks)
    return found[0]


def weighed(layer, x):
    output, weights = layer(x, x, x)
    return output + weights@x


ATTENTION = nn.MultiheadAttention, (WIDTH, 2), dict(batch_first=True)
ENCODER = nn.TransformerEncoderLayer, (WIDTH, 2), LAYER
DECODER = nn.TransformerDecoderLayer, (WIDTH, 2), LAYER
CASES = {
    "attention": (ATTENTION, attend),
    "weights": (ATTENTION, weighed),
    "mask": (ATTENTION, lambda layer, x: attend(layer, x, attn_mask=causal(), need_weights=False)),
    "numbers": (ATTENTION, lambda layer, x: attend(layer, x,
        attn_mask=torch.linspace(-1, 1, T*T).reshape(T, T).to(x))),
    "hint": (ATTENTION, lambda layer, x: attend(layer, x, attn_mask=causal(), is_causal=True,
                                                need_weights=False)),
    "padding": (ATTENTION, lambda layer, x: attend(layer, x, key_padding_mask=x[..., 0] > 1.5)),
    "other keys": (ATTENTION, lambda layer, x: layer(x, x[:, :3].tanh(), x[:, :3].tanh())[0]),
    "other values": (ATTENTION, lambda layer, x: layer(x, x.sin(), x.cos())[0]),
    "encoder": (ENCODER, lambda layer, x: layer(x)),
    "encoder, mask": (ENCODER, lambda layer, x: layer(x, src_mask=causal(), is_causal=True)),
    "norm first": ((*ENCODER[:2], LAYER | dict(norm_first=True, activation="gelu")),
                   lambda layer, x: layer(x, src_mask=causal())),
    "decoder": (DECODER, lambda layer, x: layer(x, x.sin(), tgt_mask=causal())),
    "both": ((nn.Transformer, (), dict(d_model=WIDTH, nhead=2, num_encoder_layers=1,
              num_decoder_layers=1, **LAYER)), lambda layer, x: layer(x, x.cos(),
              tgt_mask=causal())),
}


class Net(nn.Module):
    def __init__(self, made, use):
        super().__init__()
        (kind, args, options), self.use = made, use
        torch.manual_seed(0)
        self.layer, self.last = kind(*args, **options), nn.Linear(WIDTH, 3)
    def forward(self, x): return self.last(self.use(self.layer, x).mean(1))


def data():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(N, T, WIDTH, generator=draw).double(), torch.arange(N) % 3


def of_batches_of_one(model, x, y):
    total = 0
    parameters = [p for p in model.parameters() if p.requires_grad]
    for row, label in zip(x, y):
        loss = nn.functional.cross_entropy(model(row[None]), label[None])
        found = torch.autograd.grad(loss, parameters)
        g = torch.cat([part.flatten() for part in found])
        total = total + g*min(1, C/g.norm())
    return total


def clipped(model, x, y):
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), noise_multiplier=0.,
                       clip_rule=Flat(max_grad_norm=C), expected_batch_size=1)
    step(nn.CrossEntropyLoss(), x, y)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("case", CASES)
def test_the_clipped_sum_is_that_of_batches_of_one(case):
    x, y = data()
    model = Net(*CASES[case]).double()
    expected = of_batches_of_one(model, x, y)
    torch.testing.assert_close(clipped(model, x, y), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj", "in_proj"])
def test_a_part_of_attention_may_be_frozen(frozen):
    model, (x, y) = Net(*CASES["mask"]).double(), data()
    for name, p in model.layer.named_parameters(): p.requires_grad_(not name.startswith(frozen))
    expected = of_batches_of_one(model, x, y)
    torch.testing.assert_close(clipped(model, x, y), expected, rtol=1e-6, atol=1e-9)


def train(model):
    x, y = data()
    model, optimizer, loader = PrivacyEngine().make_private(module=model, noise_multiplier=1.,
        optimizer=torch.optim.SGD(model.parameters(), lr=.1), max_grad_norm=1.,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=3))
    for _ in range(3):
        for rows, labels in loader:
            nn.functional.cross_entropy(model(rows), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()(x)


@pytest.mark.parametrize("case", ["encoder, mask", "decoder", "both"])
def test_transformers_train_with_dropout(case):
    (kind, args, options), use = CASES[case]
    assert train(Net((kind, args, options | dict(dropout=.1)), use).double()).isfinite().all()


def masked(layer, x): return attend(layer, x, attn_mask=causal()[:5, :5], need_weights=False)


def test_mask_in_opacus_attention_is_refused_and_the_advice_works():
    def short(layer, x): return masked(layer, x[:, :5])
    with pytest.raises(ValueError, match="attn_mask must not be given to Opacus's "
                       "DPMultiheadAttention.*; use torch.nn.MultiheadAttention with "
                       "batch_first=True, which is taken as it comes"):
        train(Net((DPMultiheadAttention, (WIDTH, 2), dict(batch_first=True)), short).double())
    assert train(Net(ATTENTION, short).double()).isfinite().all()


@pytest.mark.parametrize("wrong", [dict(), dict(kdim=8, vdim=4), dict(add_bias_kv=True),
                                   dict(add_zero_attn=True)])
def test_attention_of_another_form_is_refused_and_the_advice_works(wrong):
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=bool(wrong), **wrong)
    with pytest.raises(ValueError, match="has the sequence in front of the batch, or more "
                       "parameters than one projection; use batch_first=True, and leave out kdim"):
        clipped(nn.Sequential(layer), *data())
    assert clipped(Net(*CASES["attention"]).double(), *data()).isfinite().all()


class AtItsThreshold(nn.Module):
    "A ReLU whose input is zero to rounding, so that it turns between torch's way and the layers'."
    def __init__(self, x):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)
        self.last = nn.Linear(256, 3)
        for name, p in self.attention.named_parameters():
            if "bias" in name: nn.init.normal_(p) # Added within the product on one way alone
        with torch.no_grad():
            self.ways = [self.attention(x, x, x)[0]]
            with split([SplitAttention(self.attention)]): self.ways += [self.attention(x, x, x)[0]]
        self.register_buffer("least", torch.minimum(*self.ways).amin(0))
    def forward(self, x): return self.last((self.attention(x, x, x)[0] - self.least).relu().mean(1))


def test_a_unit_that_turns_between_two_roundings_is_no_fault():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, 256, generator=draw).repeat(N, 1, 1)
    model = AtItsThreshold(x)
    if torch.equal(*model.ways): pytest.skip("both ways round alike on this processor")
    step = PrivateStep(model, torch.optim.SGD(model.parameters(), lr=0.), noise_multiplier=0.,
                       clip_rule=Flat(max_grad_norm=C), expected_batch_size=N)
    step(nn.CrossEntropyLoss(), x, torch.arange(N) % 3)
