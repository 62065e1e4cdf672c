"""Find Same Points and Segment Like This in real ComfyUI, and against their pipelines."""

import base64
from types import SimpleNamespace

import pytest
import torch
from diffusers import EulerDiscreteScheduler, PNDMScheduler
from vitrine.engine.activations.correspondence import Matches, draw_matches, mask_points, parse_clicks, parse_points
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.portraits import PARTS, load_portraits, render, sample_scenes

PLACES = "up-level0-repeat0-vit-block0-cross-q\nup-level0-repeat0-res-increment"
TAP = {"selection": "layers below", "layers": PLACES, "timestep": 50.0, "seed": 0, "ensemble": 2}


@pytest.fixture(scope="module")
def parts(comfy):
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    empty = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, "")[0]
    return {"model": model, "vae": vae, "positive": empty}


@pytest.fixture(scope="module")
def pictures():
    return render(sample_scenes(range(7_000_000, 7_000_006)))


def image(pictures, rows):
    return pictures.images[rows].permute(0, 2, 3, 1)


def test_points_travel_to_the_right_part_and_agree_with_the_pipeline(comfy, parts, pictures):
    asked = pictures.keypoints[0, :3]
    text = "\n".join(f"{x} {y}" for x, y in asked.tolist())
    told = {"source": image(pictures, [0]), "target": image(pictures, [1, 2]), "points": text, "softness": 0.02}
    found, drawn = comfy.call("VitrineFindCorrespondence", **parts, **told, **TAP)
    rows = [[float(v) for v in line.split()[:3]] for line in found.splitlines()]
    assert len(rows) == 6 and drawn.shape == (2, 64, 128, 3)
    pipe = CorrespondencePipeline.from_pipe(load_portraits().pipeline())
    tap = {"addresses": PLACES.split(), "timestep": 50, "seeds": [0, 1]}
    matches = pipe.match(pictures.images[:1], pictures.images[1:3], asked, **tap)
    ours = torch.cat([torch.cat([m.points, m.similarity[:, None]], 1) for m in matches])
    assert torch.allclose(torch.tensor(rows), ours, atol=1e-3)
    truth = torch.cat([pictures.keypoints[1, :3], pictures.keypoints[2, :3]])
    assert float((ours[:, :2] - truth).norm(dim=1).median()) < 0.1


def test_painted_spots_are_points(comfy, parts, pictures):
    mask = torch.zeros(1, 64, 64)
    mask[0, 20:23, 10:13] = 1
    mask[0, 40, 50] = 1
    told = {"source": image(pictures, [0]), "target": image(pictures, [0]), "points": "", "softness": 0.0}
    found, _ = comfy.call("VitrineFindCorrespondence", **parts, **told, **TAP, mask=mask)
    rows = [[float(v) for v in line.split()[:2]] for line in found.splitlines()]
    assert len(rows) == 2 and abs(rows[0][0] - 11.5 / 64) < 0.07 and abs(rows[1][1] - 40.5 / 64) < 0.07


def test_masks_are_learned_from_three_pictures(comfy, parts, pictures):
    wanted = (pictures.parts == PARTS.index("background")).float()
    told = {
        "examples": image(pictures, [0, 1, 2]),
        "masks": wanted[:3],
        "images": image(pictures, [3, 4, 5]),
        "hidden": 0,
    }
    hard, soft = comfy.call("VitrineSegmentLikeThis", **parts, **told, **TAP)
    assert hard.shape == soft.shape == (3, 64, 64) and set(hard.unique().tolist()) == {0.0, 1.0}
    assert float((hard == wanted[3:]).float().mean()) > 0.9
    pipe = SegmentationPipeline.from_pipe(load_portraits().pipeline())
    tap = {"addresses": PLACES.split(), "timestep": 50, "seeds": [0, 1]}
    ours = pipe.segment(pictures.images[:3], wanted[:3].long(), pictures.images[3:], **tap)
    assert float((ours.float() == hard).float().mean()) > 0.999


