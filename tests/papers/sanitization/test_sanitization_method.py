"Specs of paper sanitization say in one sentence what is wrong with them."
import math

import pytest

from dp_companion.papers.sanitization.grid import printed_values
from dp_companion.training.spec import run_spec
from sanitized_runs import SIZE, below_spec


@pytest.mark.parametrize("wrong, sentence", [
    (dict(layer_clip=0.), "layer_clip must be a finite number > 0"), (dict(layer_clip=-1.),
        "layer_clip must be"), (dict(layer_clip=math.nan), "layer_clip must be"),
    (dict(layer_dropout=1.), "layer_dropout must be in [0, 1)"), (dict(layer_dropout=-.1),
        "layer_dropout must be in [0, 1)"), (dict(layer_noise_multiplier=0.),
            "layer_noise_multiplier must be"),
    (dict(layer_width=0), "layer_width must be a whole number > 0"),
    (dict(stop_window=4, stop_limit=1e-3),
     "stop_window must be from 2 to 3 for a run of 3 epochs, got stop_window=4"),
    (dict(stop_window=3), "stop_limit must be given exactly when there is a stop_window"),
    (dict(layer_below="public"), "layer_below must be one of"), (dict(layer_below=None),
        "layer_below must be one of"),
    (dict(layer_bound_ratio=0.), "layer_bound_ratio must be"),
    (dict(layer_bound_ratio=.05, model="pooled_rows"),
     "layer_bound_ratio must be None with model=pooled_rows"),
    (dict(layer_dropout_position="before"),
     "layer_dropout_position must be None, or before with a layer_dropout > 0"),
     (dict(layer_dropout=.5, layer_dropout_position="after"),
      "layer_dropout_position must be None, or before"), (dict(target_epsilon=None),
          "target_epsilon must be")])
def test_bad_specs(wrong, sentence):
    with pytest.raises(ValueError) as error: run_spec(**{**printed_values(SIZE), "seed": 0} | wrong)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("moves, sentence",
                         [(dict(clip_rule="global_adapt"), "clip_rule must be one of none, flat"),
                          (dict(bound_decay_rate=.5), "got 'bound_decay_rate'"),
                                             (dict(decay="step"),
                                                 "got 'decay'; the nearest known name is")])
def test_what_a_report_would_not_count_is_refused(moves, sentence):
    with pytest.raises(ValueError, match=sentence): below_spec(**moves)
