"""`qkflow export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from qkflow.cli.console import Console


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a run to a folder in the format of the Hugging Face Hub.

    The folder holds a config, safetensors weights, a tokenizer and a model card.

    For example:
      qkflow export runs/diff models/diff
      qkflow export runs/large models/large --shard-size 500MB
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, written by `qkflow train`."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Output folder. Must be new or empty."""
    shard_size: str = "5GB"
    """Largest size of one weights file; larger models are split."""

    def run(self) -> int:
        """Write the folder and print how to load it."""
        from qkflow.data.text.tokenizers import saved_tokenizer
        from qkflow.hub import export_run  # imports the tokenizers library, which other commands do not need
        from qkflow.hub.export import loading_code

        export_run(self.run_folder, self.folder, shard_size=self.shard_size)
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"wrote {self.folder}. To load it (requires qkflow[hf]):\n", markup=False)
        for line in loading_code(str(self.folder), saved_tokenizer(str(self.folder))):
            console.print(f"  {line}".rstrip(), markup=False)
        return 0
