"""Finished runs of other studies, which need not be trained again: a run follows from its config and its data."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qkflow.config import to_dict
from qkflow.errors import UsageError
from qkflow.experiment.study_dir import holds_study, read_decisions, read_design, refuse_links
from qkflow.io import replace
from qkflow.training import TrainConfig
from qkflow.training.reproducibility import changes, platform_record
from qkflow.training.run_dir import finished, read_json

_NOT_COPIED = shutil.ignore_patterns("lock", "checkpoints", ".*")


class FinishedRuns:
    """The finished runs of some studies, by config.

    A run counts if its files are those that its study recorded, and if it was trained on the same data, processor,
    kernels and versions as a new run would be.
    """

    def __init__(self, studies: Iterable[Path]) -> None:
        self._folders: dict[str, Path] = {}
        self._platform = platform_record()
        for study in studies:
            if holds_study(study):
                self._add(study)

    def copy(self, config: TrainConfig, digest: str, folder: Path) -> Path | None:
        """Copy the run with this config and data into a new folder; the run that was copied, None if there is none."""
        source = self._folders.get(_key(to_dict(config), digest))
        if source is None or folder.exists() or finished(source) is None:
            return None
        replace(folder, lambda path: shutil.copytree(source, path, ignore=_NOT_COPIED))
        return source

    def _add(self, study: Path) -> None:
        refuse_links(study)
        decisions = read_decisions(study, read_design(study))
        for record in decisions.of_kind("run"):
            folder = Path(record["folder"])
            if not record["files"] or decisions.changed_file(study, folder) is not None:
                continue
            try:
                config, environment = (read_json(study / folder / name) for name in ("config.json", "environment.json"))
            except UsageError:
                continue
            now = {**environment, **{name: self._platform[name] for name in ("cpu", "kernels", "versions")}}
            if environment.get("device") == "cpu" and not changes(environment, now):
                self._folders.setdefault(_key(config, environment.get("data", {}).get("digest", "")), study / folder)


def _key(config: dict[str, Any], digest: str) -> str:
    return json.dumps([config, digest], sort_keys=True)
