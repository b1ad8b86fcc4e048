"Small runs of paper sanitization for tests of its trainer and of attacks on it."
from dataclasses import replace

from dp_companion.papers.sanitization.grid import layer_profile, printed_values, real_values
from dp_companion.training.datasets import load_dataset
from dp_companion.training.spec import run_spec

SIZE = replace(layer_profile("digits"), epochs=3, windows=(2, 2), private_batch_size=200,
               expected_batch_size=200, width=16, seeds=1)
DATA = load_dataset("digits")


def below_spec(**changes):
    "DP-SGD below, noise not calibrated: so `as_printed`, whose target is not checked."
    values = dict(paper="sanitization", method="DP-SGD below", dataset="digits",
                  model="small_sanitization_cnn", clip_rule="auto_s", noise_multiplier=2.,
                  accounting="as_printed", target_epsilon=1., epochs=3,
                  expected_batch_size=200, optimizer="sgd", learning_rate=.5, weight_decay=0.,
                  lr_scheduler="cosine", seed=0, layer_below="dp_sgd", layer_width=9, layer_clip=.5,
                  layer_noise_multiplier=4.)
    return run_spec(**values | changes)


def specs():
    yield run_spec(**printed_values(SIZE, "Sanitization + Adaptive C", layer_dropout=.2), seed=0)
    for method in ("Frozen", "One release"):
        yield run_spec(**real_values(SIZE, method, target_epsilon=5.), seed=0)
    yield below_spec()


SPECS = {s.method.name: s for s in specs()}
