"""A run, or an exported folder, behind the interface that lm-eval asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
from qkflow.lm_eval.writing import Wish, read_wish
from qkflow.models import Decoder, stream
from qkflow.training import load_run
from qkflow.training.environment import pick_device

EXPORTED_LENGTH = 1024
"""Tokens that the model of an exported folder reads at once unless told: the folder does not say what it is used to."""

Requests = list[Any]
"""lm-eval's own: the arguments of each are its `args`."""
Row = tuple[list[int], list[int]]
"""Tokens to read, and tokens to score behind them."""
Answer = tuple[float, bool]
"""The log-likelihood of the latter, and whether each was the likeliest."""


class QKFlowLM(TemplateLM):
    """A language model of ours as lm-eval asks one."""

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
        self.model, self.text, length = _opened(Path(run))
        self._device = _device(device)
        self.model.to(self._device).eval()
        self.max_length = length if max_length is None else int(max_length)
        self.max_gen_toks = int(max_gen_toks)
        size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.batch_size = size if max_batch_size is None else min(size, int(max_batch_size))
        for name in ("max_length", "max_gen_toks", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token, behind which texts begin."""
        return self.text.end

    @property
    def tokenizer_name(self) -> str:
        """Names what lm-eval may have cached of our tokens."""
        return f"qkflow-{self.text.kind}-{self.text.vocabulary}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, behind the end-of-document token unless told otherwise."""
        tokens = self.text.encode(string.encode())
        return tokens if add_special_tokens is False else [self.text.end, *tokens]

    def loglikelihood_rolling(self, requests: Requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts."""
        rows, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self.text.end, self.max_length, 1):
                rows.append(make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._answers(rows, quiet=disable_tqdm), strict=True):
            totals[owner] += nats
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Requests, disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each text, up to the first of its stop texts."""
        groups: dict[Wish, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(read_wish(request.args[1], self.max_gen_toks), []).append(number)
        written = [""] * len(requests)
        for wish, numbers in groups.items():
            # what is written needs room too, but not all of it
            room = max(self.max_length - wish.tokens, self.max_length // 2, 1)
            prompts = {number: self.tok_encode(requests[number].args[0])[-room:] for number in numbers}
            if wish.sampling.temperature == 0:  # else a text's seed would depend on where the others put it
                numbers.sort(key=lambda number: -len(prompts[number]))
            for begin, batch in _batches(numbers, self.batch_size, quiet=disable_tqdm):
                texts = self._written([prompts[number] for number in batch], wish.later(begin))
                for number, text in zip(batch, texts, strict=True):
                    written[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return written

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[Answer]:
        answers = self._answers([request[1:] for request in requests], quiet=disable_tqdm)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def _answers(self, rows: Sequence[Row], *, quiet: bool) -> list[Answer]:
        """The answer of each row: batches of about the same length, the longest first."""
        if (longest := max((len(scored) for _, scored in rows), default=0)) > self.max_length:
            raise UsageError(
                f"a continuation of {longest} tokens does not fit into max_length {self.max_length}: give a larger one,"
                " or ask for a rolling likelihood"
            )
        cut = [([*read, *scored][-self.max_length - 1 :], len(scored)) for read, scored in rows]
        answers: list[Answer] = [(0.0, True)] * len(rows)
        order = sorted((number for number in range(len(rows)) if cut[number][1]), key=lambda n: -len(cut[n][0]))
        for _, batch in _batches(order, self.batch_size, quiet=quiet):
            for number, answer in zip(batch, self._scored([cut[number] for number in batch]), strict=True):
                answers[number] = answer
        return answers

    def _scored(self, rows: Sequence[tuple[list[int], int]]) -> list[Answer]:
        """The answers of rows of tokens, of which the last so many are scored. Padding on the right changes nothing."""
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
            nats = F.cross_entropy(logits.float(), targets, reduction="none").double().cpu()
            hits = (logits.argmax(-1) == targets).cpu()
        counts = [scored for _, scored in rows]
        pairs = zip(nats.split(counts), hits.split(counts), strict=True)
        return [(-float(own.sum()), bool(hit.all())) for own, hit in pairs]

    def _written(self, prompts: Sequence[Sequence[int]], wish: Wish) -> list[str]:
        """What is written behind the prompts of a batch; no more than is needed for all to be done."""
        texts, done = [b""] * len(prompts), [False] * len(prompts)
        for step in stream(self.model, prompts, tokens=wish.tokens, sampling=wish.sampling, stop=[self.text.end]):
            for row, token in enumerate(step):
                if done[row] or token is None:
                    done[row] = True
                    continue
                texts[row] += self.text.piece(token)
                found = [at for stop in wish.stops if (at := texts[row].find(stop)) >= 0]
                if found:
                    texts[row], done[row] = texts[row][: min(found)], True
            if all(done):
                break
        return [text.decode(errors="replace") for text in texts]


register_model("qkflow")(QKFlowLM)


def _opened(folder: Path) -> tuple[Decoder, Tokenizer, int]:
    """The model of a run, or of an exported folder; its tokens; and how many of them it reads at once."""
    if not _exported(folder):
        run = load_run(folder)
        return run.model, run.tokenizer, run.config.context
    found = read_folder(folder)
    if found.tokenizer is None:
        raise UsageError(f"{folder} has no tokenizer: export the run again with `qkflow export`")
    return found.model(), found.tokenizer, EXPORTED_LENGTH


def _exported(folder: Path) -> bool:
    try:
        data = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # a run's own reader says what is wrong
    return isinstance(data, dict) and "model_type" in data


def _device(name: str | None) -> torch.device:
    kind = (name or "auto").partition(":")[0]
    if kind not in (known := ("auto", "cpu", "cuda", "mps")):
        raise unknown("device", kind, known)
    found = pick_device(kind)
    return torch.device(name) if name and ":" in name else found


def _batches(numbers: Sequence[int], size: int, *, quiet: bool) -> Iterator[tuple[int, Sequence[int]]]:
    """So many at a time, each batch with the place at which it begins."""
    with tqdm(total=len(numbers), disable=quiet, unit="request") as bar:
        for begin in range(0, len(numbers), size):
            batch = numbers[begin : begin + size]
            yield begin, batch
            bar.update(len(batch))
