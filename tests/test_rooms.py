"Imports point one way: budgets <- algorithms <- workbench <- audits; budgets stay light."
import ast
import subprocess
import sys

import pytest

ROOMS = ["files", "published", "figures", "budgets", "algorithms", "workbench", "audits", "cli"]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dp_companion."): yield node.module.split(".")[1]


def test_imports_point_one_way(root):
    wrong = []
    for path in sorted((root/"dp_companion").rglob("*.py")):
        room = path.relative_to(root/"dp_companion").parts[0].removesuffix(".py")
        if room in ROOMS: wrong += [f"{path.name} imports {other}" for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)]
    assert wrong == []


@pytest.mark.parametrize("name", ["dp_companion.budgets", "dp_companion.budgets.schedules", "dp_companion.budgets.decayed", "dp_companion.budgets.rdp", "dp_companion.budgets.certified", "dp_companion.cli"])
def test_light_without_torch(name):
    code = f"import sys, {name}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
