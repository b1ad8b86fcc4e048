"Clipping rules: sensitivity at every norm and constant, formulas, noisy counts and their budget."
import json
import math
from dataclasses import asdict, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_companion.algorithms.clipping import (
    PSAC,
    RULES,
    AutoS,
    CountingRule,
    Flat,
    Global,
    GlobalAdapt,
    GlobalAdaptV2,
    GroupAdaptive,
    clip_rule,
)
from dp_companion.budgets.events import MechanismEvent

quick = settings(derandomize=True, deadline=None, max_examples=300)
INF, NAN, TINY = math.inf, math.nan, 5e-324
constants = st.floats(min_value=TINY, max_value=9e29) # every legal constant
ODD = [0., INF, NAN, 1e-45, 1.18e-38, 3.4e38, 1.]


@st.composite
def rules(draw):
    "Any rule, with any legal constants."
    cls = draw(st.sampled_from(list(RULES.values())))
    if cls is GroupAdaptive:
        bounds = tuple(draw(st.lists(constants, min_size=3, max_size=3)))
        # Its bounds may grow to four times that
        return cls(num_groups=3, max_grad_norm=draw(st.floats(min_value=TINY, max_value=2e29)),
                   group_bounds=bounds)
    named = {"max_grad_norm", "strict_max_grad_norm", "stability"} & set(cls.__dataclass_fields__)
    return cls(**{name: draw(constants) for name in sorted(named)})


def norm_lists(width):
    return st.lists(st.floats(min_value=0, allow_nan=False, width=width) | st.sampled_from(ODD),
                    min_size=1, max_size=8)


def scaled_norms_hold(rule, norms):
    scale = rule.scale(norms, torch.arange(len(norms)) % 3)
    assert scale.shape == norms.shape and torch.isfinite(scale).all() and (scale >= 0).all()
    bound = Fraction(rule.sensitivity)*(1 + Fraction(1, 10**6))
    for n, s in zip(norms.tolist(), scale.tolist()):
        # exact arithmetic
        if math.isfinite(n): assert Fraction(s)*Fraction(n) <= bound, (rule, n, s)
        else: assert s == 0
    product = (scale*norms)[torch.isfinite(norms)] # and as the machine multiplies
    assert (product.double() <= rule.sensitivity*(1 + 1e-6)
            + torch.finfo(norms.dtype).smallest_normal).all()


@quick
@given(rules(), norm_lists(32))
def test_scaled_norm_never_exceeds_sensitivity_float32(rule, norms):
    scaled_norms_hold(rule, torch.tensor(norms, dtype=torch.float32))


@quick
@given(rules(), norm_lists(64))
def test_scaled_norm_never_exceeds_sensitivity_float64(rule, norms):
    scaled_norms_hold(rule, torch.tensor(norms, dtype=torch.float64))


@quick
@given(rules(), st.lists(st.floats(allow_nan=True, width=32), max_size=6))
def test_scale_is_finite_even_where_no_norm_could_be(rule, values):
    norms = torch.tensor(values, dtype=torch.float32)
    scale = rule.scale(norms, torch.zeros(len(values), dtype=torch.int64))
    assert torch.isfinite(scale).all() and (scale[~(norms >= 0)] == 0).all()


