"""What several searches agree on, and neurons as text."""

import pytest
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, consensus, jaccard
from vitrine.engine.nemo.neurons import export_lists, import_csv, parse_neurons


def sets(*choices, fingerprint="aa"):
    return [NeuronSet({"x": c, "y": (7,)}, fingerprint, {"prompt": "p"}) for c in choices]


def test_neurons_are_read_from_lines_and_taken_out():
    search = NeuronSet({"mid-vit-block0-cross-v": (1, 5, 9), "down-v": (2,)}, "f", {"prompt": "x"})
    spared = parse_neurons("mid-vit-block0-cross-v 5, 1\n\ndown-v 2")
    assert spared == {"mid-vit-block0-cross-v": (5, 1), "down-v": (2,)} and parse_neurons(" \n") == {}
    left = search.without(spared)
    assert left.neurons == {"mid-vit-block0-cross-v": (9,)} and (left.fingerprint, left.info) == ("f", {"prompt": "x"})
    assert search.without({}) == search
    for strange in ({"down-v": (3,)}, {"up-v": (2,)}):
        with pytest.raises(VitrineError, match="not blocked"):
            search.without(strange)
    for line in ("mid-vit", "mid-vit -1", "mid-vit 1.5", "3 x"):
        with pytest.raises(VitrineError, match="whole numbers"):
            parse_neurons(line)


def test_neurons_that_enough_searches_keep_stay():
    three = sets((0, 1, 2), (1, 2, 3), (2, 5))
    assert consensus(three, 0.5).neurons == {"x": (1, 2), "y": (7,)}
    assert consensus(three, 1.0).neurons == {"x": (2,), "y": (7,)}
    assert consensus(three, 0.01).neurons == three[0].merged(*three[1:]).neurons
    chosen = consensus(three)
    assert chosen.fingerprint == "aa" and chosen.info["prompt"] == "p" and chosen.info["consensus"]["searches"] == 3
    pairs = [jaccard(three[0], three[1]), jaccard(three[0], three[2]), jaccard(three[1], three[2])]
    assert chosen.info["consensus"]["jaccard"] == pytest.approx(sum(pairs) / 3)


def test_jaccard_is_the_shared_part_of_the_union():
    a, b = sets((0, 1, 2), (1, 2, 3))
    empty = NeuronSet({}, "aa")
    assert jaccard(a, b) == 3 / 5 and jaccard(a, a) == 1.0
    assert jaccard(a, empty) == jaccard(empty, a) == 0.0 and jaccard(empty, empty) is None


def test_two_searches_that_block_nothing_do_not_count_as_agreement():
    (a,), empty = sets((0, 1)), NeuronSet({}, "aa")
    told = consensus([a, empty, empty]).info["consensus"]
    assert told["jaccard"] == 0.0 and told["empty_pairs"] == 1, "two pairs of 0; as agreement the third made it 1/3"
    told = consensus([empty, empty]).info["consensus"]
    assert told["jaccard"] is None and told["empty_pairs"] == 1


def test_one_search_strangers_and_shares_that_mean_nothing_are_refused():
    with pytest.raises(VitrineError, match="two at least"):
        consensus(sets((0,)))
    with pytest.raises(VitrineError, match="one model"):
        consensus([*sets((0,)), *sets((0,), fingerprint="bb")])
    with pytest.raises(VitrineError, match="share"):
        consensus(sets((0,), (1,)), 0.0)


def test_the_command_writes_what_searches_agree_on(tmp_path, capsys):
    files = [str(each.save(tmp_path / f"{i}.json")) for i, each in enumerate(sets((0, 1), (1, 2), (1,)))]
    assert main(["nemo", "consensus", *files, "--out", str(tmp_path / "out.json")]) == 0
    assert NeuronSet.load(tmp_path / "out.json").neurons == {"x": (1,), "y": (7,)}
    assert "2 neurons of 3 searches (pairs agree by 0.61)" in capsys.readouterr().out
    none = [str(NeuronSet({}, "aa").save(tmp_path / f"none{i}.json")) for i in range(2)]
    assert main(["nemo", "consensus", *none, "--out", str(tmp_path / "out.json")]) == 0
    assert "none kept a neuron" in capsys.readouterr().out
    assert main(["nemo", "consensus", files[0], *none, "--out", str(tmp_path / "out.json")]) == 0
    assert "pairs agree by 0.00, 1 of two empty sets left out" in capsys.readouterr().out
    assert main(["nemo", "consensus", files[0]]) == 2


def test_official_csv_and_its_line(tmp_path):
    path = tmp_path / "official.csv"
    path.write_text("Caption;Refined Neurons\nsome prompt;[[221], [], [3, 4]]\n")
    ((prompt, neurons),) = import_csv(path, ["a", "b", "c"])
    assert prompt == "some prompt" and export_lists(neurons.neurons, ["a", "b", "c"]) == "[[221], [], [3, 4]]"
    with pytest.raises(VitrineError, match="2 layers"):
        import_csv(path, ["a", "b"])
