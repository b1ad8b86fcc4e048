"Broken engines, each the real code with one expression changed, and the checks that must pass."
import inspect
import re
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dp_companion.algorithms import (
    clipping, model_checks, poisson_batches, privacy_engine, private_optimizer, private_step,
    spot_checks
)
from dp_companion.algorithms.book_keeping import BookKeeping, RecordedSamples
from dp_companion.algorithms.clipping import Flat, GlobalAdapt, GroupAdaptive
from dp_companion.algorithms.ledger import Ledger
from dp_companion.algorithms.noise import GaussianNoise
from dp_companion.algorithms.private_module import PrivateModule
from dp_companion.algorithms.sanitization import SanitizationLayer
from dp_companion.audits import bounds
from dp_companion.audits.invariants import (
    by_size, attacked_step, check_rule, check_step, relation_distance, still_buffers,
    unmixed_records
)
from dp_companion.audits.lasting_invariants import LASTING
from dp_companion.audits.loop_invariants import Loop, check_loop, check_run
from dp_companion.budgets import certified, rdp
from dp_companion.budgets.schedules import Constant, PoissonPlan
from dp_companion.training import models, run
from dp_companion.training.datasets import Dataset
from dp_companion.training.models import build_model
from dp_companion.training.spec import Method, run_spec


# Patches

@dataclass(frozen=True)
class Patch:
    "Expressions of one real function, changed; an error where one is not there exactly once."
    owner: object  # A class or a module
    attribute: str
    old: str
    new: str
    also: tuple = ()  # Further (old, new)

    @property
    def found(self): return inspect.getattr_static(self.owner, self.attribute)

    @contextmanager
    def planted(self):
        original = self.found
        function, changed = getattr(original, "fget", original), {}
        # what put it into its class once
        source = re.sub(r"^@patch.*\n", "", textwrap.dedent(inspect.getsource(function)))
        for old, new in ((self.old, self.new), *self.also):
            if source.count(old) != 1:
                raise LookupError(f"old must be once in {self.attribute}, got it "
                                  f"{source.count(old)} times: {old!r}")
            source = source.replace(old, new)
        exec(source, vars(sys.modules[function.__module__]), changed)
        holders = [self.owner] if inspect.isclass(self.owner) else [m for name,
            m in sys.modules.items() if name.startswith("dp_companion")
            and vars(m).get(self.attribute) is original]
        made = changed[self.attribute]
        if isinstance(original, property) and not isinstance(made, property): made = property(made)
        for holder in holders: setattr(holder, self.attribute, made)
        try: yield
        finally:
            for holder in holders: setattr(holder, self.attribute, original)


@dataclass(frozen=True)
class Bug:
    name: str
    sentence: str
    place: str  # The first of `PLACES` where it shows
    check: str  # The check that catches it there
    patches: tuple

    @contextmanager
    def planted(self):
        with ExitStack() as stack:
            for patch in self.patches: stack.enter_context(patch.planted())
            yield self


# What a correct engine passes

def small_run(seed, rule, **constants):
    "A run of 40 steps on blank images, with noise that hides them, and its data."
    labels = torch.arange(40) % 10
    data = Dataset(name="digits", train_images=torch.zeros(40, 1, 8, 8), train_labels=labels,
                   test_images=torch.zeros(2, 1, 8, 8), test_labels=labels[:2], classes=10,
                   source="blank")
    return run_spec(paper="global_adapt_v2", method="none", dataset="digits", model="mnist_cnn",
                    clip_rule=rule, noise_multiplier=100., decay="step", decay_rate=.25,
                    drop_every=1,
                   accounting="as_printed", target_epsilon=1., epochs=4, expected_batch_size=4,
                   seed=seed, **constants), data


def checks_of_models(seed):
    "The small ShuffleNet as training builds it, and a layer with running statistics."
    images, labels = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(
        seed)), torch.tensor([0, 1, 0, 1])
    model, running = build_model("small_shufflenet", seed=seed, image_size=8), nn.Sequential(
        nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(64, 2))
    return unmixed_records(model, images), still_buffers(model, nn.CrossEntropyLoss(), images,
        labels), still_buffers(running, nn.CrossEntropyLoss(), images, labels)


