# ruff: noqa: E501  (names of tests are as long as they are)
"""Which tests stand behind the cells of README's table of models, family by family: what is claimed there is run.

A test is ``file::function`` below tests/, or ``file::function[case]``: the case as pytest names it, or one of its parts.
Its folder tells through which door it goes, :data:`BOTH` which ones compare the two.
"""

COLUMNS = ("layer names", "Tap", "match, rank", "NEMO", "EMD", "W2W", "Size conditioning", "Resolution")
Tests = dict[str, list[str]]
"""Column -> tests."""
TWINS = "comfy/test_family_twins.py::test_one_address_is_one_tensor"
MAPS = "engine/families/test_family_maps.py::test_a_map_times_the_values_is_attentions_result"
MODELS = "comfy/test_family_models.py"
OWN = "comfy/test_own_templates.py::test_the_template_runs"
ROTARY = "comfy/test_rotary_families.py"
TAPS = "pipelines/test_family_taps.py::test_a_tap_is_what_the_stock_pipelines_own_parts_give"
MATCHES = "pipelines/test_family_taps.py::test_correspondence_and_segmentation_run_on_it"
PIXART = "comfy/test_pixart_nodes.py"
AROUND = {
    "NEMO": "pipelines/test_nemo_around.py::test_nothing_blocked_is_the_stock_pipeline_and_blocking_is_the_engines",
    "EMD": "pipelines/test_emd_around.py::test_one_call_is_the_engines",
    "W2W": "pipelines/test_w2w_around.py::test_a_model_draws_as_its_lora_in_the_weights",
    "Resolution": "pipelines/test_resolution_around.py::test_the_trained_size_is_untouched_and_others_change",
}
BOTH = (
    "test_both_layouts_have_the_same_addresses",
    "test_taps_agree_with_the_python_door",
    "test_points_travel_to_the_right_part_and_agree_with_the_pipeline",
    "test_the_node_ranks_as_the_pipeline_does",
    "test_a_search_equals_the_pipelines",
    "test_node_and_pipeline_block_alike",
    "test_node_pipeline_and_stock_graph_agree",
    "test_inversion_equals_the_pipelines",
    "test_the_patch_is_the_pipelines_model",
    "test_a_checkpoint_samples_as_in_the_pipeline",
    "test_both_doors_agree",
    "test_a_run_with_controls_is_the_pipelines",
    "test_node_and_pipeline_give_the_same_latents",
    "test_positions_are_those_of_the_pipeline",
    "test_one_step_is_the_pipelines",
    "test_a_whole_run_is_one_picture_through_both_doors",
    "test_a_whole_run_at_another_size_is_one_picture_through_both_doors",
    f"{PIXART}::",
    "comfy/test_flow_nodes.py::",
)
"""Tests in tests/comfy in which a pipeline gives the same as the nodes."""


def _at_full_size(family: str, names: dict[str, tuple[str, ...]]) -> Tests:
    return {
        column: [
            f"full_size/test_pipelines.py::test_pipeline[{n}-{family}]"
            if "Pipeline" in n
            else f"full_size/test_own_models.py::test_the_template_runs_on_your_model[{n} (your checkpoint)-{family}]"
            for n in cases
        ]
        for column, cases in names.items()
    }


FULL = _at_full_size(
    "sd15",
    {
        "Tap": ("See what the model sees", "ActivationTapPipeline"),
        "match, rank": ("Find the same part", "CorrespondencePipeline", "SegmentationPipeline.rank"),
        "NEMO": ("Stop the model copying a picture", "NEMOPipeline", "NEMOPipeline.find"),
        "EMD": ("Sample in one step", "EMDOneStepPipeline"),
        "W2W": ("Turn a folder of LoRAs into sliders", "W2WPipeline", "W2WPipeline.invert_image"),
        "Size conditioning": ("ControlConditionedPipeline",),
        "Resolution": ("Sample at twice the size", "ResolutionTransferPipeline"),
    },
)
FULL_XL = _at_full_size(
    "sdxl",
    {
        "Tap": ("See what the model sees", "ActivationTapPipeline"),
        "match, rank": ("Find the same part", "CorrespondencePipeline", "SegmentationPipeline.rank"),
        "NEMO": ("Stop the model copying a picture", "NEMOPipeline", "NEMOPipeline.detect"),
        "EMD": ("Sample in one step", "EMDOneStepPipeline"),
        "W2W": ("Turn a folder of LoRAs into sliders", "W2WPipeline", "W2WPipeline.invert_image"),
        "Size conditioning": ("Say how large a picture should look", "ControlConditionedPipeline"),
        "Resolution": ("Sample at twice the size", "ResolutionTransferPipeline"),
    },
)


