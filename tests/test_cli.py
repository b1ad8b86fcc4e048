"The command line as a stranger meets it: help, JSON, one sentence and status 2."
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dp_companion.cli import main
from dp_companion.site import notebooks
from dp_companion.site.page_keys import execution_key, is_experiment, is_kept, page_parameters

SETTING = ("--decay step --decay-rate 0.5 --drop-every 10 --epochs 100 --batch-size 64 "
           "--dataset-size 60000 --delta 1e-5".split())
FLAT = dict(name="DP-SGD", clip_rule="flat", noise_multiplier=2.)
# A spec that trains in a second
SMALL = dict(paper="global_adapt_v2", method=FLAT, dataset="digits", model="mnist_cnn",
             accounting="as_printed", target_epsilon=1., epochs=1, expected_batch_size=128, seed=0)


def process(*words, cwd=None):
    "Status, output and errors of the command in a process of its own."
    done = subprocess.run([sys.executable, "-c", "from dp_companion.cli import main; main()",
                           *words], capture_output=True, text=True, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def terminal(*words):
    "The same in this process, which has imported everything already."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(
            SystemExit) as end:
        main([*words])
    return end.value.code, out.getvalue(), err.getvalue()


def test_help_names_every_command():
    status, out, _ = process("--help")
    assert status == 0
    for command in ("reproduce", "run", "budget", "calibrate", "tables", "site", "data"):
        assert command in out


def test_version_is_the_packages_and_nothing_else():
    from importlib.metadata import version
    assert terminal("--version") == (0, f"dp-companion {version('dp-companion')}\n", "")


def test_budget_of_the_printed_setting():
    status, out, _ = terminal("budget", "--noise-multiplier", "0.1916", *SETTING, "--json")
    report = json.loads(out)
    assert status == 0
    assert report["claimed"]["rho"] == pytest.approx(.0206, rel=1e-3)
    assert report["claimed"]["epsilon"] == pytest.approx(.9946, rel=1e-3)
    assert {"name", "value", "bound", "holds"} <= set(report["claimed"]["preconditions"][0])
    assert not all(p["holds"] for p in report["claimed"]["preconditions"])
    assert report["certified"]["pld"]["epsilon"] > 1e5
    assert report["certified"]["rdp"]["epsilon"] > 1e5
    assert report["neighbouring_relation"] == "add_or_remove_one" and report["privacy_unit"]


def test_calibrate_as_printed():
    status, out, _ = terminal("calibrate", "--target-epsilon", "1", "--accountant", "as-printed",
                              *SETTING, "--json")
    assert status == 0 and round(json.loads(out)["noise_multiplier"], 4) == .1916


@pytest.mark.slow
def test_calibrate_then_budget_never_overshoots():
    for accountant in ("rdp", "pld"):
        _, out, _ = terminal("calibrate", "--target-epsilon", "3", "--accountant", accountant,
                             *SETTING, "--json")
        _, out, _ = terminal("budget", "--noise-multiplier",
                             repr(json.loads(out)["noise_multiplier"]), *SETTING, "--json")
        assert 2.9 < json.loads(out)["certified"][accountant]["epsilon"] <= 3


@pytest.mark.slow
def test_calibrate_for_a_risk():
    words = ["calibrate", "--true-positive-rate", "0.05", *SETTING[:-2], "--json"]
    status, out, _ = terminal(*words)
    sigma = json.loads(out)["noise_multiplier"]
    assert status == 0 and "target_epsilon" not in json.loads(out)
    _, out, _ = terminal("budget", "--noise-multiplier", repr(sigma), *SETTING, "--json")
    assert .0499 < json.loads(out)["risk"]["true_positive_rate"]["0.01"] <= .05


BAD = {
    "no target": (["calibrate", *SETTING], "one of --target-epsilon and --true-positive-rate must"),
    "rate of guessing": (["calibrate", "--true-positive-rate", "0.01", *SETTING],
                         "--true-positive-rate must be in (0.01, 1)"),
    "a risk by the paper's formula": (["calibrate", "--true-positive-rate", "0.1", "--accountant",
                                       "as-printed", *SETTING], "must be pld for a risk"),
    "epsilon 0": (["calibrate", "--target-epsilon", "0", *SETTING], "--target-epsilon must be"),
    "negative epsilon": (["calibrate", "--target-epsilon", "-1", *SETTING],
                         "--target-epsilon must be"),
    "delta 0": (["calibrate", "--target-epsilon", "1", *SETTING, "--delta", "0"],
                "--delta must be in (0, 1), got --delta=0"),
    "delta 1": (["budget", "--noise-multiplier", "1", *SETTING, "--delta", "1"],
                "--delta must be in (0, 1), got --delta=1"),
    "batch over n": (["budget", "--noise-multiplier", "1", *SETTING, "--batch-size", "60001"],
                     "--batch-size must be"),
    "underscore": (["budget", "--noise_multiplier", "1", *SETTING],
                   "No such option: --noise_multiplier"),
    "batch 0": (["budget", "--noise-multiplier", "1", *SETTING, "--batch-size", "0"],
                "--batch-size must be"),
    "R 0": (["budget", "--noise-multiplier", "1", *SETTING, "--decay-rate", "0"],
            "--decay-rate must be in (0, 1), got --decay-rate=0"),
    "R 1": (["budget", "--noise-multiplier", "1", *SETTING, "--decay-rate", "1"],
            "--decay-rate must be in (0, 1), got --decay-rate=1"),
    "K does not divide E": (["budget", "--noise-multiplier", "1", *SETTING, "--drop-every", "7"],
                            "7"),
    "negative multiplier": (["budget", "--noise-multiplier", "-0.5", *SETTING], "got"),
    "NaN multiplier": (["budget", "--noise-multiplier", "nan", *SETTING], "nan"),
    "unknown decay": (["budget", "--noise-multiplier", "1", *SETTING, "--decay", "staircase"],
                      "staircase"),
    "unknown accountant": (["calibrate", "--target-epsilon", "1", *SETTING, "--accountant", "gdp"],
                           "gdp"),
    "unknown profile": (["reproduce", "--profile", "phone"], "phone"),
    "unknown command": (["budgett"], "budgett"),
    "unknown table": (["tables", "Table 99"], ""),
    "missing spec": (["run", "no-such-file.json"], "no-such-file.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, part = BAD[case]
    status, out, err = terminal(*words)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and part in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


@pytest.mark.slow
def test_run_refuses_an_unknown_name(tmp_path):
    (tmp_path/"spec.json").write_text(json.dumps({"sigma": 1}))
    status, out, err = process("run", "spec.json", cwd=tmp_path)
    assert status == 2 and out == "" and err.count("\n") == 1 and "'sigma'" in err
    assert [p.name for p in tmp_path.iterdir()] == ["spec.json"]


@pytest.mark.parametrize(("change", "sentence"),
                         [({"strict_max_grad_norm": 3.}, "strict_max_grad_norm must be left out "
                           "for clip_rule=flat, which has none, got strict_max_grad_norm=3.0"),
                                                  ({"stability": .1}, "stability must be left out "
                                                      "for clip_rule=flat, which has none, got "
                                                      "stability=0.1")])
def test_run_refuses_what_its_rule_would_not_use(tmp_path, monkeypatch, change, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"spec.json").write_text(json.dumps(SMALL | {"method": FLAT | change}))
    status, out, err = terminal("run", "spec.json")
    assert (status, out) == (2, "") and err.count("\n") == 1 and sentence in err
    assert not list(tmp_path.glob("runs/*/record.json"))


def test_tables_refuses_a_table_that_is_none():
    status, out, err = terminal("tables", "Table 99")
    assert (status, out) == (2, "")
    assert "item must be one of Table 4, Table 5" in err
    assert "got item='Table 99'; the nearest is 'Table" in err


@pytest.mark.parametrize("paper", ["global_adapt_v2", "sad", "adaptive_noise", "sanitization"])
def test_tables_know_every_table_of_every_paper(paper, tmp_path):
    from dp_companion.published import load
    for item in load(paper)["item"].unique():
        if (paper, item) in (("global_adapt_v2", "Table 4"), ("global_adapt_v2", "Table 13")):
            continue
        status, out, err = terminal("tables", item, "--paper", paper, "--runs", str(tmp_path),
                                    "--json")
        printed = load(paper).query("item == @item")["value"]
        assert (status, err) == (0, ""), err
        assert [row["value"] for row in json.loads(out)] == printed.tolist()


@pytest.mark.slow
def test_a_table_has_our_runs_beside_it(root):
    status, out, _ = terminal("tables", "II", "--paper", "sad", "--runs", str(root/"results"),
                              "--json")
    rows = json.loads(out)
    assert status == 0 and any(50 < (row.get("ours, certified") or 0) < 100 for row in rows)


def test_errors_under_json_are_json():
    status, out, err = terminal("budget", "--noise-multiplier", "nan", *SETTING, "--json")
    assert (status, out) == (2, "") and "nan" in json.loads(err)["error"]


def test_what_is_printed_is_rounded_and_still_enough():
    words = ["calibrate", "--target-epsilon", "3", *SETTING, "--accountant", "rdp"]
    shown = float(terminal(*words)[1].split()[1])
    exact = json.loads(terminal(*words, "--json")[1])["noise_multiplier"]
    assert exact <= shown <= exact*(1 + 1e-5) and len(str(shown)) < 9


def test_the_shell_is_completed():
    words = {"_DP_COMPANION_COMPLETE": "complete_bash", "COMP_WORDS": "dp-companion cali",
             "COMP_CWORD": "1"}
    code = ("import sys; sys.argv[0] = 'dp-companion'; from dp_companion.cli import main; main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | words)
    assert "calibrate" in done.stdout, done.stderr


def test_a_refused_target_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = SMALL | {"accounting": "certified", "target_epsilon": .01}
    (tmp_path/"spec.json").write_text(json.dumps(wrong))
    status, out, err = terminal("run", "spec.json")
    assert (status, out) == (2, "") and "noise_multiplier must be certified" in err
    assert not list(tmp_path.glob(f"runs/{'?'*16}"))


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["digits", "mnist"])
def test_a_written_spec_meets_its_target(dataset):
    from dp_companion.budgets.certified import certify
    from dp_companion.papers.global_adapt_v2.grid import profile_named
    from dp_companion.training.spec import spec_from_dict
    status, out, _ = terminal("spec", "--method", "v2-s", "--dataset", dataset, "--target-epsilon",
                              "1")
    made = spec_from_dict(json.loads(out))
    assert made.method.name == "DP-SGD-Global-Adapt-V2-S" and made.dataset == dataset
    sizes = profile_named({"digits": "digits", "mnist": "laptop"}[dataset])
    events = made.method.events(sizes.plan_of(made.values), 10)
    assert .9 < certify(events, delta=made.delta, accountants=("pld",))["pld"].epsilon <= 1


@pytest.mark.slow
def test_the_examples_of_the_help_do_what_they_promise(tmp_path, monkeypatch):
    import re
    import shlex
    monkeypatch.chdir(tmp_path)
    seen = []
    for command in ("budget", "calibrate", "tables", "spec"):
        said = terminal(command, "--help")[1]
        example = re.search(r"Example:\s+dp-companion (.*?)\n\n", said, flags=re.S)[1]
        typed = example.replace("\\\n", " ").partition(">")[0]
        status, out, err = terminal(*shlex.split(typed))
        assert status == 0 and out, (example, err)
        seen.append(out)
    assert "ε = 0.9948" in seen[0] and "80.68" in seen[2] and json.loads(seen[3])
    assert float(seen[1].split()[1]) == pytest.approx(1.401, rel=1e-3)
    said = terminal("run", "--help")[1]
    content = re.search(r"such as\s+(\{.*?\}\s*,.*?\})", said, flags=re.S)[1]
    (tmp_path/"spec.json").write_text(" ".join(content.split()))
    status, out, err = terminal("run", "spec.json")
    assert status == 0 and "test_accuracy" in out, err


def test_names_that_are_unknown_get_the_nearest():
    assert "the nearest is 'v2-s'" in terminal("spec", "--method", "v2_s")[2]
    assert "the nearest is 'mnist'" in terminal("spec", "--method", "v2-s", "--dataset", "mnit")[2]


def test_run_trains_and_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"spec.json").write_text(json.dumps(SMALL))
    first = terminal("run", "spec.json", "--json")
    record, = (tmp_path/"runs").glob("*/record.json")
    written = record.stat().st_mtime_ns
    second = terminal("run", "spec.json", "--json")
    assert first[0] == 0 and first[1] == second[1] and record.stat().st_mtime_ns == written
    said = terminal("run", "spec.json")[1] # An accuracy beside three epsilons
    assert all(f"\n{word}" in said for word in ("test_accuracy ", "claimed ε ", "certified ε, RDP ",
        "certified ε, PLD ", "empirical ε ", "verdict "))
    record.write_text(record.read_text()[:-40])
    status, out, err = terminal("run", "spec.json")
    assert status == 2 and out == "" and err.count("\n") == 1 and "record must be whole" in err
    assert Path(record).name in err


@pytest.mark.slow
def test_a_run_that_was_stopped_says_where_it_goes_on(tmp_path):
    from dp_companion.training.spec import spec_from_dict
    from dp_companion.training.training import train
    values = SMALL | {"epochs": 3}
    def stop(finished, epochs):
        if finished == 2: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(spec_from_dict(values), tmp_path/"runs", None, stop)
    (tmp_path/"spec.json").write_text(json.dumps(values))
    status, _, err = terminal("run", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"))
    assert status == 0 and "resumed at epoch 2 of 3\n" in err


def test_audit_writes_what_an_attack_achieves(tmp_path):
    values = dict(paper="global_adapt_v2", method=FLAT | {"noise_multiplier": .8},
                  dataset="digits", model="mnist_cnn", epochs=1, expected_batch_size=256, seed=0)
    (tmp_path/"spec.json").write_text(json.dumps({**values, "accounting": "certified",
        "target_epsilon": 8.}))
    status, out, _ = terminal("audit", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"),
                              "--draws", "2000", "--json")
    said = json.loads(out)
    assert status == 0 and 0 < said["empirical"]["epsilon"] <= said["certified"]["pld"]["epsilon"]
    assert said["empirical"]["draws"] == 2000
    # a finished record, attacked afresh
    status, out, _ = terminal("audit", said["record"], "--draws", "4000", "--json")
    again = json.loads(Path(said["record"]).read_text())["budget"]["empirical"]
    assert status == 0 and again == json.loads(out)["empirical"] and again["draws"] == 4000
    (copied := tmp_path/"elsewhere"/"copy.json").parent.mkdir()
    copied.write_bytes(Path(said["record"]).read_bytes())
    status, _, err = terminal("audit", str(copied))
    assert status == 2 and "a record must be in the folder of its name" in err
    assert [p.name for p in tmp_path.iterdir()].count(Path(said["record"]).parent.name) == 0


def test_audit_refuses_what_has_no_noise(tmp_path):
    values = dict(paper="global_adapt_v2", method={"name": "Non-DP"}, dataset="digits",
                  model="mnist_cnn", epochs=1, expected_batch_size=256, seed=0)
    (tmp_path/"spec.json").write_text(json.dumps({**values, "accounting": "none"}))
    status, _, err = terminal("audit", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"))
    assert status == 2 and "noisy queries" in err and err.count("\n") == 1, err


@pytest.mark.slow
def test_audit_of_a_paper_s_headline():
    status, out, _ = terminal("audit", "adaptive_noise", "--json")
    printed, real = json.loads(out)
    assert status == 0
    assert printed["claimed"]["epsilon"] <= 1 < printed["empirical"]["epsilon"] <= printed[
        "certified"]["pld"]["epsilon"]
    assert real["empirical"]["epsilon"] <= real["certified"]["pld"]["epsilon"] <= 1
    status, _, err = terminal("audit", "a_fifth_paper")
    assert status == 2
    assert ("spec must be a JSON file, or a paper: global_adapt_v2, sad, adaptive_noise, "
            "sanitization; got a_fifth_paper" in err)


@pytest.mark.slow
def test_audit_of_a_sanitized_run(tmp_path):
    from dataclasses import asdict, replace
    from dp_companion.training.spec import run_spec
    from dp_companion.papers.sanitization.grid import layer_profile, printed_values
    spec = run_spec(**printed_values(replace(layer_profile("digits"), epochs=1,
        expected_batch_size=256), layer_noise_multiplier=20.), seed=0)
    (tmp_path/"spec.json").write_text(json.dumps(asdict(spec)))
    status, out, err = terminal("audit", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"),
                                "--json")
    assert status == 0, err
    said = json.loads(out)
    assert said["certified"] == {} and said["claimed"]["epsilon"] < .5
    assert said["empirical"]["epsilon"] > 3


def test_reproduce_finds_kept_outputs_wherever_the_runs_lie(root, monkeypatch, tmp_path):
    "Else it would train, for minutes, what the page shows already."
    given = {}
    def noted(source, target, **options):
        given.update(options, source=source)
        raise ValueError("enough")
    monkeypatch.chdir(root)
    monkeypatch.setattr(notebooks, "execute_all", noted)
    assert terminal("reproduce", "--runs", str(tmp_path))[0] == 2
    kept = [p for p in notebooks.source_notebooks(given["source"]) if is_experiment(p)
            and is_kept(p)]
    assert kept and given["runs"] == tmp_path
    for p in kept:
        assert execution_key(p, {name: str(given[name])
                                 for name in ("profile", "runs")}) == execution_key(p,
                                     page_parameters(p)), p


@pytest.mark.parametrize("words", [["budget", "--noise-multiplier", "1e99", *SETTING],
                                   ["budget", "--noise-multiplier", "1", "--epochs", "1",
                                    "--batch-size", "1", "--dataset-size", str(10**21)],
                                   ["calibrate", "--target-epsilon", "1e-300", "--accountant",
                                    "tcdp", *SETTING]])
def test_numbers_beyond_what_can_be_computed_are_one_sentence(words):
    status, out, err = terminal(*words)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "values must be of a size that can be computed with" in err and words[2] in err


@pytest.mark.parametrize("words", [["budget", "--noise-multiplier", "1"],
                                   ["calibrate", "--target-epsilon", "1"]])
def test_noise_that_decays_to_nothing_is_said_of_the_decay(words):
    status, out, err = terminal(*words, "--decay", "linear", "--decay-rate", "0.001", "--epochs",
                                "1000", "--batch-size", "64", "--dataset-size", "6000")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "every value of a schedule must be > 0, got 0 at index" in err and "initial" not in err
    assert "--noise-multiplier" not in err


def test_below_the_smallest_delta_calibrate_says_that_rdp_answered():
    answers = [json.loads(terminal("calibrate", "--target-epsilon", "1", *SETTING[:-1], "1e-11",
                                   "--accountant", name, "--json")[1]) for name in ("pld", "rdp")]
    assert answers[0] == answers[1] and answers[0]["accountant"] == "rdp"


def test_an_output_that_has_no_letter_for_epsilon_is_readable():
    done = subprocess.run([sys.executable, "-c", "from dp_companion.cli import main; main()",
                           "--help"], capture_output=True,
                           env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0 and done.stderr == b"" and b"\\u03b5" in done.stdout


def test_tables_say_that_their_folder_is_none(tmp_path):
    status, out, err = terminal("tables", "--runs", str(tmp_path/"nowhere"))
    assert (status, out) == (2, "") and "runs must be a folder of runs" in err
    assert str(tmp_path/"nowhere") in err


@pytest.mark.parametrize("words", [["tables"], ["run", "spec.json"], ["audit", "spec.json"]])
def test_a_file_is_no_folder_of_runs(tmp_path, words):
    (tmp_path/"file").write_text("")
    status, out, err = terminal(*words, "--runs", str(tmp_path/"file"))
    assert (status, out) == (2, "") and err.count("\n") == 1 and "'--runs'" in err
    assert f"{tmp_path/'file'}' is a file" in err


@pytest.mark.parametrize(("text", "sentence"),
                         [("null", "spec must be a JSON object, got null in "),
                          ("["*200_000, "spec must be a readable JSON file, got "),
                          ("\ufeff" + json.dumps({"sigma": 1}),
                           "spec must hold only known names, got 'sigma'")])
def test_a_spec_is_a_json_object_with_known_names(tmp_path, text, sentence):
    (tmp_path/"spec.json").write_text(text, encoding="utf-8")
    status, out, err = terminal("run", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"))
    assert (status, out) == (2, "") and err.count("\n") == 1 and sentence in err
    assert not (tmp_path/"runs").exists()


@pytest.mark.slow
def test_a_run_without_its_data_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_COMPANION_DATA", str(tmp_path/"empty"))
    (tmp_path/"spec.json").write_text(json.dumps(SMALL | {"dataset": "mnist"}))
    status, out, err = terminal("run", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs"))
    assert (status, out) == (2, "") and err.count("\n") == 1 and not (tmp_path/"runs").exists()


def test_a_fault_of_a_training_keeps_its_stack(tmp_path, monkeypatch):
    from dp_companion.training import training
    def at_fault(*_): raise ZeroDivisionError("inside a training")
    monkeypatch.setattr(training, "train", at_fault)
    (tmp_path/"spec.json").write_text(json.dumps(SMALL))
    with pytest.raises(ZeroDivisionError):
        main(["run", str(tmp_path/"spec.json"), "--runs", str(tmp_path/"runs")])


def test_tables_say_that_runs_are_of_other_sizes(root):
    status, out, err = terminal("tables", "Table 13", "--runs", str(root/"results"), "--profile",
                                "digits")
    assert (status, out) == (2, "") and "of other sizes" in err and "--profile" in err
    assert "got none" not in err


@pytest.mark.slow
def test_tables_say_whose_data_and_names_they_have(root):
    status, out, _ = terminal("tables", "Table 13", "--runs", str(root/"results"), "--profile",
                              "laptop")
    assert status == 0
    assert out.startswith("Paper global_adapt_v2, Table 13, on MNIST; ours on mnist. V2 is "
                          "DP-SGD-Global-Adapt-V2; ")


def test_what_is_stopped_says_so(monkeypatch):
    def stopped(*_, **__): raise KeyboardInterrupt
    monkeypatch.setattr("dp_companion.budgets.certified.calibrate", stopped)
    status, out, err = terminal("calibrate", "--target-epsilon", "1", *SETTING)
    assert (status, out) == (130, "")
    assert ("dp-companion: stopped; what was finished is kept, and the same command goes on from "
            "there" in err)


def test_a_reading_whose_epsilon_is_real_is_not_refuted():
    "Nobody claimed what the paper's formula would say of its noise."
    from types import SimpleNamespace
    from dp_companion.papers.audited_claims import Headline, follows
    from dp_companion.budgets.certified import budget_report
    from dp_companion.budgets.events import MechanismEvent
    report = budget_report((MechanismEvent(noise_multiplier=4., sample_rate=.1, steps=10),),
                           delta=1e-5, claimed=SimpleNamespace(epsilon=.01, preconditions=()),
                           empirical=SimpleNamespace(epsilon=.03))
    said = {is_printed: follows(Headline(paper="", setting="", is_printed=is_printed, target=1.,
        unit="image", budget=None, attack=None), report) for is_printed in (True, False)}
    assert said[True].startswith("The claim of 0.01 is refuted")
    assert said[False].startswith("Target 1, certified ") and ": it holds." in said[False]
    assert str(report).startswith(f"certified  ε ≤ {report.epsilon:.4g}")
    assert f"{report.certified['rdp'].epsilon:.4g} by RDP" in str(report).splitlines()[0]
    assert str(report).endswith(report.verdict) and "empirical  ε ≥ 0.03" in str(report)


def test_a_recipe_is_read_from_the_records(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "recipes must be in results/recipes/" in terminal("recipe", "--data", "cifar10",
                                                             "--epsilon", "1")[2]
    monkeypatch.chdir(root)
    status, out, err = terminal("recipe", "--data", "cifar10", "--epsilon", "1")
    assert status == 0 and "SGD" not in err
    said = dict(line.rsplit("  ", 1) for line in out.splitlines() if "  " in line)
    found = {name.strip(): value.strip() for name, value in said.items()}
    assert .97 <= float(found["certified epsilon"]) <= 1
    assert float(found["epsilon with the choice"]) > 1
    assert "one of cifar10 at 1" in terminal("recipe", "--data", "cifar10", "--epsilon", "2")[2]
