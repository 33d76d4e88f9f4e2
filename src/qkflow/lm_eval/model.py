"""A run or an exported model folder as an lm-eval model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from qkflow.data import Tokenizer
from qkflow.errors import UsageError, unknown
from qkflow.hub import read_folder
from qkflow.models import Decoder, Sampling, stream
from qkflow.training import load_run
from qkflow.training.reproducibility import pick_device

DEFAULT_LENGTH = 1024
"""Default `max_length` of an exported folder, which does not record the context of its run."""

_DEFAULT_DEVICE = "cuda:0"
"""The device that lm-eval's command line passes if none is given."""
logger = logging.getLogger(__name__)

Requests = list[Any]
"""Requests of lm-eval, with their arguments in `args`."""
Score = tuple[float, bool]
"""The log-likelihood of a continuation, and whether it is what greedy decoding writes."""


class QKFlowLM(TemplateLM):
    """A qkflow language model with the interface of lm-eval."""

    def __init__(
        self,
        run: Path | str,
        *,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        self.model, self._tokenizer, length = _load(Path(run))
        self._device = _parse_device(device)
        self.model.to(self._device).eval()
        self.max_length = length if max_length is None else int(max_length)
        self.max_gen_toks = int(max_gen_toks)
        size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.batch_size = size if max_batch_size is None else min(size, int(max_batch_size))
        for name in ("max_length", "max_gen_toks", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> QKFlowLM:
        """As in lm-eval, on a device of this machine."""
        return super().create_from_arg_string(arg_string, _with_available_device(additional_config))

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> QKFlowLM:
        """As in lm-eval, on a device of this machine."""
        return super().create_from_arg_obj(arg_dict, _with_available_device(additional_config))

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._tokenizer.end

    @property
    def tokenizer_name(self) -> str:
        """The key under which lm-eval caches tokenized requests."""
        return f"qkflow-{self._tokenizer.kind}-{self._tokenizer.vocabulary}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, after the end-of-document token unless `add_special_tokens` is False."""
        tokens = self._tokenizer.encode(string.encode())
        return tokens if add_special_tokens is False else [self._tokenizer.end, *tokens]

    def loglikelihood_rolling(self, requests: Requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self._tokenizer.end, self.max_length, 1):
                windows.append(make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._score(windows, disable_tqdm), strict=True):
            totals[owner] += log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Score]:
        scores = self._score([request[1:] for request in requests], disable_tqdm)
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], score)
        return scores

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[Score]:
        """Score pairs of context and continuation, in batches of similar length, the longest first."""
        if (longest := max((len(continuation) for _, continuation in pairs), default=0)) > self.max_length:
            raise UsageError(
                f"a continuation of {longest} tokens exceeds max_length {self.max_length}: increase max_length, or use"
                " a rolling likelihood"
            )
        rows = [
            ([*context, *continuation][-self.max_length - 1 :], len(continuation)) for context, continuation in pairs
        ]
        scores: list[Score] = [(0.0, True)] * len(pairs)
        order = sorted((index for index, (_, scored) in enumerate(rows) if scored), key=lambda i: -len(rows[i][0]))
        for _, batch in _batches(order, self.batch_size, disable_tqdm):
            for index, score in zip(batch, self._score_batch([rows[index] for index in batch]), strict=True):
                scores[index] = score
        return scores

    def _score_batch(self, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
        """Score rows of tokens and the number of final tokens to score. Padding on the right changes nothing."""
        width = max(len(tokens) for tokens, _ in rows) - 1
        batch = torch.zeros(len(rows), width + 1, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, (tokens, scored) in enumerate(rows):
            batch[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, len(tokens) - 1 - scored : len(tokens) - 1] = True
        batch, mask = batch.to(self._device), mask.to(self._device)
        with torch.inference_mode():
            x, _ = self.model.read(batch[:, :-1])
            logits, targets = self.model.logits(x[mask]), batch[:, 1:][mask]
            losses = F.cross_entropy(logits.float(), targets, reduction="none").double().cpu()
            is_greedy = (logits.argmax(-1) == targets).cpu()
        counts = [scored for _, scored in rows]
        return [
            (-float(row_losses.sum()), bool(row_greedy.all()))
            for row_losses, row_greedy in zip(losses.split(counts), is_greedy.split(counts), strict=True)
        ]

    def generate_until(self, requests: Requests, disable_tqdm: bool = False) -> list[str]:
        """Generate from each prompt, up to the first stop string."""
        groups: dict[GenerationOptions, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(GenerationOptions.read(request.args[1], self.max_gen_toks), []).append(index)
        texts = [""] * len(requests)
        for options, indices in groups.items():
            # leave room for the generated tokens, but keep at least half of the context for the prompt
            prompt_length = max(self.max_length - options.max_tokens, self.max_length // 2, 1)
            prompts = {index: self.tok_encode(requests[index].args[0])[-prompt_length:] for index in indices}
            if options.sampling.temperature == 0:  # sampled texts depend on their position
                indices.sort(key=lambda index: -len(prompts[index]))
            for start, batch in _batches(indices, self.batch_size, disable_tqdm):
                generated = self._generate([prompts[index] for index in batch], options.with_seed_offset(start))
                for index, text in zip(batch, generated, strict=True):
                    texts[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _generate(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[str]:
        """Generate from a batch of prompts until all of them have stopped."""
        texts, has_stopped = [b""] * len(prompts), [False] * len(prompts)
        end = [self._tokenizer.end]
        for step in stream(self.model, prompts, tokens=options.max_tokens, sampling=options.sampling, stop=end):
            for row, token in enumerate(step):
                if has_stopped[row] or token is None:
                    has_stopped[row] = True
                    continue
                texts[row] += self._tokenizer.piece(token)
                stops = [start for stop in options.stops if (start := texts[row].find(stop)) >= 0]
                if stops:
                    texts[row], has_stopped[row] = texts[row][: min(stops)], True
            if all(has_stopped):
                break
        return [text.decode(errors="replace") for text in texts]


register_model("qkflow")(QKFlowLM)

_LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens")
_OPTIONS = (*_LENGTH_OPTIONS, "until", "num_beams", "do_sample", "temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The generation options of a task."""

    stops: tuple[bytes, ...]
    max_tokens: int
    sampling: Sampling

    @classmethod
    def read(cls, options: Mapping[str, Any], max_tokens: int) -> GenerationOptions:
        """Read `generation_kwargs`; unknown options raise `UsageError`. `max_tokens` is the default length.

        >>> options = GenerationOptions.read({"until": "\\n", "do_sample": False, "temperature": 0.7}, 256)
        >>> options.stops, options.max_tokens, options.sampling.temperature
        ((b'\\n',), 256, 0.0)
        """
        for name in options:
            if name not in _OPTIONS:
                raise unknown("generation option", name, _OPTIONS)
        if (beams := options.get("num_beams", 1)) != 1:
            raise UsageError(f"num_beams is {beams}: qkflow.lm_eval has no beam search; use lm-eval's hf model")
        is_sampled = options.get("do_sample", bool(options.get("temperature")))
        if not isinstance(is_sampled, bool):
            raise UsageError(f"do_sample is {is_sampled!r}: expected true or false")
        max_tokens = int(next((options[name] for name in _LENGTH_OPTIONS if options.get(name) is not None), max_tokens))
        if max_tokens < 1:
            raise UsageError(f"max_gen_toks must be at least 1, got {max_tokens}")
        until = options.get("until") or []
        return cls(
            stops=tuple(stop.encode() for stop in ([until] if isinstance(until, str) else until) if stop),
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=float(options.get("temperature", 1.0)) if is_sampled else 0.0,
                top_k=options.get("top_k") or None,
                top_p=options.get("top_p"),
                seed=int(options.get("seed", 0)),
            ),
        )

    def with_seed_offset(self, offset: int) -> GenerationOptions:
        """The same options for texts from position `offset` on: a sample depends only on its own position."""
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + offset))


def _load(folder: Path) -> tuple[Decoder, Tokenizer, int]:
    """The model, the tokenizer and the context length of a run or an exported folder."""
    if not _is_exported(folder):
        run = load_run(folder)
        return run.model, run.tokenizer, run.config.context
    exported = read_folder(folder)
    if exported.tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer: export the run again with `qkflow export`")
    return exported.model(), exported.tokenizer, DEFAULT_LENGTH


def _is_exported(folder: Path) -> bool:
    try:
        data = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # load_run explains what is wrong
    return isinstance(data, dict) and "model_type" in data


def _with_available_device(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replace lm-eval's default device by the best one of this machine if there is no CUDA."""
    config = dict(config or {})
    if config.get("device") == _DEFAULT_DEVICE and not torch.cuda.is_available():
        config["device"] = "auto"
        logger.warning("%s is not available: using %s", _DEFAULT_DEVICE, pick_device("auto"))
    return config


def _parse_device(name: str | None) -> torch.device:
    kind = (name or "auto").partition(":")[0]
    if kind not in (known := ("auto", "cpu", "cuda", "mps")):
        raise unknown("device", kind, known)
    device = pick_device(kind)
    return torch.device(name) if name and ":" in name else device


def _batches(indices: Sequence[int], size: int, disable_tqdm: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """Batches of indices, each with the position of its first index; shows a progress bar."""
    with tqdm(total=len(indices), disable=disable_tqdm, unit="request") as bar:
        for start in range(0, len(indices), size):
            batch = indices[start : start + size]
            yield start, batch
            bar.update(len(batch))
