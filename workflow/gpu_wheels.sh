#!/usr/bin/env bash
# Fill a folder with the wheels that `make gpu` needs on a machine with Python, torch (with NumPy), SciPy and no network.
#   workflow/gpu_wheels.sh [FOLDER=gpu_wheels] [PYTHON_VERSION=3.12] [more packages, such as scipy]
# The folder stays under 60 MiB and travels with the checkout; `make gpu` installs from it only what is not there.
set -euo pipefail
folder=${1:-gpu_wheels}; python=${2:-3.12}; shift $(($# < 2 ? $# : 2))
needed=(opacus opt-einsum dp-accounting absl-py 'attrs<24' dm-tree wrapt 'mpmath<1.4' 'fastcore<2' cryptography cffi pycparser
  joblib cloudpickle filelock tqdm scikit-learn threadpoolctl narwhals pandas python-dateutil tzdata six pytest pluggy iniconfig packaging pygments)
platforms=(); for n in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${n}_x86_64"); done
mkdir -p "$folder"; rm -f "$folder"/*.whl
${PIP:-python3 -m pip} download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$python" \
  "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$folder" "${needed[@]}" "$@"
git -C "$(dirname "$0")" rev-parse --short=12 HEAD > "$folder/commit" 2>/dev/null || echo unknown > "$folder/commit"
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | grep -c whl) wheels, $size MiB"
[ "$size" -le 60 ] || { echo "$folder must hold at most 60 MiB, got $size; leave out what the machine has" >&2; exit 1; }
