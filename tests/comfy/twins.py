"""What the workflows' pictures must be, made with the pipelines from the settings that stand in the API graphs."""

from dataclasses import replace

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline
from PIL import Image
from torch.nn import functional
from vitrine.engine.activations import tap_steps
from vitrine.engine.activations.correspondence import draw_matches, parse_points
from vitrine.engine.activations.presets import FeaturePreset
from vitrine.engine.activations.tap_during_sampling import DIFFUSERS_GUIDED
from vitrine.engine.copies import CheckConfig
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.emd import EStepConfig
from vitrine.engine.emd.train_config import EMDTrainConfig
from vitrine.engine.nemo import (
    PARTS,
    AttackConfig,
    Copies,
    FewStepConfig,
    NeuronSet,
    ProbeConfig,
    SearchConfig,
    VerifyConfig,
    bake,
    make_probe,
    picture_distance,
    verify,
)
from vitrine.engine.nemo.neuron_effects import heat_map
from vitrine.engine.nemo.noise_similarity import probe_noise
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    CorrespondencePipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    ResolutionTransferPipeline,
    SegmentationPipeline,
    W2WPipeline,
    copy_check,
)
from vitrine.engine.pipelines.emd_training import training_parts
from vitrine.engine.pipelines.nemo_prompts import conditions
from vitrine.engine.portraits import render
from vitrine.engine.portraits.plants import plants
from vitrine.engine.portraits.shipped import PEOPLE_LORAS, student_file
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.settings.ranking_options import FilterRule, RankingConfig
from vitrine.engine.w2w import (
    BuildConfig,
    EditConfig,
    InvertConfig,
    PairConfig,
    SampleConfig,
    W2WModel,
    build_space,
    direction,
    edit,
    usual_sampling,
    with_directions,
    with_pair_slider,
)
from vitrine.engine.w2w.space.labels import parse_labels
from vitrine.evidence.w2w.people import people_space
from vitrine_tests.comfy.twin_tools import (
    colours,
    enlarged,
    euler_sigmas,
    ksampler,
    part_number,
    pipeline,
    portraits,
    prompt_and_seed,
)


# --- activations ---------------------------------------------------------------------------------------------------
def see_what_the_model_sees(graph, comfy):
    tap, during = graph(10), graph(5)
    pipe = pipeline(ActivationTapPipeline)
    plain = pipeline(NEMOPipeline)
    with tap_steps(plain.unet, during.layers, {graph(7).step}, rows=DIFFUSERS_GUIDED) as record:
        pictures = ksampler(graph, 6, plain)
    assert graph(7).step in record
    seeds = list(range(tap.seed, tap.seed + tap.ensemble))
    told = {"addresses": tap.layers.split(), "timestep": tap.timestep, "seeds": seeds, "output_type": "none"}
    taps = pipe.tap(pictures, graph.text(tap.positive), **told).activations
    first, second = (taps[a].tensor for a in tap.layers.split())
    return {9: pictures, 12: colours(first), 13: colours(second, graph(11).size)}


def find_the_same_part(graph, comfy):
    from vitrine.nodes.matching import MASKED, mask_pictures

    rank, find, shirt, new = graph(5), graph(12), graph(3), graph(4)
    known = portraits(shirt)
    pipe = pipeline(SegmentationPipeline)
    rule = FilterRule(rank.noise or None, rank.granularity or None)
    masks = (known.parts == part_number(shirt.part)).long()
    made = pipe.rank(
        known.images,
        masks,
        graph.text(rank.positive),
        config=RankingConfig(rank.layers, rank.timestep, rule, rank.budget or None, rank.most, strips=True),
    )
    strips = {7: made.kept[:24], 8: list(made.dropped)[:24]}
    found = {i: torch.stack([made.strip(a, 64) for a in names]) for i, names in strips.items()}
    source, target = portraits(graph(13)).images, portraits(new).images
    points, seeds = parse_points(find.points, 64, 64), list(range(find.seed, find.seed + find.ensemble))
    matches = pipeline(CorrespondencePipeline).match(
        source,
        target,
        points,
        graph.text(find.positive),
        temperature=find.softness,
        addresses=list(made.chosen),
        timestep=find.timestep,
        seeds=seeds,
    )
    nhwc = source[0].permute(1, 2, 0), target.permute(0, 2, 3, 1)
    drawn = [draw_matches(nhwc[0], t, points, m) for t, m in zip(nhwc[1], matches, strict=True)]
    segment = graph(9)
    seeds = list(range(segment.seed, segment.seed + segment.ensemble))
    labels = pipe.segment(
        known.images,
        masks,
        target,
        graph.text(segment.positive),
        addresses=list(made.chosen),
        timestep=segment.timestep,
        seeds=seeds,
    )
    masked = mask_pictures(labels.float(), MASKED).permute(0, 3, 1, 2)  # as the node shows them, captions and all
    return found | {14: torch.stack(drawn).permute(0, 3, 1, 2), 9: masked}


