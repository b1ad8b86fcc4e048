"Models and steps that the tests of several modules of the mechanism share."
from torch import nn
from dp_companion.algorithms.clipping import Flat
from steps import LOSS, difference, gradient, step_for
from oracles.opacus_engines import ORACLES


def against_oracles(build, x, y, rule=Flat(max_grad_norm=.5), names=("ghost", "hooks"),
                    nearly=1e-9):
    "The gradient of a step without noise, the same by every oracle up to rounding."
    step = step_for(build(), clip_rule=rule)
    report = step(LOSS, x, y)
    for name in names:
        total, norms = ORACLES[name](build(), LOSS, x, y, rule.scale)
        assert difference(gradient(step), total/8) < nearly
        assert difference(report.nonprivate_norms, norms.detach()) < nearly
    return gradient(step)


class Pulled(nn.Module):
    "A layer whose output gradients are `way`, one for each output."
    def __init__(self, layer, way): super().__init__(); self.layer, self.way = layer, way
    def forward(self, x): return (self.layer(x)*self.way).flatten(1).sum(1)
