"""How a task of lm-eval wants something to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qkflow.errors import UsageError, unknown
from qkflow.models import Sampling

_LENGTHS = ("max_gen_toks", "max_new_tokens")
_OPTIONS = (*_LENGTHS, "until", "num_beams", "do_sample", "temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a task wants something to be written."""

    stops: tuple[bytes, ...]
    """End before the first of these."""
    tokens: int
    """At most so many."""
    sampling: Sampling
    """How they are drawn."""

    def later(self, by: int) -> Wish:
        """The same for the texts from that place on: what is drawn for a text depends on its own place alone."""
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + by))


def read_wish(options: Mapping[str, Any], most: int) -> Wish:
    """The options of a generation, with at most so many tokens unless they say it; unknown ones are a `UsageError`.

    >>> wish = read_wish({"until": "\\n", "do_sample": False, "temperature": 0.7}, 256)
    >>> wish.stops, wish.tokens, wish.sampling.temperature
    ((b'\\n',), 256, 0.0)
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown("generation option", name, _OPTIONS)
    if (beams := options.get("num_beams", 1)) != 1:
        raise UsageError(f"num_beams is {beams}: qkflow.lm_eval writes without beams; lm-eval's own hf model has them")
    until = options.get("until") or []
    sampled = options.get("do_sample", bool(options.get("temperature")))
    if not isinstance(sampled, bool):
        raise UsageError(f"do_sample is {sampled!r}: give true or false")
    tokens = next((options[name] for name in _LENGTHS if options.get(name) is not None), most)
    if int(tokens) < 1:
        raise UsageError(f"{tokens} tokens were asked for: give max_gen_toks of at least 1")
    sampling = Sampling(
        temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
        top_k=options.get("top_k") or None,
        top_p=options.get("top_p"),
        seed=int(options.get("seed", 0)),
    )
    return Wish(
        stops=tuple(stop.encode() for stop in ([until] if isinstance(until, str) else until) if stop),
        tokens=int(tokens),
        sampling=sampling,
    )
