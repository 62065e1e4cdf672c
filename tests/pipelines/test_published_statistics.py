"""The authors' published statistics: from their ``.pt`` file to a search."""

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.nemo import Calibration, neuron_statistics, value_sites
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import caption, load_portraits, plants, sample_scenes


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(file in the published format, the statistics in it), of the portraits model."""
    pipe = NEMOPipeline.from_pipe(load_portraits().pipeline())
    captions = caption(sample_scenes(range(8_100_000, 8_100_040)))
    statistics = pipe.calibrate(captions, ["statistics"]).statistics
    path = tmp_path_factory.mktemp("published") / "statistics.pt"
    torch.save((list(statistics.means.values()), list(statistics.stds.values())), path)
    return path, statistics


@pytest.fixture
def of_its_shape(monkeypatch):
    """The portraits model counts as SD 1.x."""
    unet = load_portraits().unet
    shapes = tuple(tuple(unet.get_submodule(site.path).weight.shape) for site in value_sites(unet))
    monkeypatch.setattr(neuron_statistics, "OFFICIAL_SHAPES", shapes)


@pytest.mark.nightly
def test_command_writes_what_find_reads(published, of_its_shape, tmp_path, monkeypatch, capsys):
    path, statistics = published
    monkeypatch.chdir(tmp_path)
    assert main(["nemo", "import-statistics", str(path), "portraits"]) == 0
    said = capsys.readouterr().out
    assert "tau 0.4280" in said and "as published\n-> calibration.safetensors" in said
    calibration = Calibration.load("calibration.safetensors")
    read, score = calibration.statistics, calibration.score
    assert all(torch.equal(read.means[a], v) for a, v in statistics.means.items()) and read.count == 50_000
    assert score.tau == 0.428 and score.probe.timestep_index == 1 and calibration.scope == "down+mid"
    (tmp_path / "prompts.txt").write_text(plants()[0].captions[0])
    assert main(["nemo", "find", "prompts.txt", "--protocol", "nemo"]) == 0
    assert "neurons  " in capsys.readouterr().out and len(list((tmp_path / "neurons").glob("*.json"))) == 1
