"README's examples, as an editor and a type checker read them, and as a reader runs them."
import json
import re
import subprocess
import sys

import pytest

SHOWN = "#| echo: false" # A cell with this line makes the page; it is no example


@pytest.fixture(scope="module")
def examples(root, tmp_path_factory):
    "One file for each example of the first page."
    folder = tmp_path_factory.mktemp("examples")
    page = json.loads((root/"nbs/index.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "code"]
    code = [text for text in cells if SHOWN not in text]
    for i, text in enumerate(code): (folder/f"example_{i}.py").write_text(text + "\n")
    return sorted(folder.iterdir())


def checked(root, *command):
    "Output of a command that must succeed, with this checkout's package."
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True,
                          cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_mypy_says_nothing_of_the_examples(root, examples, tmp_path):
    pytest.importorskip("mypy")
    options = ["--strict", "--follow-imports=silent", "--cache-dir", tmp_path,
               "--untyped-calls-exclude=torch"] # Tensor.backward has no types
    assert "no issues found" in checked(root, "-m", "mypy", *options, *examples)


@pytest.mark.slow
def test_pyright_says_nothing_of_the_examples(root, examples):
    pytest.importorskip("pyright", reason="its wheel wants node")
    pythonpath = ["--pythonpath", sys.executable]
    assert "0 errors" in checked(root, "-m", "pyright", *pythonpath, *examples)


@pytest.mark.slow
def test_a_wrong_word_is_seen_before_it_runs(examples, tmp_path, root):
    pytest.importorskip("mypy")
    wrong = tmp_path/"wrong.py"
    wrong.write_text(examples[0].read_text().replace('"auto_s"', '"auto_z"'))
    done = subprocess.run([sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir",
                           str(tmp_path/"cache"), str(wrong)], capture_output=True, text=True,
                          cwd=root)
    assert done.returncode == 1 and "auto_z" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_first_example_is_short_and_runs(root, examples):
    first = examples[0].read_text()
    assert first.count("\n") <= 25
    said = checked(root, "-W", "ignore", examples[0])
    found = re.findall(r"^(?:certified  ε ≤|empirical  ε ≥) (\S+)", said, flags=re.M)
    certified, empirical = map(float, found)
    assert 0 <= empirical < .98 < certified <= 1
    assert "-differentially private" in said and "keyed by the operating system" in said


def test_the_names_for_editors_are_the_lazy_ones():
    import dp_companion
    assert set(dp_companion._LAZY) == set(dp_companion.__all__) <= set(dir(dp_companion))