def _unet(name: str) -> list[str]:
    layouts = "comfy/test_cross_layout.py"
    return [
        f"{layouts}::test_unet_tensors_agree[small {name}]",
        f"{layouts}::test_full_size_unets_have_the_same_addresses_in_both_layouts[{name}]",
    ]


def _nodes(twin: str) -> Tests:
    """What every transformer's small files run in ComfyUI; some names are of workflows."""
    resolution = f"{ROTARY}::test_both_libraries_agree_and_something_changes[{'flux2' if twin == 'klein' else twin}]"
    return {
        "layer names": [f"{TWINS}[{twin}]", f"{MAPS}[{twin}]"],
        "Tap": [f"{MODELS}::test_nodes_freshly_added_run[{twin}]", f"{MODELS}::test_one_tap_through_both_doors[{twin}]"],
        "match, rank": [f"{OWN}[{twin}-Find the same part (your checkpoint)]"],
        "NEMO": [f"{MODELS}::test_neurons_are_blocked_while_comfyui_samples[{twin}]", f"{OWN}[{twin}-Stop the model copying a picture (your checkpoint)]"],
        "EMD": [f"{OWN}[{twin}-Sample in one step (your checkpoint)]"],
        "W2W": [f"{OWN}[{twin}-Turn a folder of LoRAs into sliders (your checkpoint)]", f"{MODELS}::test_loras_of_every_spelling_change_both_networks_alike[{twin}]",
                f"{MODELS}::test_a_lora_inside_the_forward_is_the_patch[{twin}]"],
        "Resolution": ["comfy/test_table_families.py::test_both_libraries_agree_on_sd3" if twin == "sd35" else resolution,
                       f"{OWN}[{twin}-Sample at twice the size (your checkpoint)]"],
    }  # fmt: skip


def _with(tests: Tests, **more: list[str] | str) -> Tests:
    """The same and more; keywords are columns, "matches" that of two methods."""
    names = {"matches": "match, rank"}
    added = {names.get(k, k): [v] if isinstance(v, str) else v for k, v in more.items()}
    return {c: [*tests.get(c, []), *added.get(c, [])] for c in COLUMNS if c in tests or c in added}


def _around(source: str, *columns: str) -> Tests:
    return {column: [f"{AROUND[column]}[{source}]"] for column in columns or AROUND}


def _both(twin: str, source: str, *columns: str) -> Tests:
    """In ComfyUI, and around a small stock pipeline whose prompts are read."""
    tests = _with(_nodes(twin), **_around(source, *columns))
    if source == "chroma":
        return _with(
            tests, Tap="pipelines/test_chroma.py::test_taps", matches="pipelines/test_chroma.py::test_matches_and_masks"
        )
    return _with(tests, Tap=f"{TAPS}[{source}]", matches=f"{MATCHES}[{source}]")


def _encoded(twin: str) -> Tests:
    """In ComfyUI, and around a stock pipeline that is given encoded prompts."""
    file = "pipelines/test_encoded_taps.py"
    tests = _with(_nodes(twin), **_around(twin, "EMD", "W2W", "Resolution"))
    return _with(
        tests,
        Tap=f"{file}::test_encoded_prompts_are_what_the_network_reads[{twin}]",
        matches=f"{file}::test_matching_takes_them_too[{twin}]",
    )


UNTOLD = "pipelines/test_sd2.py::test_sizes_cannot_be_told_to_a_model_that_never_heard_of_them"
SD2 = "pipelines/test_sd2.py"