def attacks(seed):
    "A step at its own events, and one with noisy counts at the events of a loop's ledger."
    counting = GlobalAdapt(count_noise=.5)
    loop = Loop(counting, plan=PoissonPlan(dataset_size=3, expected_batch_size=3, epochs=1),
                noise_schedule=Constant(initial=4.), seed=seed)
    loop.run()
    return attacked_step(FLAT, noise_multiplier=.5, seed=seed), attacked_step(counting,
        noise_multiplier=4., events=loop.privacy.accountant.events, draws=100, seed=seed)


FLAT, COUNTING, GROUPS = Flat(max_grad_norm=2.), GlobalAdapt(max_grad_norm=2.,
    count_noise=.5), GroupAdaptive(num_groups=4, max_grad_norm=2., count_noise=.1)

PLACES = {  # name -> checks at a seed
    "rule": lambda seed: check_rule(FLAT) + check_rule(COUNTING, seed=seed) + check_rule(GROUPS,
        seed=seed),
    "step": lambda seed: check_step(FLAT, seed=seed),
    "step, counts": lambda seed: check_step(COUNTING, seed=seed),
    "step, groups": lambda seed: check_step(GROUPS, seed=seed),
    "loop": lambda seed: check_loop(FLAT, seed=seed),
    "loop, counts": lambda seed: check_loop(COUNTING, seed=seed),
    "run": lambda seed: check_run(*small_run(seed, "flat")),
    "run, counts": lambda seed: check_run(*small_run(seed, "global_adapt",
        strict_max_grad_norm=10.)),
    "model": checks_of_models,
    "relation": lambda seed: (relation_distance(FLAT, seed=seed),),
    "attack": attacks,
    **LASTING,
}
# Without chance: another seed shows nothing new
SEEDLESS = {"relation", "optimizer state", "one-run bounds", "composition"}


def checks_at(place, seed):
    "The checks of one place; a step that raises is one that fails."
    try:
        found = PLACES[place](seed)
        return found if isinstance(found, tuple) else (found,)
    except (ValueError, RuntimeError) as error:
        return by_size(f"the engine runs, got {type(error).__name__}: {error}", 1, 0),


def failures(places=PLACES, seed=0):
    "(place, check) of all checks that fail."
    return [(place, check) for place in places for check in checks_at(place, seed)
            if not check.holds]


# The zoo

SCALE, RECORD, SUM = (
    "noise has its scheduled scale", "one record moves the sum by at most the sensitivity",
    "the divisor is public"
)
QUERIES, APPLIED, POISSON = (
    "every query is in the events", "the applied noise is the accounted one",
    "batches are Poisson samples"
)
RAW, COUNTS, STATED = (
    "the rule does not depend on raw norms", "counts have the noise that the rule states",
    "the rule lets at most its sensitivity through"
)
NEW_NOISE, GROUP_NOISE, OWN_BOUND = (
    "noise is new in every epoch", "every group of parameters has its noise",
    "noise follows the bound of its own step"
)
ANNOUNCED, RESUMED, SECURE = (
    "state from before is announced", "a resumed run is the run that never stopped",
    "secure noise and batches do not repeat"
)
LEDGER, READ, OWN_ROW = (
    "the ledger has the steps and the rate that ran", "a loop's loss is read as it reduces",
    "a sanitized row depends on its own record alone"
)
ONE_RUN, COMPOSED, AUDITED = (
    "bounds from one run hold at their confidence",
    "certificates cover compositions below full rate",
    "an audit of the loop finds no more than its certificate"
)
FILL = "self.noise.fill_(self.recorder.flat, self.noise_std if draws else 0.)"
PrivacyEngine = privacy_engine.PrivacyEngine
STEP, OPTIMIZER, BATCHES = (
    private_step.PrivateStep, private_optimizer.PrivateOptimizer, poisson_batches.PoissonBatches
)
LAG = "self.private_step.begin(self.noise_schedule.at(max(self.epoch - 1, 0)))"
LATE = "training.multipliers[max(began[0] - training.plan.steps//training.plan.epochs, 0)].item()"
# Where the trainer does not look itself
LATE_RUN = (Patch(run, "step", "noise_multiplier=noise_multiplier", f"noise_multiplier={LATE}"),
            Patch(run, "end", "report.noise_multiplier != noise_multiplier", "False"))
# The engines see wrong norms themselves
NO_LOOK = (Patch(spot_checks, "_check_norm", "found<(1-slack)*true", "False"),
           Patch(spot_checks, "_check_direction", "away>_slack(recorder.flat.dtype)*size", "False"))
