import pytest

from dp_companion.algorithms import book_keeping, per_sample_norms


@pytest.fixture
def small_pieces(monkeypatch):
    "Late gradients get no freed memory, so that even a small batch is formed in several pieces."
    monkeypatch.setattr(book_keeping, "pieces", lambda parts, batch,
                        freed=0: per_sample_norms.pieces(parts, batch))
