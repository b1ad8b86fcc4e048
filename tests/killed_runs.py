"A run that is killed after a checkpoint and started again, beside the same run in one go."
import pytest

from dp_companion.training import training
from dp_companion.training.records import record_path


class Killed(Exception): pass


def train_killed(spec, runs, data, monkeypatch, *, after):
    "Train until that many epochs are in a checkpoint, then stop as a kill would."
    real = training.save_checkpoint

    def save(run, path):
        real(run, path)
        if len(run.epochs) == after: raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training, "save_checkpoint", save)
        training.train(spec, runs, data)


def whole_and_parts(spec, folder, data, monkeypatch, stops=(1, 2)):
    "The record files of a run in one go, and of the same run that is killed twice."
    training.train(spec, folder/"whole", data)
    for after in stops: train_killed(spec, folder/"parts", data, monkeypatch, after=after)
    training.train(spec, folder/"parts", data)
    return [record_path(spec, folder/part) for part in ("whole", "parts")]
