"""Options that several commands share: how a model is loaded, and a space that is written anew."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from ..pipelines.loading import LoadConfig
from ..settings.setting_checks import Writes

Load = Annotated[LoadConfig, arg(name="")]
"""How a command loads its model: `--device`, `--dtype` ... without a prefix on the command line."""

OutSpace = Annotated[Path | None, Writes("file", otherwise="space")]
"""The file of a space that a command changes; where it is None, the space's own."""
