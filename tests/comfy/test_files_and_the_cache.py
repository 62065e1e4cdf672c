"""A node that reads a file of the user's runs again when that file has changed: found by watching every node."""

import os
import sys
from pathlib import Path

import pytest
import torch
from vitrine.engine.w2w import materialise, sample, write_lora
from vitrine_tests.comfy.guided_graphs import NEURONS
from vitrine_tests.comfy.opened import watching

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux which files are opened")
PROMPT = "a smiling dark face with curly blond hair on pink"
CAPTIONS = "a smiling face\na pale face\na dark face on pink\nlong hair"
PLACE = "up-level1-repeat0-vit-block0-cross-q"
OWN_STATE = {"VitrineNEMOCopyCheck", "VitrineLoRAReport", "VitrineW2WInvert", "VitrineEMDDistill"}
"""Nodes that read back what an earlier run of their own wrote, to resume it; what they read of the user's is below."""


class Desk:
    """The portraits model, files of a user's, and each node's call: node id -> what came out."""

    def __init__(self, comfy, folder):
        import folder_paths

        self.comfy, self.calls = comfy, {}
        for kind in ("loras", "w2w", "vitrine_control", "checkpoints", "vitrine_w2w"):
            folder_paths.add_model_folder_path(kind, str(folder / kind), is_default=True)
            (folder / kind).mkdir(exist_ok=True)
        self.root = Path(os.path.commonpath([folder, folder_paths.get_output_directory()]))
        self.model, self.clip, self.vae = comfy.call("VitrineLoadPortraits")
        with torch.inference_mode():
            self.positive, self.empty = (
                self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text)) for text in (PROMPT, "")
            )
        self.latent = {"samples": torch.zeros(1, 4, 16, 16)}
        self._files(folder)
        folder_paths.filename_list_cache.clear()

    def _files(self, folder):
        from shutil import copy

        from vitrine.engine.portraits.shipped import PEOPLE_SPACE, STUDENT_FOLDER, TRANSFORMERS
        from vitrine.engine.w2w import load_space

        space = load_space(PEOPLE_SPACE)
        for i, row in enumerate(sample(space, range(4))):
            write_lora(folder / "loras" / "people" / f"p{i}.safetensors", materialise(space, row), "kohya")
        copy(PEOPLE_SPACE, folder / "w2w" / "mine.w2w.safetensors")
        (student,) = STUDENT_FOLDER.rglob("vitrine-portraits-emd-student.safetensors")
        copy(student, folder / "loras" / "student.safetensors")
        copy(TRANSFORMERS / "power-cosine" / "control.safetensors", folder / "vitrine_control" / "mine.safetensors")
        copy(student, folder / "checkpoints" / "mine.safetensors")

    def call(self, node_id, **inputs):
        """Run a node with the page's defaults for what is not given, watched."""
        node = self.comfy.nodes.NODE_CLASS_MAPPINGS[node_id]
        given = {}
        for i in node.define_schema().inputs:
            default, options = getattr(i, "default", None), getattr(i, "options", None)
            if not i.optional and (default is not None or options):
                first = getattr(options[0], "key", options[0]) if options else None  # of a choice with inputs below
                given[i.id] = first if default is None else default
        told = given | inputs
        with watching(self.root) as seen:
            out = self.comfy.call(node_id, **told)
        self.calls[node_id] = (told, seen.files)
        return out

    def one(self, node_id, **inputs):
        return self.call(node_id, **inputs)[0]

    # --- every node ---
    def activations(self):
        pictures, _, masks = self.call("VitrineRenderPortrait", seed=3, count=4, size=64, part="shirt")
        own = {"model": self.model, "vae": self.vae, "positive": self.positive}
        tap = {"selection": "layers below", "layers": PLACE, "timestep": 50.0, "ensemble": 1}
        taps = self.one("VitrineActivationTap", image=pictures, **own, **tap)
        watched, recorder = self.call("VitrineTapDuringSampling", model=self.model, layers=PLACE, record_steps="all")
        sampled = self.sampled(watched)
        self.call("VitrineCollectTaps", recorder=recorder, latent=sampled)
        self.call("VitrineActivationPicture", activations=taps)
        words = {"word": PROMPT.split()[-1], "prompt": PROMPT}
        self.call("VitrineWordMap", image=pictures, clip=self.clip, **words, **own)
        self.call("VitrineSaveActivations", activations=taps, name="mine")
        self.call("VitrineLoadActivations", file="mine.safetensors")
        self.call("VitrineFindCorrespondence", source=pictures[:1], target=pictures[1:], points="0.4 0.4", **own, **tap)
        self.call("VitrineSegmentLikeThis", examples=pictures, masks=masks, images=pictures, **own, **tap)
        told = {"layers": "up-level1-repeat0-vit-block0-cross-*", "most": 2, "noise": 0.0, "granularity": 0.0}
        preset = self.one("VitrineRankActivations", images=pictures, masks=masks, **own, **told)
        self.call("VitrineSaveFeaturePreset", preset=preset, name="mine")
        self.call("VitrineLoadFeaturePreset", file="mine.json", model=self.model)
        return pictures, masks

    def sampled(self, model):
        node = self.comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]()
        with torch.inference_mode():
            told = (5, 2, 2.0, "euler", "normal", self.positive, self.empty, self.latent, 1.0)
            return node.sample(model, *told)[0]

    def nemo(self, pictures):
        texts = {"model": self.model, "clip": self.clip, "prompts": CAPTIONS}
        probe = {"seeds": 2, "timestep_index": 4, "latent": self.latent}
        prompt = {"model": self.model, "positive": self.positive, **probe}
        calibration = self.one("VitrineNEMOCalibrate", measure="statistics", **texts, **probe)
        self.call("VitrineNEMODetect", method="one step", negative=self.empty, **prompt)
        found = {"calibration": calibration, "effect_fraction": 0.9, "mode": "fast", "scope": "down+mid"}
        self.call("VitrineNEMOFindNeurons", **found, **prompt)
        compared = {"before": pictures, "after": pictures, "training_picture": pictures[:1], "ordinary": pictures}
        self.call("VitrineNEMOCompareCopies", **compared)
        self.call("VitrineNEMOVerify", neurons=NEURONS, tau=0.3, attack_steps=0, **prompt)
        self.call("VitrineNEMONeuronBlocker", model=self.model, neurons=NEURONS)
        self.call("VitrineNEMOBake", model=self.model, neurons=NEURONS)
        self.call("VitrineSaveNeurons", neurons=NEURONS, name="mine")
        self.call("VitrineLoadNeurons", file="mine.json")
        self.call("VitrineActivePatches", model=self.model)

    def people(self, pictures):
        self.call("VitrineBuildW2WSpace", folder="people", name="built", mode="factors")
        space = self.one("VitrineLoadW2WSpace", space_file="mine.w2w.safetensors", components=8)
        self.call("VitrineTrainW2WDirection", space=space, label="mine", labels="*1 1\n*2 0", components=2)
        person = self.one("VitrineW2WSample", space=space, seed=3)
        self.call("VitrineW2WEdit", space=space, w2w_model=person, label_1="beard")
        before, own = {"before": pictures, "after": pictures}, {"model": self.model, "vae": self.vae}
        self.call("VitrineTrainW2WSlider", space=space, positive=self.positive, steps=1, **before, **own)
        self.call("VitrineW2WBlend", space=space, w2w_model=person, other=person)
        self.call("VitrineApplyW2WModel", model=self.model, space=space, w2w_model=person)
        self.call("VitrineSaveW2WLora", space=space, w2w_model=person, name="mine")
        self.call("VitrineLoadW2WModel", file="mine.w2wmodel.safetensors")

    def students(self, pictures):
        own = {"student": "student.safetensors", "model": self.model, "positive": self.positive}
        self.call("VitrineEMDOneStepGenerator", latent=self.latent, **own)
        self.call("VitrineEMDVariety", images=pictures)

    def control(self):
        model, _ = self.call("VitrineLoadPortraitsTransformer", weight="power-cosine")[:2]
        told = self.one("VitrineLoadControl", model=model, file="mine.safetensors")
        sizes = {"width": 24, "height": 32}
        positive = self.one("VitrineControlValues", conditioning=self.positive, **sizes)
        self.call("VitrineControlCFGGuider", model=told, positive=positive, negative=self.empty)
        run = {"seed": 3, "steps": 1, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
        told = {"model": told, "positive": positive, "negative": self.empty, "latent_image": self.latent}
        self.call("VitrineControlConditionedSampler", **told, **run)
        size = {"target_width": 128, "target_height": 128, "metadata_from": "mine.safetensors", "override": True}
        self.call("VitrineResolutionTransferLoader", model=self.model, **size)


@pytest.fixture(scope="module")
def desk(comfy, tmp_path_factory):
    import folder_paths

    before = {kind: (list(paths), endings) for kind, (paths, endings) in folder_paths.folder_names_and_paths.items()}
    yield Desk(comfy, tmp_path_factory.mktemp("desk"))
    folder_paths.folder_names_and_paths.update(before)
    folder_paths.filename_list_cache.clear()


READS = {
    "VitrineLoadActivations",
    "VitrineLoadFeaturePreset",
    "VitrineLoadNeurons",
    "VitrineBuildW2WSpace",
    "VitrineLoadW2WSpace",
    "VitrineLoadW2WModel",
    "VitrineEMDOneStepGenerator",
    "VitrineLoadControl",
    "VitrineResolutionTransferLoader",
}


def test_every_node_that_reads_a_file_looks_whether_it_changed(desk, comfy):
    pictures, _ = desk.activations()
    desk.nemo(pictures)
    desk.people(pictures)
    desk.students(pictures)
    desk.control()
    ours = {k for k in comfy.nodes.NODE_CLASS_MAPPINGS if k.startswith("Vitrine")}
    left = {"VitrineLoadPortraits", "VitrineApplyGammaSchedule", "VitrineNoisyReplicatePadding"}
    assert ours - set(desk.calls) <= left | OWN_STATE, "a new node needs a call above"
    reading = {node_id: files for node_id, (_, files) in desk.calls.items() if files}
    assert reading.keys() >= READS - {"VitrineBuildW2WSpace"}, "the watch sees nothing"
    for node_id, files in reading.items():
        node, told = comfy.nodes.NODE_CLASS_MAPPINGS[node_id], desk.calls[node_id][0]
        assert "fingerprint_inputs" in vars(node), f"{node_id} reads {sorted(p.name for p in files)}"
        if node_id == "VitrineBuildW2WSpace":  # it resumes, too
            files = [p for p in files if "people" in p.parts]
        for file in files:
            before = node.fingerprint_inputs(**told)
            assert node.fingerprint_inputs(**told) == before
            os.utime(file, ns=(file.stat().st_mtime_ns + 1_000_000,) * 2)
            assert node.fingerprint_inputs(**told) != before, f"{node_id} does not see a change of {file.name}"


def test_another_lora_in_the_folder_is_seen(desk, comfy):
    from shutil import copy

    import folder_paths

    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineBuildW2WSpace"]
    before = node.fingerprint_inputs(folder="people", name="x")
    file = Path(folder_paths.get_folder_paths("loras")[0]) / "people" / "p0.safetensors"
    copy(file, file.with_name("p9.safetensors"))
    assert node.fingerprint_inputs(folder="people", name="x") != before


def test_another_lora_to_compare_with_is_seen(desk, comfy):
    """A report named no duplicate that came since; the LoRA that it is of counts in any case."""
    import folder_paths

    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineLoRAReport"]
    before, alone = (node.fingerprint_inputs(lora="people/p0.safetensors", compare=on) for on in (True, False))
    first = Path(folder_paths.get_full_path("loras", "people/p0.safetensors"))
    (first.parent / "copied.safetensors").write_bytes(first.read_bytes())
    after, still = (node.fingerprint_inputs(lora="people/p0.safetensors", compare=on) for on in (True, False))
    assert after != before and still == alone
    (first.parent / "copied.safetensors").unlink()
    os.utime(first, ns=(first.stat().st_mtime_ns + 1_000_000,) * 2)
    assert node.fingerprint_inputs(lora="people/p0.safetensors", compare=False) != alone


def test_a_lora_that_a_linked_space_reads_is_seen(desk, comfy):
    """Load LoRA Space (W2W) came from the cache, and its models from a file that was another one by then."""
    import folder_paths
    from vitrine.engine.w2w import BuildConfig, build_space

    loras = Path(folder_paths.get_full_path("loras", "people/p0.safetensors")).parent
    build_space(loras, BuildConfig("delta", linked=True)).space.save(loras.parents[1] / "w2w" / "ours.w2w.safetensors")
    folder_paths.filename_list_cache.clear()
    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineLoadW2WSpace"]
    before = node.fingerprint_inputs(space_file="ours.w2w.safetensors")
    os.utime(loras / "p0.safetensors", ns=(1, 1))
    assert node.fingerprint_inputs(space_file="ours.w2w.safetensors") != before
