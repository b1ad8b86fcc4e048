"""References for the private step: Opacus's hooks and ghost clipping, and batches of one.

Each takes a fresh model, a loss with one number per sample, a batch and a rule from norms to
scales, and gives the sum of the scaled gradients (n,), in the order of the trainable parameters,
and the norms (batch,).
"""
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn


def per_sample(loss_fn):
    "A torch loss without its mean; a function of (outputs, targets) as it is."
    if isinstance(loss_fn, nn.Module): return type(loss_fn)(reduction="none")
    return loss_fn


def trainable(model): return [p for p in model.parameters() if p.requires_grad]


def flat(gradients, parameters):
    "One vector; zero where a parameter has no gradient."
    pairs = zip(gradients, parameters)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def one_by_one(model, loss_fn, x, y, scale, groups=None):
    "Ordinary differentiation, one sample at a time; non-finite gradients are left out."
    parameters, rows = trainable(model), []
    for k in range(len(y)):
        loss = per_sample(loss_fn)(model(x[k:k+1]), y[k:k+1]).sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append(flat(found, parameters))
    norms = torch.stack([row.norm() for row in rows])
    finite = torch.isfinite(norms)
    scales = scale(norms.where(finite, 0), *([] if groups is None else [groups]))
    return sum(s*row for s, row, good in zip(scales, rows, finite) if good), norms


def default_format(model):
    "The model, convolutions in default memory format: Opacus 1.6 reads others in a wrong order."
    def contiguous(layer, args): return tuple(x.contiguous() for x in args)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            layer.register_forward_pre_hook(contiguous)
    return model


def opacus_hooks(model, loss_fn, x, y, scale):
    "Opacus's `GradSampleModule`, which holds every per-sample gradient."
    parameters, hooked = trainable(model), GradSampleModule(default_format(model),
        loss_reduction="sum", strict=False)
    per_sample(loss_fn)(hooked(x), y).sum().backward()
    samples = [torch.zeros(len(y), *p.shape, dtype=p.dtype) if p.grad_sample is None
               else p.grad_sample for p in parameters]
    rows = torch.cat([g.reshape(len(y), -1) for g in samples], 1)
    norms = rows.norm(dim=1)
    return torch.einsum("i,ij->j", scale(norms), rows), norms


def opacus_ghost(model, loss_fn, x, y, scale):
    "Opacus's ghost clipping: norms in a first backward pass, the weighted sum in a second."
    parameters = trainable(model)
    ghost = GradSampleModuleFastGradientClipping(default_format(model), loss_reduction="sum",
        strict=False)
    for p in parameters: p._norm_sample = torch.zeros(len(y), dtype=p.dtype)
    losses = per_sample(loss_fn)(ghost(x), y)
    losses.sum().backward(retain_graph=True)
    norms = ghost.get_norm_sample()
    for p in parameters: p.grad = None
    ghost.disable_hooks()
    (scale(norms)*losses).sum().backward()
    return flat([p.grad for p in parameters], parameters), norms


ORACLES = dict(one_by_one=one_by_one, hooks=opacus_hooks, ghost=opacus_ghost)
