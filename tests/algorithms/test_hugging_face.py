"Models of transformers and adapters of peft, as they come: sums are those of batches of one."
import logging

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dp_companion import PrivacyEngine

tf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
logging.getLogger("transformers").setLevel(logging.ERROR)
WIDE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
WORDS = dict(vocab_size=40, max_position_embeddings=16)
ENDS = dict(bos_token_id=0, eos_token_id=1)
CALM = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
BOUND = .05


def bert(): return tf.BertForSequenceClassification(tf.BertConfig(**WIDE, **WORDS, **CALM,
    num_labels=3))
def gpt2(): return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40,
    n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ENDS))
def llama(): return tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, **WORDS, **ENDS,
    num_key_value_heads=1))
def mistral(): return tf.MistralForCausalLM(tf.MistralConfig(**WIDE, **WORDS, **ENDS,
    num_key_value_heads=1, sliding_window=4))
def vit(): return tf.ViTForImageClassification(tf.ViTConfig(**WIDE, image_size=16, patch_size=8,
    num_labels=3))
def swin(): return tf.SwinForImageClassification(tf.SwinConfig(image_size=16, patch_size=2,
    embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=3, drop_path_rate=0.))
def t5(): return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=40, d_model=16, d_kv=8,
    d_ff=24, num_layers=2, num_heads=2, dropout_rate=0., decoder_start_token_id=0))
def distilbert(): return tf.DistilBertForSequenceClassification(tf.DistilBertConfig(**WORDS,
    dim=16, n_layers=2, n_heads=2, hidden_dim=24, dropout=0., attention_dropout=0.,
    seq_classif_dropout=0., num_labels=3))
def opt(): return tf.OPTForCausalLM(tf.OPTConfig(**WORDS, **ENDS, hidden_size=16, ffn_dim=24,
    num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16, dropout=0., pad_token_id=2,
    attention_dropout=0., layerdrop=0.))


def lora(build, *targets, **options):
    return lambda: peft.get_peft_model(build(), peft.LoraConfig(r=2, init_lora_weights=False,
        target_modules=targets[0] if "*" in targets[0] else list(targets), **options))
def vera(build, target): return lambda: peft.get_peft_model(build(), peft.VeraConfig(r=4,
    target_modules=[target]))
def ia3(build, targets, wide): return lambda: peft.get_peft_model(build(), peft.IA3Config(
    target_modules=targets, feedforward_modules=wide, init_ia3_weights=False))
def prompt(build): return lambda: peft.get_peft_model(build(), peft.PromptTuningConfig(
    task_type="CAUSAL_LM", num_virtual_tokens=3))


ATTENTION = r".*(query|value|q_proj|v_proj)"
MODELS = {f.__name__: f for f in (bert, gpt2, llama, mistral, vit, swin, t5, distilbert, opt)} | {
    "bert, LoRA": lora(bert, "query", "value"),
    "gpt2, LoRA": lora(gpt2, "c_attn", fan_in_fan_out=True),
    "llama, LoRA": lora(llama, "q_proj", "v_proj"), "mistral, LoRA": lora(mistral, "q_proj"),
    "vit, LoRA": lora(vit, ATTENTION), "swin, LoRA": lora(swin, ATTENTION),
    "t5, LoRA": lora(t5, "q", "v"), "opt, LoRA": lora(opt, "q_proj", "v_proj"),
    "llama, DoRA": lora(llama, "q_proj", "v_proj", use_dora=True),
    "bert, DoRA": lora(bert, "query", use_dora=True),
    "llama, VeRA": vera(llama, "q_proj"), "bert, VeRA": vera(bert, "query"),
    "llama, IA3": ia3(llama, ["k_proj", "down_proj"], ["down_proj"]),
    "bert, IA3": ia3(bert, ["key", "value"], []),
    "llama, prompt tuning": prompt(llama), "gpt2, prompt tuning": prompt(gpt2),
}


def data(name, n=6):
    g = torch.Generator().manual_seed(0)
    if name.startswith(("vit", "swin")):
        return dict(pixel_values=torch.randn(n, 3, 16, 16, generator=g, dtype=torch.float64),
                    labels=torch.arange(n) % 3)
    words = torch.randint(3, 40, (n, 7), generator=g)
    mask = torch.ones_like(words)
    mask[1, 5:], mask[3, 4:] = 0, 0
    found = dict(input_ids=words, attention_mask=mask)
    if name.startswith(("bert", "distil")): return found | dict(labels=torch.arange(n) % 3)
    return found | dict(labels=words.masked_fill(mask == 0, -100))


class Records(Dataset):
    def __init__(self, columns): self.columns = columns
    def __len__(self): return len(self.columns["labels"])
    def __getitem__(self, k): return {name: x[k] for name, x in self.columns.items()}


def build(name):
    "In float64; what an adapter starts at zero, which gives no gradient, starts elsewhere."
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    for p in model.parameters():
        if p.requires_grad and not p.detach().any(): torch.nn.init.normal_(p, std=.02)
    return model, [p for p in model.parameters() if p.requires_grad]


def private_sum(name, columns):
    model, parameters = build(name)
    n = len(columns["labels"])
    private, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(module=model,
        optimizer=torch.optim.SGD(parameters, lr=0.), noise_multiplier=1e-14, max_grad_norm=BOUND,
        data_loader=DataLoader(Records(columns), batch_size=n))
    for batch in loader:
        private(**batch).loss.backward()
        optimizer.step()
    return n*torch.cat([p.grad.flatten() for p in parameters])


def one_by_one(name, columns):
    model, parameters = build(name)
    total = 0
    for k in range(len(columns["labels"])):
        loss = model(**{key: x[k:k+1] for key, x in columns.items()}).loss
        g = torch.cat([x.flatten() for x in torch.autograd.grad(loss, parameters,
            materialize_grads=True)])
        total = total + g*min(1, BOUND/g.norm())
    return total


@pytest.mark.parametrize("name", MODELS)
def test_the_clipped_sum_is_that_of_batches_of_one(name):
    columns = data(name)
    found, true = private_sum(name, columns), one_by_one(name, columns)
    assert (found - true).norm() <= 1e-6*true.norm()
