# ruff: noqa: E501  (names of tests are as long as they are)
"""Which tests stand behind the cells of README's table of models: what is claimed there is what they run.

A test is ``file::function`` below tests/, ``file::function[part]`` where one of its cases is meant: ``part`` is the
name of the case, or of the fixture's parameter, as the file (or the one it imports names from) spells it.
"""

COLUMNS = ("addresses", "Tap", "match, rank", "NEMO", "EMD", "W2W", "Control", "Resolution")
LIST = "pipelines/encoded.py"
"""Names of tiny stock pipelines, which the tests "around" are parametrised over."""
TWINS = "comfy/test_family_twins.py::test_one_address_is_one_tensor"
MODELS = "comfy/test_family_models.py"
AROUND = {
    "NEMO": "pipelines/test_nemo_around.py::test_nothing_blocked_is_the_stock_pipeline_and_blocking_is_the_engines",
    "EMD": "pipelines/test_emd_around.py::test_one_call_is_the_engines",
    "W2W": "pipelines/test_w2w_around.py::test_a_model_draws_as_its_lora_in_the_weights",
    "Resolution": "pipelines/test_resolution_around.py::test_the_trained_size_is_untouched_and_others_change",
}
NODES = {
    "Tap": f"{MODELS}::test_nodes_freshly_added_run",
    "NEMO": f"{MODELS}::test_neurons_are_blocked_while_comfyui_samples",
    "EMD": "comfy/test_emd_families.py::test_emds_nodes_in_comfyui",
    "W2W": f"{MODELS}::test_loras_of_every_spelling_change_both_networks_alike",
    "Resolution": "comfy/test_rotary_families.py::test_both_libraries_agree_and_something_changes",
}
FULL = {
    "Tap": ("VitrineActivationTap", "ActivationTapPipeline"),
    "match, rank": ("VitrineFindCorrespondence", "SegmentationPipeline.rank"),
    "NEMO": ("VitrineNEMONeuronBlocker", "NEMOPipeline.score"),
    "EMD": ("VitrineEMDOneStepGenerator", "EMDOneStepPipeline"),
    "W2W": ("VitrineApplyW2WModel", "W2WPipeline"),
    "Control": ("VitrineLoadControl", "ControlConditionedPipeline"),
    "Resolution": ("VitrineResolutionTransferLoader", "ResolutionTransferPipeline"),
}
"""Node and pipeline of each method in the full-size lane."""


FULL_XL = {
    "Tap": ("VitrineActivationTap", "ActivationTapXLPipeline"),
    "match, rank": ("VitrineFindCorrespondence", "SegmentationXLPipeline.rank"),
    "NEMO": ("VitrineNEMONeuronBlocker", "NEMOAroundPipeline.score"),
    "EMD": ("VitrineEMDOneStepGenerator", "EMDOneStepXLPipeline"),
    "W2W": ("VitrineApplyW2WModel", "W2WAroundPipeline"),
    "Control": ("VitrineControlConditionedSampler", "ControlConditionedXLPipeline"),
    "Resolution": ("VitrineResolutionTransferLoader", "ResolutionTransferPipeline"),
}