# --- NEMO ----------------------------------------------------------------------------------------------------------
def found_neurons(graph, pipe):
    """(neurons, calibration) as Calibrate Copy Detection (NEMO) and Find Copying Neurons (NEMO) make them."""
    told, find = graph.one("VitrineNEMOCalibrate"), graph.one("VitrineNEMOFindNeurons")
    probe = ProbeConfig(seeds=find.seeds, timestep_index=find.timestep_index)
    parts = PARTS if told.measure == "everything" else (told.measure,)
    few_steps = FewStepConfig(told.samples, told.first_seed, told.steps, told.cfg)
    calibration = pipe.calibrate(told.prompts.splitlines(), parts, told.scope, probe, few_steps)
    config = SearchConfig(effect_fraction=find.effect_fraction, mode=find.mode)
    (result,) = pipe.find([graph.text(find.positive)], calibration, config, probe, find.scope)
    return pipe.neurons(result), calibration


def stop_the_model_copying_a_picture(graph, comfy):
    pipe, check = pipeline(NEMOPipeline), graph(19)
    neurons, calibration = found_neurons(graph, pipe)
    heat = heat_map(neurons, {a: len(m) for a, m in calibration.statistics.means.items()})
    untouched = ksampler(graph, 10, pipe)
    reference = ksampler_latents(graph, 10, pipe)[:1]
    probe = make_probe(Denoiser.from_diffusers(pipe), "all", ProbeConfig(check.seeds, check.timestep_index))
    (cond,) = conditions(pipe, [graph.text(check.positive)])
    config = VerifyConfig(calibration.score.tau, check.seed, AttackConfig(steps=check.attack_steps))
    done = verify(probe, cond, neurons, (4, 16, 16), config, reference=reference)
    attacked = done.embedding.text.expand(len(untouched), -1, -1)
    back = ksampler(graph, 20, pipe, neurons=neurons, prompt_embeds=attacked)
    compared = compared_copies(graph, untouched, ksampler(graph, 11, pipe, neurons=neurons))
    return {8: heat.permute(2, 0, 1)[None], 22: enlarged(back, graph(27).scale_by), 24: compared}


def compared_copies(graph, before, after):
    """*Compare Copies (NEMO)*: the memorized picture, samples before and after."""
    from vitrine.nodes.nemo_block import side_by_side

    (plant,) = [p for p in plants() if p.name == graph(25).memorized]
    reference, usual = render(plant.scenes, graph(25).size).images, portraits(graph(26)).images
    copies = Copies(*(picture_distance(x, reference) for x in (before, after, usual)))
    nhwc = [x.permute(0, 2, 3, 1) for x in (reference, before, after)]
    return side_by_side(*nhwc, copies).permute(0, 3, 1, 2)


def check_a_model_for_copies(graph, comfy, folder):
    """*Check for Copies (NEMO)*'s pictures: each prompt's nearest sample beside what of it is copied."""
    node, pipe = graph.one("VitrineNEMOCopyCheck"), pipeline(StableDiffusionPipeline)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="linspace")
    sigmas = euler_sigmas(pipe.scheduler, node.scheduler, node.steps)
    config = CheckConfig(node.seeds, node.first_seed, ordinary=tuple(node.ordinary.splitlines()))
    check = copy_check(
        pipe,
        node.prompts.splitlines(),
        folder,
        config=config,
        tau=node.tau,
        sigmas=sigmas,
        probe=ProbeConfig(timestep_index=node.timestep_index),
        guidance_scale=node.cfg,
        num_inference_steps=node.steps,
    )
    files = [(prompt.file, prompt.overlay_file) for prompt in check.ranked]
    return {5: torch.stack([torch.cat([pixels(f) for f in pair], -1) for pair in files])}


