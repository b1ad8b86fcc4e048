"Imports point one way: budgets <- algorithms <- workbench <- audits; budgets stay light."
import ast
import subprocess
import sys
from pathlib import Path

ROOMS = ["published", "figures", "budgets", "algorithms", "workbench", "audits", "cli"]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dp_companion."): yield node.module.split(".")[1]


def test_imports_point_one_way(root):
    wrong = []
    for path in sorted((root/"dp_companion").rglob("*.py")):
        room = path.relative_to(root/"dp_companion").parts[0].removesuffix(".py")
        if room in ROOMS: wrong += [f"{path.name} imports {other}" for other in imported_rooms(path) if ROOMS.index(other) > ROOMS.index(room)]
    assert wrong == []


BUDGETS = [f"import dp_companion.budgets.{path.stem}" for path in sorted((Path(__file__).parent.parent/"dp_companion"/"budgets").glob("[a-z]*.py"))]
LIGHT = [ # what is imported, one after the other, and what must not have come with it
    ("import dp_companion, dp_companion.workbench.site", "torch nbdev sphinx pandas"),
    ("import dp_companion.budgets.decayed", "torch scipy matplotlib pandas"),
    ("import dp_companion.budgets.certified", "torch dp_accounting opacus scipy.stats"),
    ("import dp_companion.cli", "torch"),
    *((budget, "torch") for budget in BUDGETS),
    ("import dp_companion.published as p; p.load()", "torch"),
    ("import dp_companion.audits.bounds", "torch"),
]
CODE = """import sys
for statement, heavy in {light}:
    exec(statement)
    came = [m for m in heavy.split() if m in sys.modules]
    assert not came, (statement, came)"""


def test_what_is_light_stays_light():
    assert len(BUDGETS) > 8
    done = subprocess.run([sys.executable, "-c", CODE.format(light=LIGHT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
