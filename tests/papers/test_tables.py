"Tables: a cell has one noise."


def test_a_cell_of_a_table_has_one_noise():
    from dp_companion.training.records import RunRecord
    from dp_companion.training.spec import run_spec
    from dp_companion.papers.tables import summarise
    def record(seed, sigma):
        spec = run_spec(
            paper="global_adapt_v2", method="DP-SGD", dataset="digits", model="mnist_cnn",
            clip_rule="flat", accounting="certified", noise_multiplier=sigma, target_epsilon=1.,
            epochs=1, expected_batch_size=64, seed=seed
        )
        return RunRecord(
            spec=spec, epochs=[], final={"test_accuracy": .5},
            budget={"claimed": None, "certified": {"pld": {"epsilon": 1/sigma}}, "empirical": None},
            provenance={}
        )
    table = summarise([record(0, 2.), record(1, 2.), record(0, 1.)])
    assert table[["noise_multiplier", "certified_pld", "seeds"]].values.tolist() == [
        [2., .5, 2], [1., 1., 1]
    ]
