"""People of the flow portraits: trained by the command, the shipped space, and what is drawn of it."""

import torch
from vitrine.cli.main import main
from vitrine.engine.portraits.flow import FLOW_WEIGHTS
from vitrine.engine.portraits.shipped import FLOW_PEOPLE_SPACE
from vitrine.engine.w2w import BatchedTrainer, read_header, read_lora, sample
from vitrine.evidence.w2w import people
from vitrine.evidence.w2w.likeness import Sitters
from vitrine.evidence.w2w.measures import PEOPLE, distances
from vitrine.evidence.w2w.people import FLOW_RECIPE, LABELS, Studio, flow_people_space


def test_the_command_trains_people_of_the_flow_model(monkeypatch, tmp_path, capsys):
    """It trained the 64 px model's people alone."""
    monkeypatch.setattr(people, "FLOW_RECIPE", FLOW_RECIPE.__class__(**FLOW_RECIPE.to_dict() | {"steps": 1}))
    command = ["w2w", "train-loras", "--model", "flow", "--people", "2", "--workers", "1", "--out", str(tmp_path)]
    assert main(command) == 0 and "2 LoRAs in" in capsys.readouterr().out
    lora = read_lora(read_header(tmp_path / "person-0001.safetensors"))
    assert {path.split(".")[0] for path in lora} == {"transformer_blocks", "single_transformer_blocks"}
    assert any(float(layer.up.abs().max()) > 0 for layer in lora.values())


def test_other_models_are_refused(tmp_path, capsys):
    assert main(["w2w", "train-loras", "--model", "my/model", "--workers", "1", "--out", str(tmp_path)]) == 2
    assert "portraits folder" in capsys.readouterr().err


def test_the_space_is_what_its_card_says():
    space = flow_people_space()
    assert FLOW_PEOPLE_SPACE.stat().st_size <= 3_200_000 and space.count == 244
    assert set(LABELS) <= set(space.directions) and space.info["base"] == "vitrine flow portraits"
    assert {layer.rank for layer in space.manifest} == {1} and space.manifest.size == 12_160


def test_a_sampled_model_is_one_person(no_hooks_left):
    studio = Studio.open(str(FLOW_WEIGHTS), steps=10)
    rows = sample(studio.space, [1, 2], PEOPLE)
    features, _ = studio.read(studio.draw(rows, 2))
    within, between = distances(features)
    assert float(within.mean()) < 0.6 * float(between.mean())
    no_hooks_left(studio.portraits.backbone)


def test_loras_that_inversions_are_compared_with_are_drawn_whole(monkeypatch):
    """The space holds factors with the scale counted in: trained ones were drawn at a quarter of their strength."""
    short = FLOW_RECIPE.__class__(**FLOW_RECIPE.to_dict() | {"steps": 2})
    monkeypatch.setattr(people, "FLOW_RECIPE", short)
    sitters = Sitters.open(Studio.open(str(FLOW_WEIGHTS), steps=10), 1)
    weights, _ = sitters.trained(1)
    trainer = BatchedTrainer(sitters.denoiser, [people.subject(sitters.studio.portraits, sitters.who[0], 1)], short)
    for _ in range(short.steps):
        trainer.step()
    drawn, trained = sitters.studio.manifest.lora(weights[0]), trainer.loras()[0]
    for path, layer in trained.items():
        assert float(layer.up.abs().max()) > 0
        torch.testing.assert_close(drawn[path].delta(), layer.delta())