def pixels(file):
    """(3, H, W) in [0, 1] of a picture file."""
    with Image.open(file) as opened:
        return torch.from_numpy(np.asarray(opened.convert("RGB")) / 255).permute(2, 0, 1).float()


def ksampler_latents(graph, node_id, pipe):
    """Scaled latents of a KSampler node: the pictures' own, caught before they are decoded."""
    caught = []
    decode = pipe.vae.decode

    def catch(latents, *args, **kwargs):
        caught.append(latents * pipe.vae.config.scaling_factor)
        return decode(latents, *args, **kwargs)

    pipe.vae.decode = catch
    try:
        ksampler(graph, node_id, pipe)
    finally:
        del pipe.vae.decode
    return caught[0]


# --- EMD -----------------------------------------------------------------------------------------------------------
def sample_at_twice_the_size(graph, comfy):
    """The first pass enlarged, and a second one at the last of its levels: by the model as it is, and as planned."""
    base, t, scale = pipeline(StableDiffusionPipeline), graph(5), graph(12)
    assert scale.upscale_method == "bicubic"
    small = ksampler(graph, 10, base)
    larger = functional.interpolate(small, scale_factor=scale.scale_by, mode="bicubic")
    with torch.no_grad():
        latents = base.vae.encode(larger * 2 - 1).latent_dist.mode() * base.vae.config.scaling_factor
    how = {"schedule": t.schedule, "receptive_field": t.receptive_field}
    plan = ResolutionTransferConfig((t.target_width, t.target_height), (64, 64), **how)
    pictures = {18: larger}
    for shown, sampler, pipe in ((20, 14, base), (21, 15, ResolutionTransferPipeline.from_pipe(base, plan))):
        s = graph(sampler)
        scheduler = EulerDiscreteScheduler.from_config(base.scheduler.config)
        sigmas = euler_sigmas(scheduler, s.scheduler, int(s.steps / s.denoise))[-s.steps - 1 :]
        scheduler.set_timesteps(sigmas=sigmas)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(s.seed))
        pipe.scheduler = scheduler
        pictures[shown] = pipe(
            [graph.text(s.positive)] * len(latents),
            negative_prompt=[graph.text(s.negative)] * len(latents),
            latents=(latents + noise * sigmas[0]) / scheduler.init_noise_sigma,
            sigmas=sigmas,
            guidance_scale=s.cfg,
            height=larger.shape[-2],
            width=larger.shape[-1],
            output_type="pt",
        ).images
    return pictures


def sample_in_one_step(graph, comfy):
    student, base = pipeline(EMDOneStepPipeline), pipeline(NEMOPipeline)
    preset = student.load_student(student_file("student"))
    prompt, seeds = prompt_and_seed(graph, graph(8))
    return {7: ksampler(graph, 5, base), 10: student(prompt, seeds, preset, output_type="pt").images}


# --- W2W -----------------------------------------------------------------------------------------------------------
def sampled(graph, node_id, space):
    s = graph(node_id)
    how = SampleConfig(s.spread, s.components or None, s.truncation or None, attributes="joined")
    return pipeline_models().sample_models(space, [s.seed], how)


def pipeline_models():
    return pipeline(W2WPipeline)


def sliders(s):
    pairs = ((getattr(s, f"label_{i}"), getattr(s, f"strength_{i}")) for i in range(1, 5))
    return {label: strength for label, strength in pairs if label and strength}


