"""``vitrine verify`` end to end on both embedded models in the role of a checkpoint, killed, resumed, and refused."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor
from vitrine.cli.main import main
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.models import WEIGHTS
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.verify.context import Asked, Context, sha256_of
from vitrine.evidence.verify.embedded import SETTINGS, WORLDS, write_data
from vitrine.evidence.verify.protocol import all_checks
from vitrine.evidence.verify.run import verify
from vitrine.evidence.verify.settings import FILE, VerifySettings, read_settings
from vitrine_tests.killed import killed, killing


def quick(name, **changes):
    """A world's settings with fewer steps and seeds."""
    settings = SETTINGS[name]
    small = {
        "search": replace(settings.search, effect_fraction=0.8, mode="fast"),
        "probe": replace(settings.probe, seeds=4),
        "detect": replace(settings.detect, seeds=4),
        "seeds": 2,
        "usual": 4,
        "steps": 8,
        "inversion": replace(
            settings.inversion, invert=replace(settings.inversion.invert, steps=8, check_every=4), pictures=1, steps=4
        ),
    }
    return replace(settings, **small | changes)


def small_data(name, folder, **changes):
    """A world's data with fewer captions for statistics and threshold, and settings for the impatient."""
    write_data(name, folder)
    captions = folder / "captions.csv"
    captions.write_text("\n".join(captions.read_text().splitlines()[:61]))
    (folder / FILE).write_text(json.dumps(quick(name, **changes).to_dict()))
    return folder


@pytest.fixture(scope="module", params=["flow", "portraits"])
def world(request, tmp_path_factory):
    """(name, folder of its data)."""
    return request.param, small_data(request.param, tmp_path_factory.mktemp(request.param) / "data")


@pytest.fixture(scope="module")
def portraits_data(tmp_path_factory):
    """Its data, with as little to do as possible."""
    return small_data("portraits", tmp_path_factory.mktemp("portraits") / "data", steps=3)


def report(out):
    """verify.json by claim, and the figures of each by key."""
    told = json.loads((out / "verify.json").read_text())
    return told, {c["claim"]: {f["key"]: f for f in c["figures"]} for c in told["claims"]}


