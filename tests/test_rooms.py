"Imports point one way: budgets <- algorithms <- training <- audits <- papers <- site; budgets stay light."
import ast
import subprocess
import sys
from pathlib import Path

ROOMS = ["files", "published", "figures", "budgets", "algorithms", "training", "audits", "papers", "site", "cli"]


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
    module.write_text("from ..training.records import RunSpec\nfrom .schedules import schedule\nfrom dp_companion.audits.bounds import Finding\n")
    assert list(imported_rooms(module, tmp_path/"dp_companion")) == ["training", "budgets", "audits"]


BUDGETS = [f"import dp_companion.budgets.{path.stem}" for path in sorted((Path(__file__).parent.parent/"dp_companion"/"budgets").glob("[a-z]*.py"))]
LIGHT = [ # what is imported, one after the other, and what must not have come with it
    ("import dp_companion, dp_companion.site.site", "torch nbdev sphinx pandas"),
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
