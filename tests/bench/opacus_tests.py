"""Opacus's own tests with this package's engine in them.

`python tests/bench/opacus_tests.py FOLDER [--only MODULE ...] [--match PATTERN] [--json FILE]`

FOLDER is `opacus/tests` of an installed Opacus or of its sources; nothing of it is kept here. Each
test passes, is refused by a sentence that the page of model checks lists, looks at an inside of
Opacus that the page lists, or fails. Tests without an engine in them are counted apart. The file
takes up what each module came to, beside the modules that an earlier run left there.
"""
import argparse
import importlib
import importlib.util
import json
import re
import sys
import traceback
import unittest
import warnings
from collections import Counter
from pathlib import Path

import opacus
import torch

import dp_companion
from dp_companion.files import write_whole

MODULES = ("privacy_engine_validation_test", "batch_memory_manager_test",
           "gradient_accumulation_test", "schedulers.noise_scheduler_test",
           "schedulers.grad_clip_scheduler_test", "randomness_test", "privacy_engine_test",
           "dpdataloader_test", "multidevice_optimizer_test", "mixed_precision_test")
HERE = str(Path(dp_companion.__file__).parent)
PAGE = Path(__file__).parents[2]/"nbs"/"algorithms"/"model_checks.ipynb"
TEXT = PAGE.read_text(encoding="utf-8")
SAID = re.findall(r"\| \*(.*?)\* \|", TEXT) # Of its last table
INSIDES = re.findall(r"\| an inside of Opacus, `(.*?)` \|", TEXT)


class Engine(dp_companion.PrivacyEngine):
    "Counts its uses, since some of these tests have no engine in them."
    made = 0
    def __init__(self, *args, **options):
        Engine.made += 1
        super().__init__(*args, **options)


class Result(unittest.TestResult):
    "What became of each test."
    def __init__(self):
        super().__init__()
        self.rows, self.failed = [], None # The last test of which a part failed

    def add(self, test, kind, error=None):
        self.rows.append((test.id().removeprefix("opacus_suite."), kind, error))

    def startTest(self, test): Engine.made = 0
    def addSuccess(self, test): self.add(test, "passed" if Engine.made else "no engine")
    def addSkip(self, test, reason): self.add(test, "skipped")
    def addFailure(self, test, error): self.add(test, *told(error))
    addError = addFailure

    def addSubTest(self, test, part, error):
        if error and test is not self.failed: self.add(test, *told(error))
        if error: self.failed = test


def told(error):
    "Whether an error is a sentence of the page's table, or hides one from a test of other words."
    kind, value, trace = error
    behind = [str(x) for x in (value, value.__context__) if isinstance(x, (ValueError, TypeError))]
    listed = [said for said in SAID for text in behind if said in text]
    if listed: return "refused", listed[0]
    frames = traceback.extract_tb(trace)
    inside = [name for name in INSIDES for frame in frames if f'"{name}"' in frame.line]
    if inside: return "inside", inside[0]
    ours = frames[-1].filename.startswith(HERE)
    return "unlisted" if ours else "failed", f"{kind.__name__}: {value}".splitlines()[0][:200]


def counted(rows):
    "How many tests of a module came to what, and by which sentence."
    return dict(kinds=dict(Counter(kind for _, kind, _ in rows)),
                words=dict(Counter(text for _, _, text in rows if text)))


def keep(file, found):
    "Write what the modules came to, beside those of an earlier run with the same Opacus."
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = content.get("modules", {}) if content.get("opacus") == opacus.__version__ else {}
    content = dict(opacus=opacus.__version__, torch=torch.__version__, modules=kept | found)
    write_whole(file, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def suite_of(folder, names):
    "The named modules of a folder, with this package's engine in the place of Opacus's."
    opacus.PrivacyEngine = opacus.privacy_engine.PrivacyEngine = Engine
    spec = importlib.util.spec_from_file_location("opacus_suite", folder/"__init__.py",
        submodule_search_locations=[str(folder)])
    sys.modules["opacus_suite"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    modules = [importlib.import_module(f"opacus_suite.{name}") for name in names]
    return unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromModule, modules))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=MODULES)
    parser.add_argument("--match", default="", help="a pattern in the names of the tests to run")
    parser.add_argument("--json", type=Path, help="the file that keeps the counts of each module")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    result = Result()
    for name, module in zip(arguments.only, suite_of(arguments.folder, arguments.only),
                            strict=True):
        began = len(result.rows)
        for group in module:
            for test in group:
                if not re.search(arguments.match, test.id()): continue
                test.run(result)
                print("{1:9} {0}  {2}".format(*result.rows[-1]), flush=True)
        if arguments.json: keep(arguments.json, {name: counted(result.rows[began:])})
    whole = counted(result.rows)
    print(whole["kinds"])
    for text, n in sorted(whole["words"].items(), key=lambda row: -row[1]): print(f"{n:4} {text}")