CELLS: dict[str, dict[str, Tests]] = {
    "portraits (SD1.x-shaped)": {"": {
        "layer names": ["comfy/test_nodes.py::test_both_layouts_have_the_same_addresses", "comfy/test_cross_layout.py::test_unet_tensors_agree[portraits shape]"],
        "Tap": ["comfy/test_nodes.py::test_taps_agree_with_the_python_door", "pipelines/test_activation_tap.py::test_pictures_in_activations_out"],
        "match, rank": ["comfy/test_matching.py::test_points_travel_to_the_right_part_and_agree_with_the_pipeline", "comfy/test_ranking.py::test_the_node_ranks_as_the_pipeline_does"],
        "NEMO": ["comfy/test_nemo.py::test_a_search_equals_the_pipelines", "comfy/test_nemo.py::test_node_and_pipeline_block_alike"],
        "EMD": ["comfy/test_emd.py::test_node_pipeline_and_stock_graph_agree"],
        "W2W": ["comfy/w2w/test_inversion.py::test_inversion_equals_the_pipelines", "comfy/w2w/test_patches.py::test_the_patch_is_the_pipelines_model"],
        "Size conditioning": ["comfy/test_control_checkpoint.py::test_a_checkpoint_samples_as_in_the_pipeline"],
        "Resolution": ["comfy/test_resolution.py::test_both_doors_agree", "pipelines/test_resolution.py::test_every_family[sd]"],
    }},
    "SD1.x": {"": FULL | {"layer names": _unet("SD1.5")}},
    "SD2.x, predicting noise or v": {"": {
        "layer names": _unet("SD2.1"),
        "Tap": [f"{SD2}::test_taps_matches_and_masks"], "match, rank": [f"{SD2}::test_taps_matches_and_masks"],
        "NEMO": [f"{SD2}::test_nemo_blocks_scores_and_searches"],
        "EMD": ["comfy/test_emd_families.py::test_emds_nodes_in_comfyui[SD2, predicting v]", f"{SD2}::test_one_step"],
        "W2W": [f"{SD2}::test_a_person_is_drawn_and_found"], "Size conditioning": [UNTOLD],
        "Resolution": [f"{SD2}::test_another_size"],
    }},
    "SDXL": {"": FULL_XL | {"layer names": _unet("SDXL")}},
    "PixArt": {"": {
        "layer names": ["comfy/test_cross_layout.py::test_transformer_tensors_agree[PixArt]"],
        "Tap": [f"{PIXART}::test_a_tap", f"{TAPS}[pixart]"],
        "match, rank": [f"{PIXART}::test_points_travel", f"{PIXART}::test_masks_travel", f"{MATCHES}[pixart]"],
        "NEMO": [f"{PIXART}::test_neurons_are_blocked", f"{AROUND['NEMO']}[pixart]", "pipelines/test_nemo_around.py::test_statistics_scores_and_searches_are_the_engines[pixart]"],
        "EMD": [f"{PIXART}::test_one_step", f"{AROUND['EMD']}[pixart]", "comfy/test_emd_families.py::test_pixart_is_refused"],
        "W2W": [f"{PIXART}::test_a_lora_is_the_same_change", f"{AROUND['W2W']}[pixart]"],
        "Size conditioning": ["comfy/test_portraits_transformer.py::test_a_run_with_controls_is_the_pipelines", "comfy/test_control.py::test_node_and_pipeline_give_the_same_latents[pixart]"],
        "Resolution": ["comfy/test_portraits_transformer.py::test_positions_are_those_of_the_pipeline", "pipelines/test_resolution.py::test_every_family[pixart]"],
    }},
    "SD3, SD3.5 medium": {"": _with(
        _both("sd35", "sd3"), EMD="comfy/test_emd_families.py::test_emds_nodes_in_comfyui[SD3, SD3.5 medium]",
        **{"Size conditioning": "engine/control/test_inject.py::test_c_emb_is_added_to_the_timestep_embedding[sd3]"},
    )},
    "flow portraits (Flux-shaped)": {"": {
        "layer names": ["comfy/test_portraits_flow.py::test_every_layer_is_the_same_network"],
        "Tap": ["comfy/test_flow_nodes.py::test_a_tap"],
        "match, rank": ["comfy/test_flow_nodes.py::test_points_travel", "comfy/test_flow_nodes.py::test_masks_travel"],
        "NEMO": ["evidence/test_nemo_flow.py::test_statistics_of_the_flow_model", f"{MODELS}::test_neurons_are_blocked_while_comfyui_samples[flux]"],
        "EMD": ["comfy/test_emd_flow.py::test_one_step_is_the_pipelines"],
        "W2W": ["evidence/test_w2w_flow.py::test_a_sampled_model_is_one_person", f"{OWN}[flux-Turn a folder of LoRAs into sliders (your checkpoint)]"],
        "Resolution": ["comfy/test_portraits_flow.py::test_a_whole_run_at_another_size_is_one_picture_through_both_doors"],
    }},
    "Flux": {"": _both("flux", "flux")},
    "Z-Image, Flux.2 Klein, Wan (per frame)": {
        "Z-Image": _both("z_image", "z_image"), "Flux.2 Klein": _both("klein", "klein"),
        "Wan": _both("wan", "wan", "EMD", "W2W", "Resolution"),
    },
    "Qwen-Image, Krea 2, Lumina 2, Chroma": {
        "Qwen-Image": _encoded("qwen_image"), "Krea 2": _encoded("krea2"), "Lumina 2": _encoded("lumina2"),
        "Chroma": _both("chroma", "chroma", "EMD", "W2W", "Resolution"),
    },
    "Flux.2 dev, Anima, HiDream": {
        name: _with(_nodes(twin), Resolution=f"{ROTARY}::{test}") for name, twin, test in (
            ("Flux.2 dev", "flux2", "test_a_whole_run_is_one_picture_through_both_doors[flux2]"),
            ("Anima", "anima", "test_a_whole_run_is_one_picture_through_both_doors[anima]"),
            ("HiDream", "hidream", "test_hidreams_pipeline_is_refused"),
        )
    },
}  # fmt: skip
"""Row -> family (the empty string where the row is of one) -> column -> tests."""
