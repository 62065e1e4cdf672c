"""Presets of sites: those of the GDF paper and of other papers, with their published scores.

Numbers are the papers' own (GDF = arXiv 2410.03558): ``spair`` is PCK@0.1 on SPair-71k (image / box, GDF Table 1),
``ade20k``, ``cityscapes`` and ``horse21`` are mIoU (GDF Table 2), ``single`` is the mIoU of each site alone on
Horse-21 / Bedroom-28 (GDF Tables 4-6). None of them was measured by Vitrine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import printable, refuse
from ..io.files import named, parse_table, save_table
from ..io.hub import Shared
from ..io.number_checks import integer
from ..settings.config import Config
from ..settings.one_line import one_line
from ..tracing.addresses import sites_of
from ..tracing.fingerprint import fingerprint_of, same_weights, short
from .tap_config import TapConfig


@one_line
@dataclass(frozen=True)
class Preset(Config):
    """A named choice of sites.

    Attributes:
        name: name for :func:`preset`.
        addresses: the site names, in execution order.
        timestep: of the network.
        model, size: the model that it was chosen for, and the side of its images in pixels; 0 is unknown.
        source: paper and section.
        numbers: published scores, by data set.
        channels: total number of channels; 0 is unknown.
        seeds: seeds of the noise samples to average.
        noise: False if the network takes the clean latent.
        modulate, discard: as in :class:`TapConfig`.
        note: further steps of the source.
    """

    name: str
    addresses: tuple[str, ...]
    timestep: float
    model: str
    size: int
    source: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    channels: int = 0
    seeds: tuple[int, ...] = (0,)
    noise: bool = True
    note: str = ""
    modulate: bool = False
    discard: tuple[int, ...] = ()

    def config(self, **changes: Any) -> TapConfig:
        """The preset as a :class:`TapConfig`; keyword arguments replace its settings."""
        names = ("addresses", "timestep", "seeds", "noise", "modulate", "discard")
        return TapConfig(**{**{name: getattr(self, name) for name in names}, **changes})


_UPSAMPLERS = ("up-level0-upsampler-out", "up-level1-upsampler-out", "up-level2-upsampler-out")
_LAST_15 = "up-level3-repeat2-vit-out"
_EIGHT = tuple(range(8))
_PORTRAITS = (
    "up-level0-repeat0-vit-block0-cross-q",
    "up-level0-repeat1-vit-block0-out",
    "up-level0-upsampler-out",
    "up-level1-repeat0-vit-block0-cross-q",
)

_ALL = (
    Preset(
        "Ours-v1.5",
        (
            "up-level1-repeat1-vit-block0-cross-q",  # 49.04 / 42.80
            "up-level1-repeat2-res-out",  # 50.61 / 39.47
            "up-level2-repeat1-vit-block0-cross-q",  # 53.58 / 39.82
            "up-level3-repeat0-vit-block0-self-k",  # 37.78 / 26.04
        ),
        50, "SD 1.5", 512, "GDF B.1",
        {"spair": (77.78, 69.83), "ade20k": 41.07, "cityscapes": 64.10, "horse21": 60.2,
         "single": ((49.04, 42.80), (50.61, 39.47), (53.58, 39.82), (37.78, 26.04))},
        3520,
    ),
    Preset(
        "Legacy-v1.5", (*_UPSAMPLERS, _LAST_15), 50, "SD 1.5", 512, "GDF 5, the layers of prior work",
        {"spair": (75.14, 66.73), "ade20k": 40.26, "cityscapes": 64.01, "horse21": 59.4}, 3520,
        note="also the blocks 2, 5, 8, 11 of SD+DINO",
    ),
    Preset(
        "Ours-XL",
        (
            "up-level0-repeat0-vit-block5-out",  # 58.70 / 45.26
            "up-level0-repeat0-vit-block7-out",  # 58.95 / 44.83
            "up-level1-repeat0-vit-block0-cross-q",  # 49.08 / 31.75
            "up-level1-repeat0-vit-block0-out",  # 46.74 / 31.14
        ),
        50, "SDXL", 1024, "GDF B.2",
        {"spair": (81.72, 75.18), "ade20k": 43.45, "cityscapes": 74.47, "horse21": 62.7,
         "single": ((58.70, 45.26), (58.95, 44.83), (49.08, 31.75), (46.74, 31.14))},
        3840,
    ),
    Preset(
        "Legacy-XL", (*_UPSAMPLERS[:2], "up-level2-repeat2-res-out"), 50, "SDXL", 1024, "GDF 5",
        {"spair": (66.00, 59.16), "ade20k": 27.78, "cityscapes": 71.67, "horse21": 53.0}, 2240,
    ),
    Preset(
        "Ours-XL-t/sd15",
        ("up-level1-repeat1-vit-block0-cross-q", "up-level2-repeat1-vit-block0-cross-q", "up-level2-upsampler-out",
         "up-level3-repeat0-vit-block0-self-k"),
        50, "SD 1.5", 512, "GDF B.3", {"spair": (83.90, 76.86), "horse21": 66.3}, 2880,
        note="one of three models: join with Ours-XL and Ours-XL-t/playground; the paper adds 154 attention channels",
    ),
    Preset(
        "Ours-XL-t/playground", ("up-level0-repeat0-vit-block3-out",), 50, "Playground v2", 1024, "GDF B.3",
        {"spair": (83.90, 76.86), "horse21": 66.3, "single": ((59.04, 47.81),)}, 1280,
        note="one of three models: concatenate with Ours-XL and Ours-XL-t/sd15",
    ),
    Preset(
        "Ours-XL-t/segmentation-xl",
        ("up-level0-repeat0-vit-block5-out", "up-level0-repeat0-vit-block7-out",
         "up-level1-repeat0-vit-block0-cross-q", "up-level1-repeat0-vit-block0-out", "up-level1-upsampler-out"),
        50, "SDXL", 1024, "GDF B.4", {"ade20k": 45.71, "cityscapes": 75.89}, 4480,
        note="one of two models: pair with Ours-XL-t/segmentation-playground",
    ),
    Preset(
        "Ours-XL-t/segmentation-playground",
        ("up-level0-repeat0-vit-block5-out", "up-level1-repeat0-vit-block0-cross-q", "up-level1-upsampler-out"),
        50, "Playground v2", 1024, "GDF B.4", {"ade20k": 45.71, "cityscapes": 75.89}, 2560,
        note="one of two models: pair with Ours-XL-t/segmentation-xl",
    ),
    Preset(
        "VPD", ("up-level0-repeat1-res-out", "up-level1-repeat1-vit-out", "up-level2-repeat1-vit-out"), 50,
        "SD 1.5", 512, "GDF C.2, VPD run again with a frozen UNet", {"ade20k": 37.63, "cityscapes": 55.06}, 3200,
        note="VPD learns its prompt",
    ),
    Preset(
        "DIFT-semantic", (_UPSAMPLERS[1],), 261, "SD 2.1", 768, "DIFT (arXiv 2306.03881), index 1",
        {"spair": (None, 52.90)}, 1280, _EIGHT,
    ),
    Preset("DIFT-geometric", (_UPSAMPLERS[2],), 0, "SD 2.1", 768, "DIFT, index 2", {}, 640, _EIGHT),
    Preset("DIFT-video", (_UPSAMPLERS[2],), 51, "SD 2.1", 768, "DIFT, index 2 at t = 51", {}, 640, _EIGHT),
    Preset(
        "DHF", tuple(f"up-level{i}-repeat{j}-res-increment" for i in range(4) for j in range(3)), 50, "SD 1.5", 512,
        "Diffusion Hyperfeatures (arXiv 2305.14334), one timestep of many", {"spair": (72.56, 64.61)}, 10560,
        note="DHF mixes the steps of a 50-step inversion with learned weights; this taps one",
    ),
    Preset(
        "CleanDIFT", (_UPSAMPLERS[1],), 261, "CleanDIFT's fine-tuned SD 2.1", 768,
        "CleanDIFT (arXiv 2412.03439)", {}, 1280,
        noise=False, note="needs CleanDIFT's UNet weights, which take the latent without noise",
    ),
    Preset(
        "DiTF-Flux", ("vit-block28-in",), 260, "Flux.1-dev", 640, "DiTF (arXiv 2505.18584)",
        {"spair": (None, 67.1)}, 3072, _EIGHT, modulate=True, discard=(154, 1446),
        note="block input 29.9 raw, 65.3 modulated; images with a long side of 640, a caption per image, guidance 3.5",
    ),
    Preset(
        "portraits", _PORTRAITS, 50, "portraits", 64, "Vitrine: Ours-v1.5 adapted to two levels",
        {}, 96 + 96 + 96 + 32,
    ),
    Preset(
        "portraits-legacy", ("up-level0-upsampler-out", "up-level1-repeat1-vit-out"), 50, "portraits", 64,
        "Vitrine: Legacy-v1.5 adapted to two levels", {}, 96 + 32,
    ),
)  # fmt: skip

PRESETS: dict[str, Preset] = {p.name: p for p in _ALL}
"""Every preset by name."""


def preset(name: str) -> Preset:
    """Look up a preset; case is ignored."""
    folded = {key.lower(): value for key, value in PRESETS.items()}
    if str(name).lower() in folded:
        return folded[str(name).lower()]
    raise refuse("preset", name, list(PRESETS), "choose one of them, or name layers")


FORMAT, VERSION = "vitrine-feature-preset", 1


@dataclass(frozen=True)
class FeaturePreset(Shared):
    """A :class:`Preset` and the model it was chosen on.

    Attributes:
        preset: site names, timestep, seeds, scores.
        fingerprint: of the model; empty: not checked.
        info: how it was chosen: rule, budget, what was dropped and why.
    """

    FILE = "feature-preset.json"
    TITLE = "Layers of one model"
    ABOUT = "Which activations of one diffusion model match points and parts (GDF, arXiv:2410.03558)."
    FOLDER = "vitrine_presets"

    preset: Preset
    fingerprint: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuses another model than the one for which the sites were chosen.

        Args:
            fingerprint: of the model; needed while its modules are patched.
        """
        sites = sites_of(backbone)
        missing = [a for a in self.preset.addresses if a not in sites]
        actual = fingerprint or fingerprint_of(backbone)
        if missing or (self.fingerprint and not same_weights(self.fingerprint, actual)):
            shown = f"{self.preset.name!r} for model {short(self.fingerprint) or self.preset.model}"
            shown += f", whose layers {missing[:3]} are not here" if missing else ""
            raise refuse(
                "feature preset", shown, f"one of this model, {short(actual)}", "rank the layers of this model"
            )

    def save(self, path: str | Path) -> Path:
        """Writes JSON atomically."""
        table = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "info": self.info}
        return save_table(path, table | {"preset": self.preset.to_dict()}, self._of_table)

    @classmethod
    def load(cls, path: str | Path) -> FeaturePreset:
        """Reads a preset file."""
        accepted = f"a JSON file of {FORMAT} version {VERSION}"
        with named(path, "feature preset", accepted, "save it again, or download it again"):
            return cls._of_table(parse_table(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def _of_table(cls, table: dict[str, Any]) -> FeaturePreset:
        if table["format"] != FORMAT or table["version"] != VERSION:
            raise ValueError(f"format {table['format']!r} version {table['version']!r}")
        settings = {name: value for name, value in table["preset"].items() if name in Preset.__dataclass_fields__}
        if not isinstance(settings["addresses"], list) or not isinstance(settings["name"], str):
            raise ValueError("a preset has a name and a list of addresses")
        seeds = [integer(seed, "seed", 0, (1 << 64) - 1) for seed in settings["seeds"]]
        settings |= {"addresses": [*map(str, settings["addresses"])], "seeds": seeds}
        preset = Preset.from_dict(settings)
        _check(preset)
        preset.config()  # refuses invalid values
        return cls(preset, str(table["fingerprint"]), dict(table["info"]))


_MOST_SEEDS, _MOST_SITES, _LARGEST = 1000, 10_000, 1 << 20


def _check(preset: Preset) -> None:
    """Raises for implausible sizes: each seed costs a forward, each site a look-up."""
    texts = (preset.name, preset.model, preset.source, preset.note, *preset.addresses)
    if not all(isinstance(text, str) and len(text) <= 10_000 and printable(text) == text for text in texts):
        raise ValueError("names with unprintable characters")
    if not 0 < len(preset.addresses) <= _MOST_SITES or not 0 < len(preset.seeds) <= _MOST_SEEDS:
        raise ValueError(f"{len(preset.addresses)} addresses, {len(preset.seeds)} seeds")
    if not 0 <= preset.timestep <= 10_000:
        raise ValueError(f"timestep {preset.timestep}")
    for count in (preset.size, preset.channels, *preset.discard):
        integer(count, "size, channels and discarded channels", 0, _LARGEST)
