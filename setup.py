"Package metadata, read from settings.ini so that it is written once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here/"settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split()
          for name in ("notebooks", "site", "vision", "pretrained", "grid", "dev")}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    url=cfg["git_url"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    license=cfg["lib_license"],
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Typing :: Typed",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)),
    ],
    packages=find_packages(include=["dp_companion", "dp_companion.*"]),
    package_data={"dp_companion": ["py.typed", "published/*.csv", "published/*.md",
                                   "papers/register/claims/*.json"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={**extras, "all": sorted({one for needed in extras.values() for one in needed})},
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