def pull_sliders_on_a_person(graph, comfy):
    pipe, space, invert = pipeline(W2WPipeline), people_space(), graph(23)
    person = sampled(graph, 7, space)
    edited = pipe.edit_model(space, person, sliders(graph(8)))
    late = {"edits": sliders(graph(8)), "edit_config": EditConfig(start_timestep=graph(11).start_timestep)}
    drawn = portraits(graph(21))
    config = InvertConfig(
        invert.components or None,
        invert.steps,
        invert.lr,
        invert.batch,
        prior=invert.prior,
        seed=invert.seed,
        antithetic=invert.batch > 1,
    )
    mask = (drawn.parts > 0).float()
    found, _ = pipe.invert_image(space, drawn.images, graph.text(invert.positive), config, mask)
    share = graph(28).blend
    child = pipe.blend_models(space, [person, found], [1 - share, share])
    told = {14: (12, person, {}), 17: (15, edited, {}), 20: (18, person, late), 27: (25, found, {})}
    told[32] = (30, child, {})
    return {i: ksampler(graph, k, pipe, space=space, model=m, **more) for i, (k, m, more) in told.items()}


def make_a_slider_from_pictures(graph, comfy):
    pipe, space, train, colour = pipeline(W2WPipeline), people_space(), graph(7), graph(5).color
    drawn = portraits(graph(4))
    paint = torch.tensor([colour >> 16, colour >> 8 & 255, colour & 255]).view(3, 1, 1) / 255
    after = torch.where((drawn.parts == part_number(graph(4).part))[:, None], paint, drawn.images)
    config = PairConfig(steps=train.steps, lr=train.lr, start_timestep=train.start_timestep, seed=train.seed)
    nobody = torch.zeros(1, space.dimension)
    change = pipe.train_pair_slider(space, drawn.images, after, graph.text(train.positive), nobody, config)
    trained = with_pair_slider(space, train.label, change)
    person = sampled(graph, 8, space)
    edited = pipe.edit_model(trained, person, {train.label: trained.info["pair_sliders"][train.label]})
    told = {71: (20, person), 72: (21, edited)}
    shown = {i: ksampler(graph, k, pipe, space=trained, model=m) for i, (k, m) in told.items()}
    return {70: after} | {i: enlarged(pictures, graph(50).scale_by) for i, pictures in shown.items()}


# --- compositions --------------------------------------------------------------------------------------------------
def tapped(graph, base, pipe, **how):
    """Pictures and the drawings of two recorded steps of one column of a composition: nodes base .. base + 7."""
    steps = graph(base + 2).step, graph(base + 3).step
    place = graph(base).layers
    with tap_steps(pipe.unet, place, set(steps), rows=DIFFUSERS_GUIDED) as record:
        pictures = ksampler(graph, base + 1, pipe, **how)
    drawn = [colours(record[step]["cond"][place].tensor) for step in steps]
    return {base + 5: pictures, base + 6: drawn[0], base + 7: drawn[1]}


def look_inside_a_copied_picture(graph, comfy):
    pipe = pipeline(NEMOPipeline)
    neurons, _ = found_neurons(graph, pipe)
    return tapped(graph, 10, pipe) | tapped(graph, 20, pipe, neurons=neurons)


def change_a_person_halfway_through(graph, comfy):
    pipe, space = pipeline(W2WPipeline), people_space()
    person = sampled(graph, 6, space)
    late = {"edits": sliders(graph(7)), "edit_config": EditConfig(start_timestep=graph(9).start_timestep)}
    who = {"space": space, "model": person}
    return tapped(graph, 10, pipe, **who) | tapped(graph, 20, pipe, **who, **late)


def sample_a_person_in_one_step(graph, comfy):
    from vitrine.engine.w2w import BatchedLora

    space, student = people_space(), pipeline(EMDOneStepPipeline)
    person = sampled(graph, 6, space)
    edited = pipeline_models().edit_model(space, person, sliders(graph(8)))
    preset, (prompt, seeds) = student.load_student(student_file("student")), prompt_and_seed(graph, graph(20))

    def one(model):
        with BatchedLora(student.unet, space.manifest, space.decode(model.coefficients)):
            return student(prompt, seeds, preset, output_type="pt").images

    found = {22: student(prompt, seeds, preset, output_type="pt").images, 32: one(person), 42: one(edited)}
    slow = pipeline(W2WPipeline)
    return found | {62: ksampler(graph, 60, slow, space=space, model=person)}