def test_source_and_target_may_differ_in_size(comfy, parts, pictures):
    asked = pictures.keypoints[0, :3]
    tall = torch.nn.functional.interpolate(pictures.images[1:2], (96, 64), mode="bilinear")
    text = "\n".join(f"{x} {y}" for x, y in asked.tolist())
    told = {"source": image(pictures, [0]), "target": tall.permute(0, 2, 3, 1), "points": text, "softness": 0.02}
    found, drawn = comfy.call("VitrineFindCorrespondence", **parts, **told, **TAP)
    points = torch.tensor([[float(v) for v in line.split()[:2]] for line in found.splitlines()])
    assert float((points - pictures.keypoints[1, :3]).norm(dim=1).median()) < 0.1 and drawn.shape == (1, 64, 107, 3)
    pipe = CorrespondencePipeline.from_pipe(load_portraits().pipeline())
    (match,) = pipe.match(pictures.images[:1], tall, asked, addresses=PLACES.split(), timestep=50, seeds=[0, 1])
    assert torch.allclose(points, match.points, atol=1e-3)
    wanted = (pictures.parts == PARTS.index("background")).float()
    told = {"examples": image(pictures, [0, 1]), "masks": wanted[:2], "images": tall.permute(0, 2, 3, 1), "hidden": 0}
    hard, _ = comfy.call("VitrineSegmentLikeThis", **parts, **told, **TAP)
    truth = torch.nn.functional.interpolate(wanted[None, 1:2], (96, 64), mode="nearest")[0]
    assert hard.shape == (1, 96, 64) and float((hard == truth).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"points": "here"}, "two numbers"),
        ({"points": ""}, "two numbers"),
        ({"points": "900 900"}, "inside the picture"),
        ({"layers": "up-level9-out"}, "Did you mean"),
        ({"selection": "Ours-XL"}, "Did you mean"),
    ],
)
def test_bad_points_are_refused_with_a_remedy(comfy, parts, pictures, change, word):
    told = {"source": image(pictures, [0]), "target": image(pictures, [1]), "points": "0.5 0.5", "softness": 0.0}
    with pytest.raises(VitrineError, match=word):
        comfy.call("VitrineFindCorrespondence", **parts, **(told | TAP | change))


@pytest.mark.parametrize(
    ("masks", "word"),
    [
        (torch.zeros(1, 64, 64), "background"),
        (torch.ones(1, 32, 32), "1 of 64 x 64"),
        (torch.ones(2, 64, 64), "number and size"),
    ],
)
def test_bad_masks_are_refused_with_a_remedy(comfy, parts, pictures, masks, word):
    told = {"examples": image(pictures, [0]), "masks": masks, "images": image(pictures, [1]), "hidden": 0}
    with pytest.raises(VitrineError, match=word):
        comfy.call("VitrineSegmentLikeThis", **parts, **told, **TAP)


def test_points_in_pixels_and_the_drawing():
    assert parse_points("32 16\n0, 48", 64, 64).tolist() == [[0.5, 0.25], [0.0, 0.75]]
    assert len(mask_points(torch.eye(8))) == 1, "diagonal neighbours touch"
    found = Matches(torch.tensor([[0.5, 0.5]]), torch.ones(1), torch.tensor([False]))
    drawn = draw_matches(torch.zeros(40, 40, 3), torch.zeros(40, 40, 3), torch.tensor([[0.25, 0.25]]), found)
    assert drawn[10, 10].max() > 0.8 and drawn[20, 60].max() == 0, "doubtful points are hollow"


