"""Options shared by several commands: loading a model, and the output of a changed space."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Writes

Load = Annotated[LoadConfig, arg(name="")]
"""Model loading: `--device`, `--dtype` ... without a prefix on the command line."""

OutSpace = Annotated[Path | None, Writes("file", otherwise="space")]
"""The output file of a changed space; None overwrites the space."""
