"Grids: the same records in any order and with any number of workers."
import pytest

from dp_companion.papers.global_adapt_v2.grid import method_values
from dp_companion.training.grid import Profile, run_grid, specs_of
from dp_companion.training.records import record_path

SMALL = Profile(dataset="digits", model="mnist_cnn", dataset_size=1437, epochs=1,
                expected_batch_size=128, learning_rate=1e-3, seeds=2)


@pytest.mark.slow
def test_the_number_of_workers_changes_no_record(tmp_path):
    cells = [(method_values(SMALL, m), "as_printed", 1.) for m in ("DP-SGD", "Auto-S")]
    specs = [s for cell in specs_of(SMALL, cells, runs=tmp_path/"cache", workers=1) for s in cell]
    alone, together = tmp_path/"alone", tmp_path/"together"
    assert run_grid(specs, alone, workers=1) == run_grid(specs[::-1], together, workers=2)[::-1]
    for spec in specs:
        assert record_path(spec, alone).read_bytes() == record_path(spec, together).read_bytes()


@pytest.mark.slow
def test_a_spec_that_stands_twice_is_trained_once(tmp_path):
    cells = [(method_values(SMALL, "DP-SGD"), "as_printed", 1.)]
    (specs,) = specs_of(SMALL, cells, runs=tmp_path, workers=1)
    first, second, again = run_grid([specs[0], specs[1], specs[0]], tmp_path, workers=1)
    assert first == again != second
    assert len(list(tmp_path.glob("*/record.json"))) == 2
