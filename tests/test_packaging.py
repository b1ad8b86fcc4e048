"What is built from the project for others to install, and the one number of its version."
import configparser
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest


@pytest.fixture(scope="module")
def built(root, tmp_path_factory):
    "The source distribution, and the wheel that is built from it."
    pytest.importorskip("build", reason="no package `build`, so nothing can be built")
    out, clone = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("clone")
    names = "settings.ini setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md " \
        "CITATION.cff dp_companion"
    pack = subprocess.run(["tar", "-C", root, "-c", "--exclude=__pycache__", *names.split()],
                          check=True, capture_output=True)
    subprocess.run(["tar", "-C", clone, "-x"], input=pack.stdout, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, clone]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def files_of(folder, pattern):
    "Names in the one archive that matches, below its top folder."
    path, = folder.glob(pattern)
    if path.suffix == ".whl": return set(zipfile.ZipFile(path).namelist())
    return {name.partition("/")[2] for name in tarfile.open(path).getnames()}


def test_distributions_hold_code_numbers_and_types(root, built):
    package = root/"dp_companion"
    wanted = {"dp_companion/py.typed"}
    wanted |= {p.relative_to(root).as_posix() for p in [*package.rglob("*.py"),
                                                        *package.rglob("*.csv"),
                                                        *package.rglob("*.json")]}
    assert wanted <= files_of(built, "*.whl")
    assert wanted | {"settings.ini", "README.md", "LICENSE"} <= files_of(built, "*.tar.gz")


def test_distributions_hold_nothing_more(built):
    def strangers(names, allowed):
        return sorted(n for n in names if not any(re.fullmatch(known, n) for known in allowed))
    code = [r"dp_companion/(?:\w+/)*\w+\.py", r"dp_companion/py\.typed",
            r"dp_companion/published/\w+\.(?:csv|md)",
            r"dp_companion/papers/register/claims/\w+\.json"]
    assert strangers(files_of(built, "*.whl"), [*code, r"dp_companion-[^/]+\.dist-info/.*"]) == []
    rest = ["|".join(map(re.escape, ("settings.ini", "setup.py", "setup.cfg", "pyproject.toml",
                                     "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
                                     "CITATION.cff", "PKG-INFO", ""))),
            r"dp_companion(?:/\w+)*", r"dp_companion\.egg-info.*"]
    assert strangers(files_of(built, "*.tar.gz"), [*code, *rest]) == []


def test_twine_has_nothing_to_say(built):
    pytest.importorskip("twine.commands.check", exc_type=ImportError)
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_an_installed_wheel_finds_its_numbers(built, tmp_path):
    wheel, = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import dp_companion.published as p; print(p.__file__, len(p.load_text()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=True,
                          capture_output=True, text=True)
    path, rows = done.stdout.split()
    assert path.startswith(str(tmp_path)) and int(rows) > 400


def test_a_wheel_says_what_it_needs_and_what_is_extra(built):
    wheel, = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(name).decode()
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", text, flags=re.M)
    core = {name for name, rest in needs if "extra ==" not in rest}
    assert {"torch", "opacus", "dp-accounting", "numpy", "cryptography"} <= core
    assert not core & {"nbdev", "jupyter", "papermill", "sphinx", "seaborn", "pandas"}
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, flags=re.M))
    assert extras == {"notebooks", "site", "vision", "pretrained", "grid", "dev", "all"}


def test_one_version_for_all(root):
    settings = configparser.ConfigParser(delimiters=["="])
    settings.read(root/"settings.ini", encoding="utf-8")
    version = settings["DEFAULT"]["version"]
    package = (root/"dp_companion"/"__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{version}"' in package, "run nbdev_export"
    assert f"\nversion: {version}\n" in (root/"CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version.partition('.dev')[0]}" in (root/"CHANGELOG.md").read_text("utf-8")
    command = ["git", "-C", str(root), "tag", "--points-at", "HEAD", "v*"]
    tags = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert set(tags) <= {f"v{version}"}, "a tag must be the version"
