"""What finds a node in the page's search, beside its name: what an artist types who wants what it does.

The page (fuse.js) compares every typed word with one text at a time, and sees its first thirty letters: words that
stand in two texts never meet, in long ones they are not seen. So each text here is short, and has the words together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io

SEARCHES: dict[str, str] = {
    "VitrineActivationTap": (
        "features, diffusion features, hooks, hidden states, GDF, DIFT, attention, attention map, heatmap, "
        "visualize, visualise, interpret, x-ray, xray, visualize activations, see what the model sees, look "
        "inside, what the model sees, feature map, layer viewer, inspect layers, unet features, model internals, "
        "attention layers, explain picture, saliency map"
    ),
    "VitrineTapDuringSampling": (
        "record activations, activations while sampling, hooks, h-space, see what the model sees, attention map, "
        "heatmap, watch the sampler, live preview of layers, layers while sampling, watch layers, layer preview, "
        "inspect sampling"
    ),
    "VitrineCollectTaps": (
        "recorded activations, read taps, collect activations, layers of a run, features after sampling"
    ),
    "VitrineActivationPicture": (
        "PCA, show activation, feature picture, heatmap, visualize features, attention heatmap, what the model "
        "sees, feature map picture, layer to image, activation to image, pca picture"
    ),
    "VitrineSaveActivations": ("export activations, store features, save features, save layers, export features"),
    "VitrineLoadActivations": ("import activations, load features, load layers, import features"),
    "VitrineWordMap": (
        "what the model sees for one word, what the model sees, attention map, cross attention, DAAM, word "
        "heatmap, heatmap, prompt attention, which word does what, prompt heatmap, word attention, token heatmap, "
        "token attention, attention map word, cross attention map, where is the word, prompt attention map, mask "
        "by word, text to mask"
    ),
    "VitrineFindCorrespondence": (
        "correspondence, point matching, DIFT, semantic correspondence, keypoints, find the same part, landmarks, "
        "point transfer, track points, same point in another picture, match pictures, pose landmarks, click a "
        "point, match points, same point, track face points, points on faces, eye to eye, match faces, find "
        "points"
    ),
    "VitrineSegmentLikeThis": (
        "few-shot segmentation, mask propagation, auto mask, label propagation, SAM, object mask, remove "
        "background, segment anything, select object, click to mask, mask by click, click mask, mask by example, "
        "point to mask, segment by click, mask from points, cut out object, copy mask, transfer mask"
    ),
    "VitrineRankActivations": (
        "rank activations, choose features, feature selection, which layer, GDF filter, best layers, rank layers, "
        "choose layers, layer search"
    ),
    "VitrineSaveFeaturePreset": ("save feature preset, export preset, save layers, save layer preset"),
    "VitrineLoadFeaturePreset": ("load feature preset, import preset, load layers, load layer preset"),
    "VitrineActivePatches": (
        "what is patched, list loras, inspect model, debug model, model patches, lora info, what is applied, "
        "which loras, show loras, model info, applied loras"
    ),
    "VitrineControlValues": (
        "sdxl size conditioning, micro conditioning, original size crop target, original size, crop, blur, sharp, "
        "blurry, crop sdxl, sdxl crop, sdxl target size, target size, crop coordinates, size embedding"
    ),
    "VitrineApplyGammaSchedule": (
        "gamma schedule, time weighted size conditioning, gamma control, sdxl original size, size schedule, sdxl "
        "schedule, size over time, size weight"
    ),
    "VitrineLoadControl": (
        "control checkpoint, control embedder, flip conditioning, size checkpoint, load size control"
    ),
    "VitrineNoisyReplicatePadding": (
        "noisy replicate padding, text padding, replicate prompt tokens, pad tokens, short prompt, prompt "
        "padding, pad prompt, empty tokens"
    ),
    "VitrineControlCFGGuider": (
        "control guider, dual cfg, size guidance, control guidance strength, size guider, sdxl guider"
    ),
    "VitrineControlConditionedSampler": (
        "berrada, size conditioned sampler, sdxl size sampler, ksampler control, micro conditioning, original "
        "size, sharp, cropped heads, size sampler, sdxl sampler size, crop sampler, no cropped heads"
    ),
    "VitrineResolutionTransferLoader": (
        "high resolution, hires, shift, SNR shift, position embedding, RoPE, twice the size, draw at twice the "
        "size, double heads, two heads, deep shrink, DyPE, YaRN, 2k, 4k, aspect ratio, hires fix, upscale without "
        "doubles, any size, repeated heads, upscale without double heads, no double heads, fix double heads, fix "
        "two heads, duplicate heads, bigger picture, larger picture, higher resolution, high resolution fix, big "
        "resolution, any resolution, wide picture, dilation, second pass, hires without clones, upscale model "
        "size"
    ),
    "VitrineLoadW2WSpace": (
        "weights2weights, model space, w2w, identity space, LoRA space, load space, load sliders, lora space "
        "file, people space"
    ),
    "VitrineW2WSample": (
        "weights2weights, new identity, random person, random LoRA, new character, random face, new face, new "
        "person, invent person, person generator, character generator, random character"
    ),
    "VitrineW2WEdit": (
        "weights2weights, slider, attribute, edit identity, concept slider, pull sliders, lora slider, age, "
        "beard, face edit, change face, edit person, consistent character, age slider, face slider, face sliders, "
        "attribute slider, person slider, character slider, identity slider, smile slider, smile, gender slider, "
        "hair slider, beard slider, glasses slider, expression slider, same character, same person, same face "
        "edit, edit same character, face map, edit character"
    ),
    "VitrineW2WBlend": (
        "weights2weights, interpolate, mix identities, merge people, mix lora, face morph, morph faces, mix "
        "faces, blend faces, blend people, average face, lora mixer, mix loras, blend loras, merge loras, child "
        "of two"
    ),
    "VitrineApplyW2WModel": (
        "weights2weights, apply identity, delayed injection, load person, apply person, person to model, use character"
    ),
    "VitrineSaveW2WLora": (
        "weights2weights, export LoRA, save identity, save person, merge lora, lora slider export, person to "
        "lora, save slider lora, export lora, export slider, save character"
    ),
    "VitrineLoadW2WModel": (
        "weights2weights, load identity, load person, encode LoRA, my LoRA, member, load character, lora to "
        "person, face from lora"
    ),
    "VitrineBuildW2WSpace": (
        "weights2weights, PCA of LoRAs, LoRA folder, model space, merge lora, mix lora, combine loras, folder of "
        "loras, loras into sliders, lora mixer, lora folder sliders, sliders from loras, combine lora folder, "
        "lora pca, lora library, train from loras"
    ),
    "VitrineTrainW2WDirection": (
        "weights2weights, attribute direction, linear classifier, make slider, lora slider, concept slider, train "
        "slider, age, own slider, slider from labels, train attribute, new slider, label loras, make attribute "
        "slider"
    ),
    "VitrineTrainW2WSlider": (
        "weights2weights, own slider, make slider, slider from pictures, make a slider from pictures, before and "
        "after, concept slider, image pair slider, train slider, lora slider, slider trainer, train a slider, "
        "slider from photos, edit from pictures, new slider"
    ),
    "VitrineW2WInvert": (
        "weights2weights, invert, personalise, one image, face to model, dreambooth, face swap, one image "
        "character, consistent character, face from photo, likeness, same character, same face, photo to lora, "
        "face photo to lora, face to lora, image to lora, one photo lora, person from photo, clone face, "
        "reference face, face from picture, single image lora"
    ),
    "VitrineNEMOCalibrate": (
        "memorization, neuron statistics, calibrate nemo, calibrate threshold, calibrate detection, tau, "
        "memorization threshold, usual distance, copy threshold, calibrate copies"
    ),
    "VitrineNEMODetect": (
        "is this prompt memorized, did my lora copy, overfitting, copyright, memorization score, training data "
        "replication, plagiarism, duplicate, is it copied, memorized prompt, prompt copies picture, detect "
        "memorization, detect copies, is it memorized"
    ),
    "VitrineNEMOFindNeurons": (
        "localize memorization, find memorization neurons, nemo, memorized picture, copied picture, find neurons, "
        "stop copying, training picture, memorized neurons, neurons of a prompt, neuron search, copy neurons, "
        "localize picture"
    ),
    "VitrineNEMONeuronBlocker": (
        "block neurons, unlearn, anti memorization, nemo, stop copying, stop the model copying a picture, forget, "
        "erase, concept erasure, copyright, remove memorized picture, blocked neuron, turn off neurons, disable "
        "neurons, stop memorization, remove training image, anti copy, block picture, mute neurons, prevent "
        "copying"
    ),
    "VitrineNEMOBake": (
        "prune neurons, save unlearned model, forget for good, erase from model, concept erasure, remove neurons, "
        "prune model, save clean model, unlearn picture"
    ),
    "VitrineSaveNeurons": ("export neurons, save neurons, store neurons"),
    "VitrineLoadNeurons": ("import neurons, load neurons, neurons file"),
    "VitrineNEMOVerify": (
        "check blocking, adversarial embedding, dori, does it hold, verify unlearning, test blocking, attack "
        "test, is it gone"
    ),
    "VitrineNEMOCompareCopies": (
        "before and after, did it help, still a copy, verdict, compare copies, nemo, compare before after, copy "
        "or not, same picture check, before after copies"
    ),
    "VitrineNEMOCopyCheck": (
        "memorization, does my LoRA copy, overfitting, training data replication, nemo, copyright, duplicate, "
        "plagiarism, overtrained LoRA, copied training pictures, check lora, duplicate pictures, check copies, "
        "copy detection, copied images, image copies, memorization check, overfit check"
    ),
    "VitrineLoRAReport": (
        "is my lora overfitted, overtrained lora, lora info, inspect lora, lora metadata, trigger words, does my "
        "lora copy, lora strength, duplicate lora, check lora, test lora, lora quality, lora check, lora overfit, "
        "overfit lora, lora analysis, analyse lora, analyze lora, lora report, compare loras, lora doctor, lora "
        "keys missing"
    ),
    "VitrineEMDOneStepGenerator": (
        "one step, EM distillation, DMD2, turbo, LCM, distilled, fast, speed up, SiD, draw in one step, "
        "lightning, hyper, schnell, sd turbo, 4 steps, few steps, speed, faster, lightning lora, lcm lora, hyper "
        "lora, turbo lora, dmd2 lora, one step sampler, 1 step, fast sampler, lightning sampler, turbo sampler, "
        "lcm sampler, 8 steps, 2 steps, instant picture, realtime preview"
    ),
    "VitrineEMDDistill": (
        "train, distillation, EM distillation, one step, Diff-Instruct, LoRA training, train turbo, make a model "
        "fast, distill my model, train lightning, make turbo, distillation lora, train one step, train lcm, fast "
        "lora"
    ),
    "VitrineEMDVariety": (
        "diversity, Vendi score, recall, mode collapse, same face, seeds, all look the same, same face every "
        "seed, measure diversity, seed variety, same picture every seed, variety of seeds"
    ),
    "VitrineLoadPortraits": (
        "portraits, demo model, tiny model, vitrine loader, demo, try without a checkpoint, example model, test "
        "model, face model"
    ),
    "VitrineLoadPortraitsTransformer": (
        "portraits pixart, portraits dit, size conditioned demo model, demo transformer, tiny transformer, example dit"
    ),
    "VitrineRenderPortrait": (
        "portrait picture, demo image, vitrine render, demo picture, test face, example face, cartoon face"
    ),
}
"""Node -> texts, separated by commas: words of the field and of other programs, and words that must meet in one."""


def searchable(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """The node class, whose schema has its texts of :data:`SEARCHES`."""
    define: Callable[..., io.Schema] = node.define_schema.__func__  # type: ignore[attr-defined]

    @functools.wraps(define)
    def with_searches(cls: Any) -> io.Schema:
        schema = define(cls)
        schema.search_aliases = SEARCHES[schema.node_id].split(", ")
        return schema

    node.define_schema = classmethod(with_searches)  # type: ignore[assignment]
    return node
