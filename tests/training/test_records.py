"Records: schedules by profile, and where reference records are found."
from pathlib import Path
import pytest
from dp_companion.papers.global_adapt_v2.grid import method_values, profile_named
from dp_companion.training.spec import build_method


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    "No test reads or writes the user's cache."
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"cache"))


@pytest.mark.parametrize(
    "method, epochs",
    [
        ("DP-SGD-Global-Adapt-V2-L", 90), ("DP-SGD-Global-Adapt-V2-T", 90),
        ("DP-SGD-Global-Adapt-V2-S", 90)
    ]
)
def test_decays_fall_in_ten_epochs_as_in_a_hundred(method, epochs):
    def fall(name, at):
        said = method_values(profile_named(name), method)
        shape = build_method(**said, noise_multiplier=1.).noise(None)
        return shape.at(at)/shape.at(0)
    assert fall("laptop", epochs//10) == pytest.approx(fall("paper", epochs), rel=1e-12)


def test_reference_records_are_found_from_a_folder_below(monkeypatch):
    from dp_companion.papers.results import reference_of
    here = Path(__file__).parents[2]
    monkeypatch.chdir(here/"nbs"/"papers"/"sad"/"experiments") # As Jupyter does
    below = reference_of("sad")
    monkeypatch.chdir(here)
    assert below
    assert below == reference_of("sad")
    assert reference_of("sad", folder=Path("no/such/folder")) == []