@pytest.mark.nightly
def test_end_to_end(world, tmp_path, capsys):
    name, data = world
    out = tmp_path / "out"
    assert main(["verify", "--model", name, "--data", str(data), "--subset", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    told, figures = report(out)
    status = {c["claim"]: c["status"] for c in told["claims"]}
    measured = {claim for claim, state in status.items() if state == "measured"}
    own = {"gdf.spair", "w2w.inversion"} if name == "portraits" else {"ditf.spair"}
    assert measured >= {"nemo.detection", "nemo.blocking", *own}
    assert all("not for this model" in status[claim] for claim in {"gdf.spair", "ditf.spair"} - own)

    area = figures["nemo.detection"]["nemo.auroc"]
    assert area["published"]["value"] == 0.98 and area["measured"]["value"] > 0.9 and area["measured"]["n"] == 6
    copies = {n: figures["nemo.blocking"][f"blocking.pixels.copies.{n}"]["measured"] for n in ("untouched", "random")}
    blocked = figures["nemo.blocking"]["blocking.pixels.copies.blocked"]["measured"]
    assert blocked["value"] < copies["untouched"]["value"] and copies["random"]["value"] > 0.7
    assert figures["nemo.blocking"]["blocking.sscd.orig.blocked"]["why not"] == "needs --sscd"

    folder = WORLDS[name]
    assert told["model"]["sha256"] == {
        f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in told["model"]["sha256"]
    }
    assert len(told["model"]["sha256"]) >= 3
    differs = " ".join(next(c for c in told["claims"] if c["claim"] == "nemo.blocking")["differs"])
    assert all(words in differs for words in ("role", "float32", "published 0.428", "guidance is"))
    page = (out / "verify.html").read_text()
    assert all(words in page for words in ("What differs", "0.876", "not run here", told["model"]["name"], "licence"))
    plan = json.loads((out / "plan.json").read_text())
    estimates = {c["claim"]: c["estimate"] for c in plan["claims"]}
    assert all(estimates[c]["seconds"] > 0 and estimates[c]["rows"] > 0 and estimates[c]["bytes"] > 0 for c in measured)
    assert printed.index("    about ") < printed.index(": measured "), "the plan comes first"


def stopping(label, step):
    """Bars of which one kills the process."""

    def bar(name):
        return killing(lambda done, total: name == label and done >= step)

    return bar


@pytest.mark.nightly
def test_killed_and_resumed_gives_the_same_json(portraits_data, tmp_path):
    claims = ("nemo.detection", "nemo.blocking", "gdf.spair")

    def job(out, bar):
        return lambda: verify(Asked("portraits", portraits_data, subset=3, out=tmp_path / out), claims, bar=bar)

    assert job("whole", lambda label: silent)() == 0
    for label, step in (("samples, blocked", 2), ("pairs, published places", 2)):
        killed(job("stopped", stopping(label, step)))
    seen = []

    def watching(label):
        return lambda done, total, preview=None: seen.append((label, done))

    assert job("stopped", watching)() == 0
    assert not {label for label, _ in seen} & {"nemo.detection", "search", "samples, untouched"}, "done before the kill"
    assert [done for label, done in seen if label == "pairs, published places"] == [1, 2, 3]
    assert (tmp_path / "stopped/verify.json").read_bytes() == (tmp_path / "whole/verify.json").read_bytes()
    killed(job("scored", stopping("nemo.detection", 2)))
    assert job("scored", lambda label: silent)() == 0
    assert (tmp_path / "scored/verify.json").read_bytes() == (tmp_path / "whole/verify.json").read_bytes()


@pytest.mark.nightly
def test_sscd_and_clip_stand_beside_the_published_figures(portraits_data, tmp_path):
    """A TorchScript file and a CLIP folder of the user's; descriptors of other files are not taken for theirs."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 8, 8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4))
    sscd, clip = tmp_path / "sscd.torchscript.pt", tmp_path / "clip"
    torch.jit.script(torch.nn.Sequential(net, torch.nn.Flatten())).save(str(sscd))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"projection_dim": 8}
    tokenizer = load_portraits().tokenizer
    text = sizes | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 24}
    vision = sizes | {"image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(clip)
    CLIPProcessor(CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32), tokenizer).save_pretrained(clip)
    asked = Asked("portraits", portraits_data, sscd, clip, subset=2, out=tmp_path / "out")
    assert verify(asked, ["nemo.blocking"], bar=lambda label: silent) == 0
    figures = report(asked.out)[1]["nemo.blocking"]
    beside = [f for f in figures.values() if f["published"]]
    assert len(beside) == 8 and all(f["measured"] and not f["why not"] for f in beside)
    similar = {n: figures[f"blocking.sscd.orig.{n}"]["measured"]["value"] for n in ("untouched", "blocked")}
    assert -1 <= similar["blocked"] < similar["untouched"] <= 1.0001
    assert figures["blocking.sscd.gen.random"]["published"]["value"] == 0.999


@pytest.mark.nightly
def test_missing_data_is_named_and_nothing_is_measured(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["verify", "--model", str(WEIGHTS), "--claim", "nemo.*", "gdf.spair", "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    for words in (
        "memorized_laion_prompts.csv",
        "localizing_memorization_in_diffusion_models",
        "MIT",
        "SPair-71k",
        "statistics_additional_laion_prompts_v1_4.pt",
    ):
        assert words in printed and words in (out / "verify.html").read_text()
    told, figures = report(out)
    assert all(c["status"].startswith("needs ") for c in told["claims"])
    assert all(f["measured"] is None and f["why not"] for table in figures.values() for f in table.values())
    plan = json.loads((out / "plan.json").read_text())["claims"]
    assert {c["claim"]: c["estimate"]["rows"] for c in plan}["nemo.detection"] == 10_000, "as many as published"


def test_a_dry_run_stops_after_the_plan(portraits_data, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["verify", "--model", "portraits", "--data", str(portraits_data), "--out", str(out), "--dry"]
    assert main([*command, "--claim", "nemo.blocking"]) == 0
    printed = capsys.readouterr().out
    assert "about" in printed and "of other models and photographs" in printed
    told, figures = report(out)
    assert [c["status"] for c in told["claims"]] == ["planned"] and told["model"]["shipped"]
    beside = [f for f in figures["nemo.blocking"].values() if f["published"]]
    assert beside and not any(f["comparable"] for f in beside)
    page = (out / "verify.html").read_text()
    assert page.count("(not comparable)") == len(beside) and "of other models and photographs" in page
    assert all(f["why not"] == "dry run" for f in figures["nemo.blocking"].values())
    assert {p.name for p in (out / "state").iterdir()} == {"checksums.json"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "CompVis/stable-diffusion-v1-4"], "nothing is downloaded"),
        (["--model", "portraits", "--config", "some/where"], "--config"),
        (["--model", "portraits", "--claim", "nemo.detecton"], "Did you mean nemo.detection"),
        (["--model", "portraits", "--subset", "1"], "2 or more"),
        (["--model", "portraits", "--data", "no-such-folder"], "the plan (--dry)"),
        (["--model", "portraits", "--sscd", "no-such.pt", "--claim", "nemo.blocking"], "--sscd"),
    ],
)
def test_refusals(words, says, tmp_path, capsys):
    assert main(["verify", *words, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_a_single_file_without_its_configuration_says_so(tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    shutil.copy(WEIGHTS / "unet" / "diffusion_pytorch_model.safetensors", file)
    assert main(["verify", "--model", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "--config" in capsys.readouterr().err


def test_a_subset_is_part_of_every_larger_one(tmp_path):
    small, large = (Context(Asked(str(WEIGHTS), subset=n, out=tmp_path)) for n in (5, 20))
    assert set(small.chosen(100)) < set(large.chosen(100)) and small.chosen(100) == sorted(small.chosen(100))
    assert small.chosen(3) == [0, 1, 2] and len(large.chosen(100)) == 20


def test_settings(tmp_path):
    path = tmp_path / FILE
    assert read_settings(None).changed() == []
    path.write_text(json.dumps({"steps": 25, "detect": {"seeds": 4}}))
    settings = read_settings(path)
    assert isinstance(settings, VerifySettings) and settings.steps == 25 and settings.guidance == 7
    assert any("steps is 25, by default 50" in line for line in settings.changed())
    assert [line.split()[1] for line in settings.changed("detect")] == ["detect.seeds"]
    assert any("detect.seeds is 4, by default 10" in line for line in settings.changed())


def test_published_figures_have_a_source_and_data_a_licence():
    checks = all_checks()
    figures = [p for c in checks.values() for p in c.published]
    assert len({p.key for p in figures}) == len(figures) and all(p.source and p.model and p.data for p in figures)
    values = {p.key: (p.value, p.spread) for p in figures}
    assert values["nemo.tpr"] == (0.876, None) and values["blocking.sscd.orig.untouched"] == (0.83, 0.16)
    assert values["gdf.bbox"][0] == 51.66
    assert values["ditf.bbox.raw"][0] == 29.9 and values["ditf.bbox.discarded"][0] == 67.1
    assert all(n.what and n.where_published and n.licence for c in checks.values() for n in c.needs)


def test_checksums_of_folders_follow_names_and_contents(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"1")
    before = sha256_of(tmp_path / "a")
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    renamed = sha256_of(tmp_path / "a")
    (tmp_path / "a" / "y").write_bytes(b"2")
    assert len({before, renamed, sha256_of(tmp_path / "a")}) == 3
    assert sha256_of(tmp_path / "a" / "y") == hashlib.sha256(b"2").hexdigest()