def test_points_of_other_packs_are_read():
    pixels = '[{"x": 32, "y": 16}, {"x": 0, "y": 48}]'
    assert parse_points(pixels, 64, 64).tolist() == [[0.5, 0.25], [0.0, 0.75]]
    both = '{"positive": [{"x": 32, "y": 16}], "negative": [{"x": 0, "y": 48}]}'
    lines = "0.5 0.25\nnot 0 0.75"
    for text in (both, lines):
        points, wanted = parse_clicks(text, 64, 64)
        assert points.tolist() == [[0.5, 0.25], [0.0, 0.75]] and wanted.tolist() == [True, False]
        with pytest.raises(VitrineError, match="Segment Like This"):
            parse_points(text, 64, 64)
    for text in ("[]", '[{"x": 1}]', '{"negative": 3}', "[1, 2]", "[{", "not", "not 1 2 3"):
        with pytest.raises(VitrineError, match="two numbers"):
            parse_clicks(text, 64, 64)


CLICKS = "0.5 0.6\n0.5 0.95\nnot 0.05 0.1\nnot 0.95 0.1"


def test_a_few_clicks_make_masks_and_the_pipeline_makes_the_same(comfy, parts, pictures):
    asked = {"examples": image(pictures, [0]), "images": image(pictures, [3, 4, 5]), "hidden": 0}
    hard, soft = comfy.call("VitrineSegmentLikeThis", points=CLICKS, **parts, **asked, **TAP)
    person = pictures.parts[3:] != PARTS.index("background")
    assert float(((hard > 0.5) == person).float().mean()) > 0.8 and bool(((soft > 0.5).float() == hard).all())
    pipe = SegmentationPipeline.from_pipe(load_portraits().pipeline())
    tap = {"addresses": PLACES.split(), "timestep": 50, "seeds": [0, 1]}
    ours = pipe.segment(pictures.images[:1], None, pictures.images[3:], points=CLICKS, **tap)
    assert float((ours.float() == hard).float().mean()) > 0.999
    with pytest.raises(VitrineError, match="one or the other"):
        pipe.segment(pictures.images[:2], None, pictures.images[3:], points=CLICKS, **tap)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"points": ""}, "two numbers"),
        ({"points": "0.5 0.5"}, "one of each"),
        ({"points": "not 0.5 0.5"}, "one of each"),
    ],
)
def test_bad_clicks_are_refused_with_a_remedy(comfy, parts, pictures, change, word):
    asked = {"examples": image(pictures, [0]), "images": image(pictures, [1]), "hidden": 0, "points": CLICKS}
    with pytest.raises(VitrineError, match=word):
        comfy.call("VitrineSegmentLikeThis", **parts, **(asked | TAP | change))


def test_points_are_of_the_first_of_several_pictures(comfy, parts, pictures):
    clicks = {"images": image(pictures, [3]), "hidden": 0, "points": CLICKS}
    match = {"target": image(pictures, [1]), "points": "0.5 0.4", "softness": 0.0}
    for node, name, told in (("SegmentLikeThis", "examples", clicks), ("FindCorrespondence", "source", match)):
        one, four = (
            comfy.call(f"Vitrine{node}", **parts, **told, **TAP, **{name: image(pictures, which)})[1]
            for which in ([0], [0, 1, 2, 3])
        )
        assert torch.allclose(one, four, atol=1e-5)


def test_the_map_of_a_click(comfy):
    from vitrine.nodes.comfy import similarity
    from vitrine.nodes.comfy.panel_state import NodeKey

    def found(node):
        return similarity.STATES.find(NodeKey("", "", node))

    features = torch.randn(8, 6, 10, generator=torch.Generator().manual_seed(0))
    for number in range(similarity.NODES + 1):
        similarity.remember(SimpleNamespace(unique_id=f"map-{number}", extra_pnginfo=None), features)
    assert found("map-0") is None, "the one that ran longest ago is forgotten"
    shown = similarity.similarity_map(found("map-4"), 0.95, 0.25)
    levels = torch.frombuffer(bytearray(base64.b64decode(shown["values"])), dtype=torch.uint8).view(6, 10)
    assert (shown["width"], shown["height"]) == (10, 6) and int(levels.argmax()) == 1 * 10 + 9
    assert shown["high"] == pytest.approx(1, abs=1e-3) and int(levels.min()) == 0
    similarity.remember(SimpleNamespace(unique_id="wide", extra_pnginfo=None), torch.randn(4, 128, 256))
    assert similarity.similarity_map(found("wide"), 0, 0)["width"] == similarity.SIDE


