"Fairness: published gaps and the AUC."
import math
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from dp_companion.published import load
from dp_companion.training.fairness import group_accuracies, macro_roc_auc, privacy_cost_gap

properties = settings(derandomize=True, max_examples=40, deadline=None)


def test_published_gaps_follow_from_the_published_group_accuracies():
    rows = load("global_adapt_v2").query(
        "dataset == 'Thinwall' and item in ['Table 7', 'Table 8', 'Table 9', 'Table 10', 'Table "
        "11', 'Table 12']"
    )
    table = rows.fillna({"epsilon": 0}).pivot(
        index=["method", "epsilon"], columns="metric", values="value"
    )
    groups = [
        {m: row[f"accuracy_group_{m}"] for m in ("porous", "nonporous")}
        for _, row in table.iterrows()
    ]
    base = groups[list(table.index).index(("Non-DP", 0))]
    for run, printed in zip(groups, table.privacy_cost_gap):
        if not math.isnan(printed):
            assert privacy_cost_gap(
                base, [run], "porous", "nonporous"
            ) == pytest.approx(printed, abs=6e-4)


@properties
@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_auc_ignores_scale_and_groups_average_to_accuracy(classes, seed):
    draw = torch.Generator().manual_seed(seed)
    labels, logits = torch.arange(60) % classes, torch.randn(60, classes, generator=draw)
    area, predictions = macro_roc_auc(logits, labels), logits.argmax(1)
    weighted = sum(
        share*(labels == m).double().mean().item()
        for m, share in group_accuracies(predictions, labels).items()
    )
    assert (predictions == labels).double().mean().item() == pytest.approx(weighted)
    assert 0 <= area <= 1
    if classes == 2:
        assert macro_roc_auc(logits/7, labels) == pytest.approx(area, abs=1e-9)
    assert macro_roc_auc(torch.nn.functional.one_hot(labels, classes).float(), labels) == 1