NO_MEETING = Patch(spot_checks, "_gradient_of", "x.nan_to_num(0, 0, 0).any()", "False")
NO_COPIES = Patch(spot_checks, "_is_alone", "not _near(first, loss(*_copies",
                  "False and not _near(first, loss(*_copies")
NO_REFUSAL = Patch(model_checks, "check_model", "in REFUSALS",
                   "in (row for row in REFUSALS if row.name != 'batch normalisation')")
NO_BUFFERS = Patch(model_checks.Refusal, "check", "if place is not None",
                   "if place is not None and not self.name.startswith('chance or buffers')")
BATCH_NORM = Patch(models, "_normed", "nn.GroupNorm(4, outputs)", "nn.BatchNorm2d(outputs)")
BATCH_NORM_WITHOUT_STATISTICS = Patch(models, "_normed", "nn.GroupNorm(4, outputs)",
                                      "nn.BatchNorm2d(outputs, track_running_stats=False)")

ZOO = [
    Bug("noise at two thirds", "Noise has 2/3 of its scale.", "step", SCALE,
        (Patch(GaussianNoise, "fill_", "self.key(), std, ", "self.key(), 2/3*std, "),)),
    Bug("noise without the bound", "Noise is not scaled by the clipping bound.", "step", SCALE,
        (Patch(STEP, "add_noise", "self.step_multiplier*self.sensitivity/",
               "self.step_multiplier/"),)),
    Bug("noise reused", "Every step draws its noise from the same key.", "step",
        "noises are uncorrelated",
        (Patch(GaussianNoise, "key", "generator=self.generator",
               "generator=torch.Generator().manual_seed(0)"),)),
    Bug("layer not clipped", "One layer is added up unscaled.", "step", RECORD,
        (Patch(STEP, "accumulate", "losses = self.recorder",
               "self.recorder.flat.share = 1/self.expected_batch_size; losses = self.recorder"),
         Patch(BookKeeping, "samples", "_add_parts(early, *map(torch.cat, zip(*found)))",
               "_add_parts(early[:-1], *map(torch.cat, zip(*found))); _add_parts(early[-1:], "
               "torch.full((batch,), getattr(self.flat, 'share', 0.)))"), *NO_LOOK)),
    Bug("layer not measured", "One layer is left out of the norms.", "step", RECORD,
        (Patch(BookKeeping, "samples", "part in early)])", "part in early[1:])])"), *NO_LOOK)),
    Bug("clipping per batch", "The batch's mean gradient is clipped, not each sample's.", "step",
        RECORD,
        (Patch(RecordedSamples, "__init__",
               "recorded if self.is_whole else (self.divisor*recorded).to(recorded)",
               "(recorded.norm()/len(recorded)).expand_as(recorded)"), *NO_LOOK)),
    Bug("clipping by the mean norm", "All samples get the factor of their mean norm.", "step",
        RECORD,
        (Patch(RecordedSamples, "__init__",
               "recorded if self.is_whole else (self.divisor*recorded).to(recorded)",
               "recorded.mean().expand_as(recorded)"), *NO_LOOK)),
    Bug("interrupted pass", "A new pass keeps what a broken-off one has summed.", "loop",
        "an interrupted pass leaves nothing",
        (Patch(BATCHES, "restart", "listener()", "pass"), Patch(OPTIMIZER, "check_rows_left",
            "if self.rows_left<0", "if False"), Patch(OPTIMIZER, "check_all_rows",
                "if self.rows_left", "if False"))),
    Bug("interrupted step", "A new step keeps the sums of a broken-off one.", "step",
        "an interrupted step leaves nothing",
        (Patch(STEP, "begin", "self.step_multiplier, self.is_begun = float(sigma), True",
               "was, self.step_multiplier, self.is_begun = self.is_begun and self.has_noise, "
               "float(sigma), True",
               (("self.is_counted = False, False", "self.is_counted = was, False"),)),)),
    Bug("shuffled batches", "The loader shuffles; Poisson batches are accounted.", "loop", POISSON,
        (Patch(BATCHES, "__iter__", "self.begin_pass()", "self.begin_pass(); order = "
               "np.random.default_rng(list(self.source.key())).permutation(self.plan.dataset_size)",
               (("batch, mark = self.draw(self)", "batch, mark = "
                 "order[_*self.plan.expected_batch_size:]"
                 "[:self.plan.expected_batch_size].tolist(), self.mark(b'')"),)),)),
    Bug("fixed-size batches", "The loader draws exactly b records.", "loop", POISSON,
        (Patch(poisson_batches, "poisson_batch", "np.flatnonzero(bits < "
               "np.uint64((plan.expected_batch_size << 63)//plan.dataset_size))",
               "np.argsort(bits)[:plan.expected_batch_size]"),)),
    Bug("shuffled batches, trainer", "The trainer shuffles; Poisson batches are accounted.", "run",
        POISSON,
        (Patch(run, "epoch_steps", "zip(training.batches,",
               "zip((order[t*training.plan.expected_batch_size:]"
               "[:training.plan.expected_batch_size].tolist() "
               "for order in [torch.randperm(training.plan.dataset_size)] "
               "for t, batch in enumerate(training.batches)),"),)),
    Bug("realised batch size", "The sum is divided by the number of samples that came.", "step",
        SUM,
        (Patch(STEP, "add_recorded", "scales/self.expected_batch_size", "scales/len(scales)"),)),
    Bug("empty batch skipped", "A step without samples leaves the weights alone.", "step",
        "an empty batch moves by noise",
        (Patch(STEP, "finish", "self._step_optimizer()",
               "self._step_optimizer() if self.seen else None"),)),
    Bug("empty batch dropped", "The loader goes on to the next batch that has samples.", "loop",
        POISSON,
        (Patch(BATCHES, "__iter__", "yield batch", "yield from [batch] if batch else []",
               also=(("current.drawn.append((len(batch), mark))",
                      "current.drawn.extend([(len(batch), mark)] if batch else [])"),)),)),
    Bug("batch norm",
        "The model has batch norm, without running statistics, and nobody refuses it.", "model",
        "records do not mix",
        (NO_REFUSAL, BATCH_NORM_WITHOUT_STATISTICS)),
    Bug("buffers", "Running statistics are kept.", "model", "no buffer changes",
        (Patch(spot_checks, "_is_kept", "now is not None and is_same(now, value)", "True"),)),
    Bug("count unaccounted", "The ledger has Global-Adapt's gradient and not its count.",
        "loop, counts", QUERIES,
        (Patch(Ledger, "add_step",
               "clip_rule.joint_events((event,))", "(event,)"),)),
    Bug("count unaccounted, trainer", "The trainer's budget has the gradient and not the count.",
        "run, counts", QUERIES,
        (Patch(Method, "events",
               "self.rule(classes).joint_events(gaussian_events(self.noise(plan), plan))",
               "gaussian_events(self.noise(plan), plan)"),)),
    Bug("count without noise", "The count goes into the threshold as it is.", "rule", COUNTS,
        (Patch(clipping.CountingRule, "update",
               "noisy_counts(self.counts(norms, groups), self.count_noise, generator)",
               "self.counts(norms, groups)"),)),
    Bug("noise of the groups present", "DP-F's noise follows the largest bound in the batch.",
        "step, groups", SCALE,
        (Patch(STEP, "add_recorded", "self.add_noise()", "self.present = labels; self.add_noise()"),
         Patch(STEP, "add_noise", "self.clip_rule.sensitivity",
               "max(self.clip_rule.group_bounds[k] for k in self.present) if self.counts_first and "
               "hasattr(self, 'present') else self.clip_rule.sensitivity"))),
    Bug("late schedule", "The applied multiplier is that of the epoch before.", "loop", APPLIED,
        (Patch(OPTIMIZER, "begin", "self.private_step.begin(sigma)", LAG),)),
    Bug("late schedule, trainer", "The trainer applies the multiplier of the epoch before, and "
        "takes down the right one.", "run", APPLIED,
        LATE_RUN),
    Bug("late schedule, trainer, counts",
        "The same with a rule that counts, whose counts are a part of every event.", "run, counts",
        APPLIED,
        LATE_RUN),
    Bug("C for 2C, groups", "DP-F states C0, and lets 2 C0 through.", "rule", STATED,
        (Patch(GroupAdaptive, "sensitivity", "max(self.group_bounds)", "self.max_grad_norm"),)),
    Bug("C for 2C, relation", "Replacing a record is accounted like adding one.", "relation",
        "certificates cover the distance of their relation",
        (Patch(certified, "_composed", "NeighboringRelation[neighbouring_relation.upper()]",
               "NeighboringRelation.ADD_OR_REMOVE_ONE"),)),
    Bug("threshold of raw norms", "Global-Adapt's threshold is the batch's largest norm.",
        "step, counts", RAW,
        (Patch(clipping.CountingRule, "update",
               "self.with_noisy_counts(noisy, expected_batch_size=expected_batch_size)",
               "replace(self, strict_max_grad_norm=float(norms.max().clamp(min=1e-3)) if "
               "len(norms) else self.strict_max_grad_norm) "
               "if isinstance(self, Global) else self"),)),
    Bug("bound of raw norms", "The clipping bound is the batch's median norm.", "step", RAW,
        (Patch(STEP, "add_recorded", "self.add_noise()", "self.clip_rule = "
               "__import__('dataclasses').replace(self.clip_rule, "
               "max_grad_norm=float(samples.norms.median().clamp(min=1e-3))); self.add_noise()"),)),
    Bug("norms in half precision", "Norms are rounded to half precision.", "step", RECORD,
        (Patch(RecordedSamples, "__init__", ".sqrt_()", ".sqrt_().half().to(known)"), *NO_LOOK)),
    Bug("noise of every epoch alike", "The source of noise is seeded anew when a pass begins.",
        "epochs", NEW_NOISE,
        (Patch(OPTIMIZER, "drop", "self.private_step.is_begun = False",
               "self.private_step.is_begun = False; "
               "self.private_step.noise.generator.manual_seed(0)"),)),
    Bug("noise of the step in its epoch", "The key of noise is the step's place in its epoch.",
        "epochs", NEW_NOISE,
        (Patch(OPTIMIZER, "begin", "self.private_step.begin(sigma)",
               "self.private_step.noise.generator.manual_seed(self.steps_taken % "
               "(self.batches.plan.dataset_size//self.expected_batch_size)); "
               "self.private_step.begin(sigma)"),)),
    Bug("noise of the first group alone", "Other groups of parameters have none.", "epochs",
        GROUP_NOISE,
        (Patch(STEP, "add_noise", FILL, f"{FILL}; self.recorder.flat[sum(p.numel() for p in "
               "self.optimizer.param_groups[0]['params']):] = 0"),)),
    Bug("noise shared by the groups", "Its scale is divided by the number of groups.", "epochs",
        GROUP_NOISE,
        (Patch(STEP, "add_noise", "self.step_multiplier*self.sensitivity/",
               "self.step_multiplier*self.sensitivity/len(self.optimizer.param_groups)/"),)),
    Bug("noise of the first bound", "Noise follows the clipping bound of the first step.",
        "moving bound", OWN_BOUND,
        (Patch(STEP, "add_noise", "self.step_multiplier*self.sensitivity/",
               "self.step_multiplier*vars(self).setdefault('first', self.sensitivity)/"),)),
    Bug("noise of the next bound", "Noise follows the clipping bound of the next epoch.",
        "moving bound", OWN_BOUND,
        (Patch(OPTIMIZER, "begin", "self.private_step.begin(sigma)",
               "self.private_step.begin(sigma); "
               "self.private_step.coming = bounds and bounds.at(self.epoch + 1)"),
         Patch(STEP, "add_noise", "self.step_multiplier*self.sensitivity/",
               "self.step_multiplier*(vars(self).get('coming') or self.sensitivity)/"))),
    Bug("earlier state unannounced", "Nobody looks at the optimizer's state.", "optimizer state",
        ANNOUNCED,
        (Patch(privacy_engine, "_warn_of_state", "if held and not", "if False and not"),)),
    Bug("earlier state of one kind", "Momentum is announced, other state is not.",
        "optimizer state", ANNOUNCED,
        (Patch(privacy_engine, "_warn_of_state", "for x in state.values())",
               "for key, x in state.items() if key == 'momentum_buffer')"),)),
    Bug("ledger forgotten", "A resumed run writes its last event in place of every earlier one.",
        "resumed run", RESUMED,
        (Patch(PrivacyEngine, "load_state_dict", 'load_state_dict(state["events"])',
               'load_state_dict(state["events"][-1:]*len(state["events"]))'),)),
    Bug("counts forgotten", "A resumed run begins again with the first threshold.", "resumed run",
        RESUMED, (Patch(PrivacyEngine, "load_state_dict", 'replace(optimizer.clip_rule, '
                        '**state["rule"])', "optimizer.clip_rule"),)),
    Bug("noise after a resumption", "A resumed run draws its noise from the beginning.",
        "resumed run", RESUMED,
        (Patch(PrivacyEngine, "load_state_dict",
               "optimizer.private_step.noise.generator.set_state(noise)", "pass"),)),
    Bug("one key for all", "Every secure draw has the same key.", "secure draws", SECURE,
        (Patch(GaussianNoise, "key", "os.urandom(16)", "bytes(16)"),)),
    Bug("key of torch's seed", "torch's seed decides secure keys.", "secure draws", SECURE,
        (Patch(GaussianNoise, "key", "os.urandom(16)",
               "bytes(torch.randint(256, (16,)).tolist())"),)),
    Bug("one batch for all", "Every batch is drawn from the same key.", "secure draws", SECURE,
        (Patch(poisson_batches, "poisson_batch", "key_stream(key, purpose=1)",
               "key_stream(bytes(16), purpose=1)"),)),
    Bug("half the rate", "The ledger has half the sample rate.", "accounted steps", LEDGER,
        (Patch(OPTIMIZER, "begin", "self.batches.plan.sample_rate",
               "self.batches.plan.sample_rate/2"),)),
    Bug("steps lost", "Equal steps are one step in the ledger.", "accounted steps", LEDGER,
        (Patch(Ledger, "add", "self._runs[-1][1] += event.steps", "pass"),)),
    Bug("mean taken for a sum", "Norms of a mean loss are not multiplied by the batch size.",
        "losses", READ,
        (Patch(PrivateModule, "_take", "recorder.divisor = reading.divisor",
               "recorder.divisor = 1"),)),
    Bug("one divisor for all tokens", "Every sample's divisor is the mean of the batch's.",
        "losses", READ,
        (Patch(RecordedSamples, "__init__", "divisor[at] if own else divisor",
               "divisor.mean() if own else divisor"),)),
    Bug("rows by the largest", "Rows are divided by the batch's largest element.",
        "sanitized rows", OWN_ROW,
        (Patch(SanitizationLayer, "clipped", "rows.clamp(", "(rows/rows.abs().max()).clamp("),)),
    Bug("rows without their mean", "The batch's mean row is taken off every row.",
        "sanitized rows", OWN_ROW,
        (Patch(SanitizationLayer, "noisy", "rows.detach().double()",
               "(rows.detach() - rows.detach().mean(0)).double()"),)),
    Bug("95 % for every confidence", "A one-run bound holds at 95 %, whatever is asked.",
        "one-run bounds", ONE_RUN,
        (Patch(bounds, "one_run_bound", "- (1 - confidence)", "- .05"),)),
    Bug("one guess more", "A one-run bound counts one right guess too many.", "one-run bounds",
        ONE_RUN,
        (Patch(bounds, "_one_run_p_value", "right.sf(correct - 1)", "right.sf(correct)"),)),
    Bug("50 % for every confidence, Gaussian", "A one-run bound on a Gaussian curve holds at 50 %.",
        "one-run bounds", ONE_RUN,
        (Patch(bounds, "_one_run_gaussian_refutes", "1 - confidence", ".5"),)),
    Bug("a step less", "PLD composes one step too few.", "composition", COMPOSED,
        (Patch(certified, "_composed", "_repeated(one, e.steps)",
               "_repeated(one, max(e.steps - 1, 1))"),)),
    Bug("a smaller rate", "PLD takes 0.95 of a sample rate below one.", "composition", COMPOSED,
        (Patch(certified, "_composed", "sampling_prob=e.sample_rate",
               "sampling_prob=e.sample_rate*(1 if e.sample_rate == 1 else .95)"),)),
    Bug("optimistic PLD", "PLD rounds losses down.", "composition", COMPOSED,
        (Patch(certified, "_composed", "pessimistic=True", "pessimistic=False"),)),
    Bug("RDP of fewer steps", "RDP composes nine tenths of the steps.", "composition", COMPOSED,
        (Patch(rdp, "rdp_of_events", "e.steps*rdp_sampled_gaussian",
               ".9*e.steps*.1**(e.sample_rate < 1)*rdp_sampled_gaussian"),)),
    Bug("no noise", "No step has noise, and the ledger is whole.", "audit", AUDITED,
        (Patch(STEP, "add_noise", "self.noise_std if draws else 0.", "0."),)),
    Bug("no noise in the last layer", "The last weights have none.", "audit", AUDITED,
        (Patch(STEP, "add_noise", FILL, f"{FILL}; self.recorder.flat[-101:] = 0"),)),
]

# what the small attack sees too
ATTACKED = {"noise at two thirds", "noise without the bound", "noise reused", "layer not clipped",
            "realised batch size", "count unaccounted", "count without noise",
            "threshold of raw norms"}