def test_gdfs_protocol_is_the_pipelines(comfy, parts, pictures):
    """Square pictures of the model's own size, which the protocol then leaves as they are."""
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, skip_prk_steps=True
    )
    stock, tap = load_portraits().pipeline(), {"addresses": PLACES.split(), "timestep": 50, "seeds": [3]}
    stock.scheduler, tap["protocol"] = scheduler, "gdf"
    told = TAP | {"seed": 3, "ensemble": 1, "protocol": "gdf"}
    node, *_ = comfy.call("VitrineActivationTap", image=image(pictures, [0, 1]), dtype="float32", **parts, **told)
    ours = ActivationTapPipeline.from_pipe(stock).tap(pictures.images[:2], output_type="none", **tap).activations
    assert node.info.timestep == ours.info.timestep == 51
    for address in PLACES.split():
        assert float((node[address].tensor - ours[address].tensor).abs().max()) < 1e-4
    plain, *_ = comfy.call(
        "VitrineActivationTap",
        image=image(pictures, [0, 1]),
        dtype="float32",
        **parts,
        **told | {"protocol": "vitrine"},
    )
    assert float((plain[PLACES.split()[0]].tensor - ours[PLACES.split()[0]].tensor).abs().max()) > 0.01
    points = pictures.keypoints[0, :3]
    lines, _ = comfy.call(
        "VitrineFindCorrespondence",
        **parts,
        **told,
        source=image(pictures, [0]),
        target=image(pictures, [1, 2]),
        points="\n".join(f"{x} {y}" for x, y in points.tolist()),
        softness=0.02,
    )
    matches = CorrespondencePipeline.from_pipe(stock).match(pictures.images[:1], pictures.images[1:3], points, **tap)
    rows = torch.tensor([[float(v) for v in line.split()[:3]] for line in lines.splitlines()])
    assert torch.allclose(
        rows, torch.cat([torch.cat([m.points, m.similarity[:, None]], 1) for m in matches]), atol=1e-3
    )
    masks = (pictures.parts == PARTS.index("background")).long()
    drawn, _ = comfy.call(
        "VitrineSegmentLikeThis",
        **parts,
        **told,
        examples=image(pictures, [0, 1]),
        masks=masks[:2].float(),
        images=image(pictures, [4, 5]),
        hidden=0,
    )
    labels = SegmentationPipeline.from_pipe(stock).segment(pictures.images[:2], masks[:2], pictures.images[4:], **tap)
    assert float((drawn != labels).float().mean()) < 0.002


def test_what_gdfs_protocol_has_not_is_refused(comfy, parts, pictures):
    told = TAP | {"dtype": "float32", "protocol": "gdf", "ensemble": 1}
    for change, word in (
        ({"ensemble": 2}, "one under protocol"),
        ({"timestep": 0.0}, "1 .. 998"),
        ({"timestep": 999.0}, "1 .. 998"),
        ({"image": image(pictures, [0])[:, :32]}, "square"),
    ):
        with pytest.raises(VitrineError, match=word):
            comfy.call("VitrineActivationTap", **parts, **({"image": image(pictures, [0])} | told | change))


def test_published_timesteps_are_the_schedulers_own():
    from vitrine.engine.activations.gdf_protocol import gdf_timestep, published_timestep

    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    published = (
        PNDMScheduler(**schedule, skip_prk_steps=True),
        EulerDiscreteScheduler(**schedule, timestep_spacing="leading"),
    )
    for t in range(1, 999, 7):
        for xl, scheduler in enumerate(published):
            assert published_timestep(t, bool(xl)) == gdf_timestep(scheduler, t), (t, xl)