# --- files and making ----------------------------------------------------------------------------------------------
def reuse_saved_neurons_people_and_layers(graph, comfy):
    from vitrine.engine.activations import Activations
    from vitrine.nodes.comfy import saved

    pipe, space = pipeline(NEMOPipeline), people_space()
    neurons = NeuronSet.load(saved.path_of("vitrine_neurons", graph(5).file))
    preset = FeaturePreset.load(saved.path_of("vitrine_presets", graph(20).file)).preset
    person = W2WModel.load(saved.path_of("vitrine_w2w", graph(14).file))
    stored = Activations.load(saved.path_of("vitrine_activations", graph(26).file))
    tap = graph(23)
    seeds = list(range(tap.seed, tap.seed + tap.ensemble))
    taps = (
        pipeline(ActivationTapPipeline)
        .tap(
            portraits(graph(21)).images,
            graph.text(tap.positive),
            addresses=list(preset.addresses),
            timestep=preset.timestep,
            seeds=seeds,
            output_type="none",
        )
        .activations
    )
    first = next(taps[a] for a in taps if taps[a].grid is not None)
    people = ksampler(graph, 17, pipeline(W2WPipeline), space=space, model=person)
    pipe.unet.load_state_dict(bake(pipe.unet, neurons, graph(6).factor), strict=False)
    shown = colours(stored[graph(27).layer].tensor.float(), graph(27).size)
    return {12: ksampler(graph, 10, pipe), 19: people, 25: colours(first.tensor), 28: shown}


def make_your_own_slider_threshold_and_space(graph, comfy, folder):
    train, score, distil = graph(6), graph(23), graph(32)
    space = people_space()
    label = direction(space, parse_labels(train.labels, space.names), train.method, train.components or None)
    space = with_directions(space, {train.label: label})
    person = sampled(graph, 7, space)
    moved = person.moved_to(edit(space, person.coefficients, sliders(graph(8))))
    slider = ksampler(graph, 10, pipeline(W2WPipeline), space=space, model=moved)
    nemo, config = pipeline(NEMOPipeline), ProbeConfig(seeds=score.seeds, timestep_index=score.timestep_index)
    (cond,), noise = conditions(nemo, [graph.text(score.positive)]), probe_noise(config, (4, 16, 16))
    probe = make_probe(Denoiser.from_diffusers(nemo), config=config)
    with torch.no_grad():
        clean = probe.denoiser.predict(noise, probe.t, cond.take(torch.zeros(len(noise), dtype=torch.long))).x0
        pictures = nemo.vae.decode(clean / nemo.vae.config.scaling_factor).sample
    return {12: slider, 24: (pictures / 2 + 0.5).clamp(0, 1), 33: first_pictures(distil, folder)}


def turn_a_folder_of_loras_into_sliders(graph, comfy):
    build, train, drawn = graph(4), graph(5), graph(6)
    space = build_space(PEOPLE_LORAS, BuildConfig(build.mode, build.components or None)).space
    label = direction(space, parse_labels(train.labels, space.names), train.method, train.components or None)
    space = with_directions(space, {train.label: label})
    pipe = pipeline(W2WPipeline)
    how = usual_sampling(
        space,
        components=drawn.components or None,
        truncation=drawn.truncation or None,
        attributes=drawn.attributes,
        emphasis=drawn.emphasis,
        inherit=drawn.inherit,
    )
    person = pipe.sample_models(space, [drawn.seed], replace(how, spread=drawn.spread * how.spread))
    return {11: ksampler(graph, 9, pipe, space=space, model=pipe.edit_model(space, person, sliders(graph(7))))}


def first_pictures(s, folder):
    """What Train One-Step Student (EMD) shows: the student's pictures of seeds 0 .. 3 after a small run."""
    from vitrine.engine.diffusion.noise import seeded_noise

    parts = training_parts(s.base, s.prompts.splitlines())
    config = EMDTrainConfig(s.steps, s.batch, s.timestep, s.rank, EStepConfig(s.K), guidance=s.guidance, seed=s.seed)
    trainer = parts.trainer(config, folder)
    trainer.run()
    with torch.no_grad():
        cond = parts.conditions.take(torch.arange(4) % trainer.condition_count)
        return parts.decode(trainer.generate(seeded_noise([0, 1, 2, 3], parts.shape), cond))
