"""`qkflow export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a run as a folder of the Hugging Face Hub: config, safetensors, tokenizer and a model card.

    For example:
      qkflow export runs/diff models/diff
      qkflow export runs/large models/large --shard-size 500MB
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A folder that `qkflow train` made."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where to write; must not exist yet, or be empty."""
    shard_size: str = "5GB"
    """Weights larger than this are spread over several files."""

    def run(self) -> int:
        """Write, and say how to load it."""
        from qkflow.data.text.tokenizer_io import saved_tokenizer
        from qkflow.hub import export_run  # loads the tokenizers library, which other commands seldom need
        from qkflow.hub.export import loading_code

        export_run(self.run_folder, self.folder, shard_size=self.shard_size)
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"wrote {self.folder}. To use it (with qkflow[hf] installed):\n", markup=False)
        for line in loading_code(str(self.folder), saved_tokenizer(str(self.folder))):
            console.print(f"  {line}".rstrip(), markup=False)
        return 0
