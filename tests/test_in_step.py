"The generated package, the clean notebooks and the README are what nbs/ says they are."
import json
import re
import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def exported(root, tmp_path_factory):
    "A copy of the project whose package was generated anew and whose notebooks were cleaned."
    copy = tmp_path_factory.mktemp("export")
    for name in ("settings.ini", "pyproject.toml"): shutil.copy(root/name, copy/name)
    shutil.copytree(root/"nbs", copy/"nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copytree(root/"dp_companion", copy/"dp_companion",
                    ignore=shutil.ignore_patterns("__pycache__"))
    for module in (copy/"dp_companion").rglob("*.py"):
        if module.name != "__init__.py": module.unlink()
    code = ("from nbdev import nbdev_export; from nbdev.clean import nbdev_clean; "
            "nbdev_export(); nbdev_clean()")
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True)
    return copy


def modules(folder):
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8")
            for p in sorted(folder.rglob("*.py"))}


def notebooks(folder):
    return {str(p.relative_to(folder)): p.read_text(encoding="utf-8")
            for p in sorted(folder.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts}


def different(ours, theirs):
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def test_package_is_what_the_notebooks_export(root, exported):
    stale = different(modules(root/"dp_companion"), modules(exported/"dp_companion"))
    assert stale == [], "run nbdev_export and commit dp_companion/"


# Rooms whose lines are not yet within 100 columns
WIDE = {"algorithms", "audits", "budgets", "papers", "published", "training"}


def test_generated_lines_are_short(root):
    "ruff reads the notebooks; here is what nbdev adds, but for the list of names."
    for name, text in modules(root/"dp_companion").items():
        if name.split("/")[0] in {*WIDE, "_modidx.py"}: continue
        body = re.sub(r"^__all__ = \[.*?\]$", "", text, flags=re.M | re.S)
        assert [line for line in body.splitlines() if len(line) > 100] == [], name


def test_notebooks_are_clean(root, exported):
    assert different(notebooks(root/"nbs"),
                     notebooks(exported/"nbs")) == [], "run nbdev_clean and commit nbs/"


def test_readme_is_the_index(root):
    from dp_companion.site.notebooks import readme_text
    assert (root/"README.md").read_text(encoding="utf-8") == readme_text(
        root/"nbs"/"index.ipynb"), "run `make readme`"


def test_one_notebook_per_module_and_none_skipped(root):
    exports = {}
    for path in sorted((root/"nbs").rglob("*.ipynb")):
        text = ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        assert not any("skip_exec" in t for t in text), f"{path} hides failures"
        for t in text:
            if t.startswith("#| default_exp"):
                exports.setdefault(t.split()[2], []).append(path.name)
    assert {m: p for m, p in exports.items() if len(p) > 1} == {}


def test_experiments_declare_their_parameters(root):
    from dp_companion.site.parameters import declared_parameters
    experiments = sorted((root/"nbs").glob("papers/*/experiments/*.ipynb"))
    assert experiments
    for path in experiments:
        assert {"profile", "runs"} <= set(declared_parameters(path)), path
        assert (path.parent/".notest").exists(), f"nbdev_test would train {path}"
        last = json.loads(path.read_text(encoding="utf-8"))["cells"][-1]
        end = "".join(last["source"]).splitlines()[-1]
        assert end.startswith("provenance_line("), f"{path} must end with the list of its records"


def test_no_experiment_reaches_what_executes_it(root):
    "Else a change of the executor or of the site would train every experiment anew."
    from dp_companion.site.page_keys import package_folder, reached_files
    for path in sorted((root/"nbs").glob("papers/*/experiments/*.ipynb")):
        code = "\n".join("".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))[
            "cells"] if c["cell_type"] == "code")
        reached = {p.name for p in reached_files(code, package_folder())}
        assert "training.py" in reached, path
        assert not reached & {"notebooks.py", "page_keys.py", "pages.py", "site.py", "cli.py"}, path


def test_notebooks_hold_no_error_and_no_path_of_a_machine(root):
    for name, text in notebooks(root/"nbs").items():
        assert '"output_type": "error"' not in text, name
        assert str(root) not in text and str(root.parent) + "/" not in text, name


def test_committed_outputs_belong_to_the_code(root):
    from dp_companion.site.notebooks import committed_keys, source_notebooks
    from dp_companion.site.page_keys import execution_key, is_kept, page_parameters
    current = {str(p.relative_to(root/"nbs")): execution_key(p, page_parameters(p))
               for p in source_notebooks(root/"nbs") if is_kept(p)}
    committed = committed_keys(root/"nbs")
    assert sorted(name for name in {*current, *committed} if current.get(name) != committed.get(
        name)) == [], "run `make pages` and commit nbs/ and results/"


def test_the_readme_names_the_papers_that_are_to_be_cited(root):
    titles = [line.partition("title: ")[2].strip('"')
              for line in (root/"CITATION.cff").read_text(encoding="utf-8").splitlines()
              if line.strip().startswith("title: ")][1:]
    readme = (root/"README.md").read_text(encoding="utf-8")
    assert len(titles) == 4 and [title for title in titles if f"*{title}*" not in readme] == []
