"""Both readers refuse a folder unless it is a complete qkflow model, and run no code in it."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from qkflow.errors import UsageError
from qkflow.hf import QKFlowConfig, QKFlowForCausalLM
from qkflow.hub import read_folder

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"


class TouchOnLoad:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def assert_refused(folder: Path, *fragments: str) -> None:
    """Both readers raise a `UsageError` with one line that contains the fragments."""
    for read in (read_folder, AutoModelForCausalLM.from_pretrained):
        with pytest.raises((UsageError, TypeCheckError)) as caught:
            read(folder)
        if isinstance(caught.value, TypeCheckError):  # the tests check types at run time
            assert read is not read_folder
            continue
        assert "\n" not in str(caught.value)
        for fragment in fragments:
            assert fragment in str(caught.value)


def remove_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()


def test_an_unchanged_folder_is_read(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert read_folder(folder).weights
    assert AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00001.bin", "model.safetensors"]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_pickle_is_refused_and_not_opened(folder: Path, tmp_path: Path, name: str, zipped: bool) -> None:
    remove_weights(folder)
    payload = pickle.dumps(TouchOnLoad(tmp_path / "executed"))
    if zipped:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", payload)
    else:
        (folder / name).write_bytes(payload)
    assert_refused(folder, "which can run code when it is opened", "safetensors only")
    assert not (tmp_path / "executed").exists()
    pickle.loads(payload)  # the payload works
    assert (tmp_path / "executed").exists()


def test_a_pickle_beside_the_weights_is_not_opened(folder: Path, tmp_path: Path) -> None:
    payload = pickle.dumps(TouchOnLoad(tmp_path / "executed"))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(payload)
    assert read_folder(folder).weights
    assert AutoModelForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "executed").exists()


def test_options_that_would_load_other_files_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="safetensors only"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=False)
    with pytest.raises(UsageError, match="ignored silently"):
        AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    with pytest.raises(UsageError, match="leave out variant"):
        AutoModelForCausalLM.from_pretrained(folder, variant="fp16")
    (folder / "evil.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="give the folder"):
        QKFlowForCausalLM.from_pretrained(folder / "evil.bin", config=QKFlowConfig())


@pytest.mark.parametrize("name", ["adapter_config.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_files_that_would_replace_the_weights_are_refused(folder: Path, name: str) -> None:
    shutil.copy(folder / FIRST, folder / name)
    with pytest.raises(UsageError, match="instead of its weights"):
        QKFlowForCausalLM.from_pretrained(folder)


def test_code_in_the_folder_is_refused_with_trust_remote_code(folder: Path, tmp_path: Path) -> None:
    (folder / "custom_generate").mkdir()
    touch = f"import pathlib; pathlib.Path({str(tmp_path / 'executed')!r}).touch()\n"
    (folder / "custom_generate" / "generate.py").write_text(touch)
    with pytest.raises(UsageError, match="which is code"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("changes", [{"mechanism": "qdelta"}, {"hidden_size": 32}, {"tie_word_embeddings": False}])
def test_overrides_that_do_not_match_the_weights_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    for load in (AutoModelForCausalLM.from_pretrained, QKFlowForCausalLM.from_pretrained):
        with pytest.raises(UsageError, match=r"its config requires|do not match the config"):
            load(folder, **changes)


@pytest.mark.parametrize(
    "where", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "\0"]
)
def test_a_shard_outside_the_folder_is_refused(folder: Path, where: str) -> None:
    shutil.copy(folder / FIRST, folder.parent / "outside.safetensors")
    edit(folder, INDEX, lambda index: index["weight_map"].update({"model.embedding.weight": where}))
    assert_refused(folder, "outside the folder")


def test_links_out_of_the_folder_are_refused_except_to_the_blobs_of_the_hub_cache(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.move(folder / FIRST, outside)
    (folder / FIRST).symlink_to(outside)
    assert_refused(folder, "leads out of its folder")
    hub = folder.parent / "models--me--mine"
    (hub / "snapshots").mkdir(parents=True)
    (hub / "blobs").mkdir()
    shutil.move(outside, hub / "blobs" / "abc")
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(Path("../../blobs/abc"))
    shutil.move(folder, hub / "snapshots" / "1")
    assert read_folder(hub / "snapshots" / "1").weights


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda index: index["weight_map"].pop("model.norm.weight"), "do not match their index"),
        (lambda index: index["weight_map"].update({"model.more": FIRST}), "do not match their index"),
        (lambda index: index["weight_map"].update({"model.more": "gone.safetensors"}), "lacks the shard"),
        (lambda index: index["weight_map"].update({"model.more": 3}), "weight_map"),
        (lambda index: index["weight_map"].update({"model.more": "README.md"}), "safetensors only"),
        (lambda index: index.pop("weight_map"), "weight_map"),
        (lambda index: index.update(weight_map=[]), "weight_map"),
    ],
)
def test_an_index_that_does_not_match_the_shards_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], fragment: str
) -> None:
    edit(folder, INDEX, change)
    assert_refused(folder, fragment)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"auto_map": {"AutoConfig": "evil.py"}}, "names code to run"),
        ({"custom_pipelines": {}}, "names code to run"),
        ({"quantization_config": {}}, "unknown key"),
        ({"transformers_weights": "evil.bin"}, "unknown key"),
        ({"hiden_size": 3}, "did you mean 'hidden_size'"),
        ({"hidden_size": "16"}, "expected int"),
        ({"hidden_size": None}, "expected int"),
        ({"num_hidden_layers": True}, "expected int"),
        ({"vocab_size": "x"}, "expected int"),
        ({"vocab_size": 10**400}, "...: expected an integer between -2^63 and 2^63"),
        ({"mechanism": 7}, "mechanism"),
        ({"mechanism": "__import__('os').system('x')"}, "unknown mechanism"),
        ({"mechanism": "standard:window=__import__('os')"}, "window"),
        ({"mechanism": "standrd"}, "did you mean 'standard'"),
        ({"dropout": 2}, "dropout"),
        ({"hidden_size": 10**12}, "model.embedding.weight"),
        ({"vocab_size": 10**12}, "model.embedding.weight"),
        ({"num_hidden_layers": 10**12}, "more modules"),
        ({"intermediate_size": 10**18}, ""),
        ({"intermediate_size": 10**30}, ""),
        ({"mechanism": "standard+affine:alternations=1000000000000"}, "more modules"),
        ({"mechanism": "standard+affine:hidden=1000000000000000000"}, ""),
        ({"mechanism": "deltanet:heads=1000000000000"}, ""),
        ({"num_hidden_layers": 1}, "only in the weights"),
        ({"mechanism": "standard+affine"}, "only in the model"),
        ({"intermediate_size": 9}, "its config requires"),
        ({"tie_word_embeddings": False}, "only in the model"),
        ({"architectures": ["LlamaForCausalLM"]}, "expected QKFlowForCausalLM"),
        ({"architectures": "QKFlowForCausalLM"}, ""),
        ({"num_labels": 10**9}, "at most 100,000"),
        ({"num_labels": "two"}, "a number of labels"),
        ({"id2label": {"x": "y"}}, "label ids and names"),
        ({"id2label": [1, 2]}, "label ids and names"),
        ({"label2id": {"x": "y"}}, "label names and ids"),
        ({"attn_implementation": "someone/kernel"}, "expected 'eager'"),
        ({"dtype": "__class__"}, "one of bfloat16"),
        ({"is_encoder_decoder": True}, "expected false"),
        ({"eos_token_id": "../x"}, "a token id"),
        ({"use_cache": "no"}, "true or false"),
    ],
    ids=str,
)
def test_a_config_that_does_not_match_the_weights_is_refused_without_allocating(
    folder: Path, change: dict[str, Any], fragment: str
) -> None:
    edit(folder, "config.json", lambda config: config.update(change))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(folder, fragment)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_model_of_another_type_is_refused(folder: Path) -> None:
    edit(folder, "config.json", lambda config: config.update(model_type="llama"))
    with pytest.raises(UsageError, match="a model of type 'llama'"):
        read_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"model_type": "qkflow", "vocab_size": 1' + b"0" * 5000 + b"}",
        b'{"model_type": "qkflow", "dtype": 1, "dtype": 2}',
    ],
    ids=lambda content: str(content[:40]),
)
def test_a_config_that_is_not_a_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_folder(folder)
    with pytest.raises(UsageError, match=r"config\.json"):
        QKFlowForCausalLM.from_pretrained(folder)
    with pytest.raises((UsageError, OSError, RecursionError, ValueError, TypeError, AttributeError)):
        AutoModelForCausalLM.from_pretrained(folder)  # transformers itself parses it, to find the model type


def header(path: Path, content: bytes, length: int | None = None, rest: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + rest)


REPEATED_NAME = (
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
)


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "truncated"),
        (lambda path: path.write_bytes(b""), ""),
        (lambda path: path.write_bytes(b"\1\2\3"), ""),
        (lambda path: header(path, b"{}", length=2**62), "a header of"),
        (lambda path: header(path, b"[]"), ""),
        (lambda path: header(path, REPEATED_NAME, rest=bytes(4)), "twice"),
        (
            lambda path: header(
                path, b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}', rest=bytes(4)
            ),
            "",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "not a file"),
    ],
    ids=range(9),
)
def test_truncated_or_forged_weights_are_refused(folder: Path, damage: Callable[[Path], object], fragment: str) -> None:
    damage(folder / FIRST)
    assert_refused(folder, fragment)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda name, tensor: tensor.T.contiguous() if name.endswith("gate.weight") else tensor, "has shape [16, 8]"),
        (lambda name, tensor: tensor.int(), "I32"),
        (lambda name, tensor: tensor[:0], "model.embedding.weight"),
    ],
)
def test_weights_of_another_shape_or_dtype_are_refused(
    folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor], fragment: str
) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    assert_refused(folder, fragment)


def test_a_config_without_a_number_of_labels_is_read(folder: Path) -> None:
    edit(folder, "config.json", lambda config: config.update(num_labels=None))
    assert read_folder(folder).weights.keys() == AutoModelForCausalLM.from_pretrained(folder).model.state_dict().keys()


def test_half_precision_and_nan_weights_are_read(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
        save_file({name: half.fill_(torch.nan) for name, half in halves.items()}, path, metadata={"format": "pt"})
    weights = read_folder(folder).weights
    assert all(tensor.dtype == torch.float32 and bool(tensor.isnan().all()) for tensor in weights.values())


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("{", "damaged"),
        ('{"kind": "nothing"}', "unknown tokenizer"),
        ('{"kind": "bpe", "end": 1000000000000, "model": {}}', "not a valid tokenizer"),
        ('{"kind": "words", "words": ["a b"]}', "must be distinct"),
        ("[1]", "damaged"),
        (json.dumps({"kind": "words", "words": [f"w{n}" for n in range(300)]}), "do not match"),
    ],
)
def test_an_invalid_tokenizer_is_refused(folder: Path, content: str, fragment: str) -> None:
    (folder / "qkflow_tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=fragment):
        read_folder(folder)


@pytest.mark.parametrize("name", ["qkflow_tokenizer.json", "tokenizer.json"])
def test_a_tokenizer_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "outside.json")
    (folder / name).symlink_to(folder.parent / "outside.json")
    with pytest.raises(UsageError, match="leads out of its folder"):
        read_folder(folder)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    remove_weights(folder)
    assert_refused(folder, "has no weights")
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        read_folder(folder)
    with pytest.raises(UsageError, match="is not a directory"):
        read_folder(tmp_path / "nowhere")


NOT_AN_OBJECT = [b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000, b'{"max_length": 1, "max_length": 2}']


@pytest.mark.parametrize("content", NOT_AN_OBJECT)
def test_a_damaged_generation_config_is_refused_by_transformers(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    assert read_folder(folder).weights  # qkflow does not read it
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "content",
    [
        '{"max_new_tokens": -1}',
        '{"cache_implementation": "someone/cache"}',
        '{"watermarking_config": {"x": 1}}',
        '{"validate": 1}',
        '{"a":' * 900 + "1" + "}" * 900,
    ],
    ids=lambda content: content[:40],
)
def test_an_invalid_generation_config_is_refused_before_the_weights_are_loaded(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UsageError, match=r"generation_config\.json is not valid .*: remove it"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, FIRST])
def test_a_pipe_is_not_opened(folder: Path, name: str) -> None:
    """Reading it would wait forever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    for model in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises((UsageError, ValueError)):  # transformers itself looks for config.json
            model.from_pretrained(folder)


