"""What several commands share: ``--device``, ``--dtype``, ``--revision``, ``--variant`` and ``--config``."""

from typing import Annotated

from tyro.conf import arg

from ..pipelines.loading import LoadConfig

Load = Annotated[LoadConfig, arg(name="")]
"""How a command loads its model; without a prefix on the command line."""
