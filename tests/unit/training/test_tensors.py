"""Tensors on disk: saving and loading are exact, and other files are refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkflow.errors import CheckpointError
from qkflow.training.tensors import load_model_tensors, load_tensors, model_tensors, save_tensors


class Payload:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile(kind: str, path: Path, sign: Path) -> None:
    if kind == "torch zip":
        torch.save({"weights": Payload(sign)}, path)
    elif kind == "torch legacy":
        torch.save({"weights": Payload(sign)}, path, _use_new_zipfile_serialization=False)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Payload(sign)))
    else:
        path.write_bytes(pickle.dumps(Payload(sign), protocol=int(kind[-1])))


@pytest.mark.parametrize(
    "kind", ["torch zip", "torch legacy", "zip", *(f"pickle {p}" for p in range(pickle.HIGHEST_PROTOCOL + 1))]
)
@pytest.mark.parametrize("name", ["model.pt", "weights.safetensors"])
def test_a_hostile_file_is_refused_without_running_it(tmp_path: Path, kind: str, name: str) -> None:
    hostile(kind, tmp_path / name, tmp_path / "it ran")
    with pytest.raises(CheckpointError, match="safetensors") as caught:
        load_tensors(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "it ran").exists()
    if kind not in ("pickle 0", "pickle 1"):  # these two formats have no magic number
        assert "can run code when it is opened" in str(caught.value)


def test_saved_tensors_are_loaded_with_type_and_shape(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 4).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "whole": torch.arange(4),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_equal_tensors_give_equal_bytes_with_the_usual_permissions(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(20)}
    save_tensors(tmp_path / "a", tensors)
    save_tensors(tmp_path / "b", dict(reversed(tensors.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (tmp_path / "usual").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_any_altered_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"a": torch.arange(64.0)})
    whole = path.read_bytes()
    for position in range(len(whole) - 256, len(whole), 5):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match="altered"):
            load_tensors(path)


def test_a_header_whose_length_looks_like_a_pickle_is_still_read(tmp_path: Path) -> None:
    """A safetensors file starts with a length, which may look like a pickle (0x80) or a zip file (`PK`)."""
    errors = set()
    for count in range(1, 64):
        path = tmp_path / f"{count}"
        save_tensors(path, {f"{i:04d}": torch.zeros(1) for i in range(count)})
        errors.add(path.read_bytes()[0])
        assert len(load_tensors(path)) == count
    assert 0x80 in errors


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, twin = tied(), tied()
    assert list(model_tensors(model)) == ["0.weight"]
    save_tensors(tmp_path / "t", model_tensors(model))
    load_model_tensors(twin, load_tensors(tmp_path / "t"))
    assert torch.equal(twin[1].weight, model[0].weight)
    assert twin[1].weight is twin[0].weight


def test_weights_of_another_model_are_refused_without_changes() -> None:
    model = nn.Linear(3, 4)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="'bias' is in only one of them"):
        load_model_tensors(model, {"weight": torch.zeros(4, 3)})
    with pytest.raises(CheckpointError, match=r"'bias' is torch.float32 \[5\]"):
        load_model_tensors(model, {"weight": torch.zeros(4, 3), "bias": torch.zeros(5)})
    assert torch.equal(model.weight, before)
