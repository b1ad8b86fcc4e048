"Imports point one way: budgets <- algorithms <- workbench <- audits; budgets stay light."
import ast
import subprocess
import sys

import pytest

ROOMS = ["published", "figures", "budgets", "algorithms", "workbench", "audits", "cli"]


def imported_rooms(path, package):
    "The rooms that a module imports from, whether it names them from the top or relative to itself."
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom): continue
        above = list(path.relative_to(package.parent).parent.parts)[:-node.level + 1 or None] if node.level else []
        full = [*above, *(node.module or "").split(".")]
        if full[0] == "dp_companion" and len(full) > 1: yield full[1]


def test_imports_point_one_way(root):
    wrong = []
    for path in sorted((root/"dp_companion").rglob("*.py")):
        room = path.relative_to(root/"dp_companion").parts[0].removesuffix(".py")
        if room in ROOMS: wrong += [f"{path.name} imports {other}" for other in imported_rooms(path, root/"dp_companion") if ROOMS.index(other) > ROOMS.index(room)]
    assert wrong == []


def test_a_line_that_points_back_is_seen(tmp_path):
    module = tmp_path/"dp_companion"/"budgets"/"wrong.py"
    module.parent.mkdir(parents=True)
    module.write_text("from ..workbench.records import RunSpec\nfrom .schedules import schedule\nfrom dp_companion.audits.bounds import Finding\n")
    assert list(imported_rooms(module, tmp_path/"dp_companion")) == ["workbench", "budgets", "audits"]


@pytest.mark.parametrize("name", ["dp_companion.budgets", "dp_companion.budgets.schedules", "dp_companion.budgets.decayed", "dp_companion.budgets.rdp", "dp_companion.budgets.certified", "dp_companion.cli"])
def test_light_without_torch(name):
    code = f"import sys, {name}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