def test_rule_of_ones_own_gets_zero_for_inf_and_nan():
    class Bare(Flat):
        def weight(self, n, groups=None): return torch.ones_like(n)
    assert Bare().scale(torch.tensor([.5, INF, NAN])).tolist() == [1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_low_precision_norms_get_float32_scales(dtype):
    norms = torch.tensor([0, 1, 3, 777]).to(dtype)
    for rule in (Flat(), AutoS(), PSAC(), Global(), GlobalAdapt(), GlobalAdaptV2()):
        scale = rule.scale(norms)
        assert scale.dtype == torch.float32
        assert (scale.double()*norms.double() <= 1 + 1e-6).all()


def test_scale_is_pure():
    norms = torch.rand(20, generator=torch.Generator().manual_seed(0))*5
    before = norms.clone()
    for name, cls in RULES.items():
        rule = clip_rule(name, **({"num_groups": 2} if cls.needs_groups else {}))
        groups = torch.arange(20) % 2
        torch.testing.assert_close(rule.scale(norms, groups), rule.scale(norms, groups), rtol=0,
                                   atol=0)
        # no sample sees another
        pieces = torch.cat([rule.scale(norms[:7], groups[:7]), rule.scale(norms[7:], groups[7:])])
        torch.testing.assert_close(pieces, rule.scale(norms, groups), rtol=0, atol=0)
        assert len(rule.scale(norms[:0], groups[:0])) == 0 # an empty Poisson batch
    assert torch.equal(norms, before)


# The formulas once more, in plain Python
FORMULAS = {
    "flat": lambda n, C, **_: C/n if n > C else 1.,
    "auto_s": lambda n, C, stability, **_: C/(n + stability),
    "psac": lambda n, C, stability, **_: C*(n + stability)/(n*(n + stability) + stability),
    "global": lambda n, C, z, **_: C/z if n <= z else 0.,
    "global_adapt": lambda n, C, z, **_: C/max(n, z),
    "global_adapt_v2": lambda n, C, z, stability, **_: C/z if n <= z else C*(n + stability)/(n**2
        + n*stability + stability),
}
moderate = st.floats(min_value=1e-3, max_value=1e3)


@quick
@given(st.sampled_from(sorted(FORMULAS)), st.floats(0, 1e4), moderate, moderate, moderate)
def test_rules_equal_their_formulas(name, n, C, z, stability):
    known = {"max_grad_norm": C, "strict_max_grad_norm": z, "stability": stability}
    rule = clip_rule(name, **{key: value for key, value in known.items()
                              if key in RULES[name].__dataclass_fields__})
    got = rule.scale(torch.tensor([n], dtype=torch.float64)).item()
    assert got == pytest.approx(FORMULAS[name](n, C, z=z, stability=stability), rel=1e-12)


@pytest.mark.parametrize("name, constants", [
    ("flat", {"max_grad_norm": 1.}), ("auto_s", {"max_grad_norm": 1., "stability": .01}),
    ("psac", {"max_grad_norm": 1., "stability": .1}),
    ("global", {"max_grad_norm": 1., "strict_max_grad_norm": 100.}),
    ("global_adapt", {"max_grad_norm": 1., "strict_max_grad_norm": 10., "threshold_fraction": .7,
                      "threshold_rate": .1, "count_noise": 10.}),
    ("global_adapt_v2", {"max_grad_norm": 1., "strict_max_grad_norm": 3., "stability": .1}),
    ("group_adaptive", {"max_grad_norm": 1., "count_noise": 10.})])
def test_defaults_are_the_papers(name, constants):
    rule = clip_rule(name, **({"num_groups": 2} if name == "group_adaptive" else {}))
    assert {key: getattr(rule, key) for key in constants} == constants


@quick
@given(st.floats(1e-6, 50), moderate)
def test_psac_largest_weight(r, C):
    rule = PSAC(max_grad_norm=C, stability=r)
    at = max(math.sqrt(r) - r, 0.)
    largest = C/(2*math.sqrt(r) - r) if r <= 1 else C
    scale = rule.scale(torch.cat([torch.tensor([at], dtype=torch.float64),
                                  torch.linspace(0, 3, 2001, dtype=torch.float64)]))
    assert scale.max().item() == pytest.approx(largest, rel=1e-9)
    assert scale[0].item() == pytest.approx(largest, rel=1e-9)


@pytest.mark.parametrize("cls", [Global, GlobalAdapt, GlobalAdaptV2])
def test_bound_below_c0_amplifies_but_keeps_sensitivity(cls):
    norms = torch.logspace(-6, 3, 5000, dtype=torch.float64)
    for z in (3*.5**(e//10) for e in range(0, 100, 10)): # paper global_adapt_v2's schedule
        rule = replace(cls(), strict_max_grad_norm=z)
        scale = rule.scale(norms)
        assert (scale*norms).max() <= rule.sensitivity*(1 + 1e-12) and rule.sensitivity == 1
        assert (scale.max() > 1) == (z < 1)
    if cls is GlobalAdaptV2: # its limit is DP-PSAC
        torch.testing.assert_close(replace(cls(), strict_max_grad_norm=1e-300).scale(norms),
                                   PSAC().scale(norms), rtol=0, atol=0)


# Noisy counts
def test_threshold_update_by_hand_and_by_generator():
    rule = GlobalAdapt(strict_max_grad_norm=2., threshold_fraction=.5, threshold_rate=.25)
    norms = torch.tensor([1., 1.01, 5., NAN, INF])
    assert rule.counts(norms).tolist() == [3]
    moved = rule.with_noisy_counts(torch.tensor([3.5]), expected_batch_size=8)
    assert moved.strict_max_grad_norm == pytest.approx(2*math.exp(-.25 + 3.5/8), rel=1e-14)
    assert replace(moved, strict_max_grad_norm=2.) == rule
    a, b = (rule.update(norms, expected_batch_size=8, generator=torch.Generator().manual_seed(s))
            for s in (1, 1))
    c = rule.update(norms, expected_batch_size=8, generator=torch.Generator().manual_seed(2))
    assert a == b != c


def test_threshold_noise_has_its_scale():
    generator, rule = torch.Generator().manual_seed(0), GlobalAdapt(strict_max_grad_norm=1.)
    for b in (64, 256):
        draws = [math.log(rule.update(torch.zeros(1), expected_batch_size=b,
                                      generator=generator).strict_max_grad_norm)
                                      for _ in range(4000)]
        assert np.mean(draws) == pytest.approx(-.1, abs=4*10/b/math.sqrt(4000))
        assert np.std(draws) == pytest.approx(10/b, rel=.05) # 0.156 and 0.039


@pytest.mark.parametrize("rate, fraction", [(.1, .7), (.3, 1.), (.5, .7)])
def test_threshold_rests_where_the_fraction_above_is_the_rate(rate, fraction):
    norms = torch.exp(torch.randn(4096, generator=torch.Generator().manual_seed(0)))
    rule = GlobalAdapt(strict_max_grad_norm=50., threshold_rate=rate, threshold_fraction=fraction)
    above = []
    for step in range(1200):
        # no noise: the resting point itself
        rule = rule.with_noisy_counts(rule.counts(norms).double(), expected_batch_size=len(norms))
        if step >= 200:
            above.append((norms > fraction*rule.strict_max_grad_norm).double().mean().item())
    assert np.mean(above) == pytest.approx(rate, abs=2e-3)
    assert rule.strict_max_grad_norm < norms.max() # a quantile, not an upper bound


@quick
@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20))
def test_threshold_survives_any_count(counts):
    rule = GlobalAdapt()
    for count in counts: rule = rule.with_noisy_counts(torch.tensor([count]), expected_batch_size=1)
    assert 1e-31 < rule.strict_max_grad_norm < 1e31


@quick
@given(st.lists(st.tuples(st.floats(0, 10) | st.sampled_from([NAN, INF]), st.integers(0, 3)),
                min_size=1, max_size=12), st.integers(0, 11))
def test_one_record_moves_the_counts_by_at_most_one(batch, drop):
    kept = [pair for i, pair in enumerate(batch) if i != drop % len(batch)]
    for rule in (GlobalAdapt(strict_max_grad_norm=2.), GroupAdaptive(num_groups=4)):
        with_it, without = (rule.counts(torch.tensor([n for n, _ in pairs]),
            torch.tensor([k for _, k in pairs], dtype=torch.int64)).double()
                            for pairs in (batch, kept))
        assert torch.linalg.vector_norm(with_it - without) <= 1


@quick
@given(st.lists(st.floats(-50, 50), min_size=6, max_size=6), moderate)
def test_group_bounds_equal_the_formula(noisy, C0):
    K = 3
    m, o = [max(v, 0.) for v in noisy[:K]], [max(v, 0.) for v in noisy[K:]]
    r = [mk/(mk + ok) if mk + ok > 0 else 1. for mk, ok in zip(m, o)]
    expected = [C0*(1 + (rk/(sum(r)/K) if sum(r) else 0.)) for rk in r]
    rule = GroupAdaptive(num_groups=K, max_grad_norm=C0).with_noisy_counts(torch.tensor(noisy,
        dtype=torch.float64))
    assert rule.group_bounds == pytest.approx(expected, rel=1e-12)
    assert rule.sensitivity == max(rule.group_bounds) <= C0*(1 + K)*(1 + 1e-12)


def test_group_sensitivity_does_not_know_who_is_present():
    rule = GroupAdaptive(num_groups=2, group_bounds=(1.5, 2.5))
    assert rule.scale(torch.tensor([30.]), torch.tensor([0])).item() == pytest.approx(.05)
    assert rule.sensitivity == 2.5


def test_empty_batch_still_draws_noise():
    nobody, labels = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    moved = [rule.update(nobody, labels, expected_batch_size=64,
                         generator=torch.Generator().manual_seed(0))
             for rule in (GlobalAdapt(), GroupAdaptive(num_groups=2))]
    assert moved[0].strict_max_grad_norm != 10*math.exp(-.1) and moved[1].group_bounds != (2., 2.)


def test_stateless_rules_take_no_random_numbers():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    for rule in (Flat(), AutoS(), PSAC(), Global(), GlobalAdaptV2()):
        assert rule.update(torch.ones(3), expected_batch_size=64, generator=generator) is rule
        assert rule.queries(sample_rate=.1, steps=3) == ()
    assert torch.equal(generator.get_state(), state)


@quick
@given(st.floats(.05, 50), st.floats(.05, 50))
def test_joint_event_has_the_length_of_both_shifts(sigma, count_noise):
    event = MechanismEvent(noise_multiplier=sigma, sample_rate=.01, steps=5)
    for rule in (GlobalAdapt(count_noise=count_noise), GroupAdaptive(num_groups=2,
            count_noise=count_noise)):
        (joint,) = rule.joint_events((event,))
        assert joint.noise_multiplier**-2 == pytest.approx(sigma**-2 + count_noise**-2, rel=1e-12)
        assert joint.noise_multiplier < min(sigma, count_noise)
        assert (joint.sample_rate, joint.steps) == (.01, 5)
        assert rule.queries(sample_rate=.01, steps=5)[0].noise_multiplier == count_noise
    assert Flat().joint_events([event]) == (event,)


# Names and errors
@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_survive_json(name):
    rule = clip_rule(name, max_grad_norm=.1 + .2, **({"num_groups": 3} if RULES[name].needs_groups
        else {}))
    if isinstance(rule, CountingRule):
        rule = rule.update(torch.rand(9), torch.arange(9) % 3, expected_batch_size=9,
                           generator=torch.Generator().manual_seed(0))
    assert clip_rule(rule.name, **json.loads(json.dumps(asdict(rule)))) == rule
    assert hash(rule) == hash(replace(rule))


@pytest.mark.parametrize("bad", [0., -1., NAN, INF, 1e30, "1", None, True])
def test_illegal_constants_are_refused_by_name(bad):
    for cls in RULES.values():
        for name in {"max_grad_norm", "strict_max_grad_norm", "stability", "count_noise",
                     "threshold_fraction", "threshold_rate"} & set(cls.__dataclass_fields__):
            with pytest.raises(ValueError, match=f"{name} must be .*got {name}="):
                cls(**{name: bad}, **({"num_groups": 2} if cls.needs_groups else {}))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="name must be one of flat, .*got name=Flat"):
        clip_rule("Flat")
    with pytest.raises(TypeError): Flat(1.) # keyword-only
    with pytest.raises(TypeError): GroupAdaptive()
    with pytest.raises(ValueError, match="groups must be in 0..1, got groups=2"):
        GroupAdaptive(num_groups=2).counts(torch.ones(1), torch.tensor([2]))