def _at_full_size(names: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    return {
        column: [
            f"full_size/test_nodes.py::test_node[{n}]" if n.startswith("Vitrine") else
            f"full_size/test_pipelines.py::test_pipeline[{n}]" for n in cases
        ]
        for column, cases in names.items()
    }  # fmt: skip


def _family(twin: str, source: str | None, *, match: str | None = None) -> dict[str, list[str]]:
    """A transformer: both libraries' network, ComfyUI's nodes, and its own pipeline where a tiny one can be built."""
    tests = {column: [f"{test}[{twin}]"] for column, test in NODES.items()}
    tests["addresses"] = [f"{TWINS}[{twin}]", f"engine/test_family_maps.py::test_a_map_times_the_values_is_attentions_result[{twin}]"]  # fmt: skip
    tests["Tap"].append(f"{MODELS}::test_one_tap_through_both_doors[{twin}]")
    if source:
        for column, test in AROUND.items():
            tests[column].append(f"{test}[{source}]")
    if match:
        tests["Tap"].append(
            f"pipelines/test_family_taps.py::test_a_tap_is_what_the_stock_pipelines_own_parts_give[{match}]"
        )
        tests["match, rank"] = [f"pipelines/test_family_taps.py::test_correspondence_and_segmentation_run_on_it[{match}]"]  # fmt: skip
    return tests


def _together(*families: dict[str, list[str]]) -> dict[str, list[str]]:
    return {column: [t for f in families for t in f.get(column, ())] for column in COLUMNS}


PORTRAITS = {
    "addresses": ["comfy/test_nodes.py::test_both_layouts_have_the_same_addresses", "comfy/test_cross_layout.py::test_unet_tensors_agree[portraits shape]"],
    "Tap": ["comfy/test_nodes.py::test_taps_agree_with_the_python_door", "pipelines/test_activation_tap.py::test_pictures_in_activations_out"],
    "match, rank": ["comfy/test_matching.py::test_points_travel_to_the_right_part_and_agree_with_the_pipeline", "comfy/test_ranking.py::test_the_node_ranks_as_the_pipeline_does"],
    "NEMO": ["comfy/test_nemo.py::test_statistics_and_search_equal_the_pipelines", "comfy/test_nemo.py::test_node_and_pipeline_block_alike"],
    "EMD": ["comfy/test_emd.py::test_node_pipeline_and_stock_graph_agree", "comfy/test_emd.py::test_correction_agrees_with_the_pipeline"],
    "W2W": ["comfy/w2w/test_inversion.py::test_inversion_equals_the_pipelines", "comfy/w2w/test_patches.py::test_the_patch_is_the_pipelines_model"],
    "Control": ["comfy/test_control_checkpoint.py::test_a_checkpoint_samples_as_in_the_pipeline"],
    "Resolution": ["comfy/test_resolution.py::test_both_doors_agree", "pipelines/test_resolution.py::test_every_family[sd]"],
}  # fmt: skip

SDXL = _at_full_size(FULL_XL) | {
    "addresses": ["comfy/test_cross_layout.py::test_unet_tensors_agree[small SDXL]", "comfy/test_cross_layout.py::test_full_size_unets_have_the_same_addresses_in_both_layouts[SDXL]"],
}  # fmt: skip
SDXL["NEMO"] += [f"{AROUND['NEMO']}[sdxl]", "comfy/test_nemo.py::test_node_and_pipeline_block_alike"]
SDXL["W2W"] += [f"{AROUND['W2W']}[sdxl]"]
SDXL["Control"] += ["comfy/test_control.py::test_node_and_pipeline_give_the_same_latents[xl]"]

CELLS: dict[str, dict[str, list[str]]] = {
    "portraits (SD1.x-shaped)": PORTRAITS,
    "SD1.x": _at_full_size(FULL) | {
        "addresses": ["comfy/test_cross_layout.py::test_unet_tensors_agree[small SD1.5]", "comfy/test_cross_layout.py::test_full_size_unets_have_the_same_addresses_in_both_layouts[SD1.5]"],
    },
    "SD2.x, predicting noise or v": {
        "addresses": ["comfy/test_cross_layout.py::test_unet_tensors_agree[small SD2.1]", "comfy/test_cross_layout.py::test_full_size_unets_have_the_same_addresses_in_both_layouts[SD2.1]"],
        "Tap": ["pipelines/test_sd2.py::test_taps_matches_and_masks"],
        "match, rank": ["pipelines/test_sd2.py::test_taps_matches_and_masks"],
        "NEMO": ["pipelines/test_sd2.py::test_nemo_blocks_scores_and_searches"],
        "EMD": ["comfy/test_emd_families.py::test_emds_nodes_in_comfyui[SD2, predicting v]", "pipelines/test_sd2.py::test_one_step"],
        "W2W": ["pipelines/test_sd2.py::test_a_person_is_drawn_and_found"],
        "Control": ["pipelines/test_sd2.py::test_sizes_cannot_be_told_to_a_model_that_never_heard_of_them"],
        "Resolution": ["pipelines/test_sd2.py::test_another_size"],
    },
    "SDXL": SDXL,
    "PixArt": {
        "addresses": ["comfy/test_cross_layout.py::test_transformer_tensors_agree[PixArt]"],
        "Tap": ["pipelines/test_family_taps.py::test_a_tap_is_what_the_stock_pipelines_own_parts_give[pixart]"],
        "match, rank": ["pipelines/test_family_taps.py::test_correspondence_and_segmentation_run_on_it[pixart]"],
        "NEMO": [f"{AROUND['NEMO']}[pixart]"],
        "EMD": [f"{AROUND['EMD']}[pixart]", "comfy/test_emd_families.py::test_pixart_is_refused"],
        "W2W": [f"{AROUND['W2W']}[pixart]"],
        "Control": ["comfy/test_portraits_transformer.py::test_a_run_with_controls_is_the_pipelines", "comfy/test_control.py::test_node_and_pipeline_give_the_same_latents[pixart]"],
        "Resolution": ["comfy/test_portraits_transformer.py::test_positions_are_those_of_the_pipeline", "pipelines/test_resolution.py::test_every_family[pixart]"],
    },
    "SD3, SD3.5 medium": _family("sd35", "sd3", match="sd3") | {
        "EMD": ["comfy/test_emd_families.py::test_both_networks_train_and_the_teacher_stays[SD3, SD3.5 medium]", f"{AROUND['EMD']}[sd3]"],
        "Control": ["engine/test_control_inject.py::test_c_emb_is_added_to_the_timestep_embedding[sd3]"],
        "Resolution": ["comfy/test_table_families.py::test_both_libraries_agree_on_sd3", f"{AROUND['Resolution']}[sd3]"],
    },
    "flow portraits (Flux-shaped)": {
        "addresses": ["comfy/test_portraits_flow.py::test_every_layer_is_the_same_network"],
        "Tap": ["comfy/test_portraits_flow.py::test_every_layer_is_the_same_network", f"{MODELS}::test_one_tap_through_both_doors[flux]"],
        "match, rank": ["pipelines/test_family_taps.py::test_correspondence_and_segmentation_run_on_it[flux]"],
        "NEMO": ["evidence/test_nemo_flow.py::test_statistics_and_score_of_the_flow_model"],
        "EMD": ["comfy/test_emd_flow.py::test_one_step_is_the_pipelines", "comfy/test_emd_flow.py::test_repair_also_moves_the_noise"],
        "W2W": ["evidence/test_w2w_flow.py::test_a_sampled_model_is_one_person", "evidence/test_w2w_flow.py::test_directions_in_the_quick_form"],
        "Resolution": ["comfy/test_portraits_flow.py::test_a_whole_run_at_another_size_is_one_picture_through_both_doors"],
    },
    "Flux": _family("flux", "flux", match="flux"),
    "Z-Image, Flux.2 Klein, Wan (per frame)": _together(
        _family("z_image", "z_image", match="z_image"), _family("klein", "klein", match="klein"),
        _family("wan", "wan", match="wan"),
    ),
    "Qwen-Image, Krea 2, Flux.2 dev, Lumina 2, Anima, Chroma, HiDream": _together(
        _family("qwen_image", "qwen_image"), _family("krea2", "krea2"), _family("flux2", None),
        _family("lumina2", "lumina2"), _family("anima", None), _family("chroma", "chroma"), _family("hidream", None),
    ) | {
        "match, rank": ["pipelines/test_chroma.py::test_matches_and_masks"],
        "NEMO": [f"{NODES['NEMO']}[{n}]" for n in ("qwen_image", "krea2", "flux2", "lumina2", "anima", "chroma", "hidream")],
        "EMD": [f"{test}[{name}]" for test, names in (
            (NODES["EMD"], ("Qwen-Image", "Krea 2", "Lumina 2", "Chroma")),
            (AROUND["EMD"], ("qwen_image", "krea2", "lumina2", "chroma")),
        ) for name in names],
    },
}  # fmt: skip