def make_pickle(folder: Path) -> None:
    remove_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(TouchOnLoad(folder.parent / "executed")))


def link_out(folder: Path) -> None:
    shutil.move(folder / FIRST, folder.parent / "outside.safetensors")
    (folder / FIRST).symlink_to(folder.parent / "outside.safetensors")


@pytest.mark.parametrize("model", [AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (make_pickle, "which can run code"),
        (link_out, "leads out of its folder"),
        (lambda folder: edit(folder, "config.json", lambda config: config.update(auto_map={})), "names code to run"),
        (lambda folder: edit(folder, "config.json", lambda config: config.update(hidden_size=10**12)), "requires"),
        (lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-7]), "truncated"),
    ],
)
def test_models_without_a_head_and_classifiers_are_checked_as_well(
    folder: Path, model: Any, damage: Callable[[Path], object], fragment: str
) -> None:
    damage(folder)
    with pytest.raises((UsageError, TypeCheckError)) as caught:  # the tests check types at run time
        model.from_pretrained(folder)
    assert isinstance(caught.value, TypeCheckError) or fragment in str(caught.value)
    assert not (folder.parent / "executed").exists()


@pytest.mark.parametrize("seed", range(4))
def test_transformers_loads_a_randomly_damaged_folder_only_if_qkflow_does(
    exported: Path, tmp_path: Path, seed: int
) -> None:
    generator = random.Random(seed)
    for number in range(8):
        folder = Path(shutil.copytree(exported, tmp_path / str(number)))
        file = folder / generator.choice(["config.json", INDEX, *sorted(p.name for p in folder.glob("*.safetensors"))])
        content = bytearray(file.read_bytes())
        start = generator.randrange(min(len(content), 2000))  # headers matter more than numbers
        change = generator.choice(["flip", "cut", "insert", "repeat"])
        if change == "flip":
            content[start] ^= 1 << generator.randrange(8)
        elif change == "cut":
            del content[start : start + generator.choice([1, 8, len(content)])]
        elif change == "insert":
            content[start:start] = generator.randbytes(generator.choice([1, 8]))
        else:
            content[start:start] = content[: generator.randrange(40)]
        file.write_bytes(content)
        try:
            expected = read_folder(folder).model()
        except UsageError:
            with pytest.raises((UsageError, TypeCheckError, OSError, ValueError)):
                AutoModelForCausalLM.from_pretrained(folder)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(folder).model.state_dict()
            for name, tensor in expected.state_dict().items():
                assert torch.equal(loaded[name].float().nan_to_num(), tensor.nan_to_num()), name
