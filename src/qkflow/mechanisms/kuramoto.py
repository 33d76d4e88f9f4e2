"""Kuramoto attention (Nunley, https://arxiv.org/abs/2606.11585): phases that synchronise, on the torus or on any group.

Both read a stream of coordinates, angles or group elements, and return how these change; a decoder made of them embeds
tokens as phases (`qkflow.models.blocks.PhaseBlock`). `frustrated=True` is the successor's delay and lag
(https://arxiv.org/abs/2606.18694).
"""

from __future__ import annotations

from dataclasses import dataclass

from qkflow.errors import UsageError
from qkflow.mechanisms.synchrony import SynchronyMechanism
from qkflow.mechanisms.synchrony_config import SynchronyConfig
from qkflow.ops.groups import TORUS, Group, check_axioms, find_group


@dataclass(frozen=True, kw_only=True)
class KuramotoConfig(SynchronyConfig):
    """Options of `KuramotoAttention`; called with a width and heads, it makes one."""

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> KuramotoAttention:
        """The mechanism of one layer; they are all alike."""
        return KuramotoAttention(width, self.heads_of(heads), layer, layers, config=self)


class KuramotoAttention(SynchronyMechanism):
    """Attention over phases: every number of the stream is an angle, drawn to those of the tokens before it.

    >>> import torch
    >>> layer = KuramotoAttention(width=32, heads=4)
    >>> theta = torch.randn(2, 10, 32)
    >>> change, state = layer(theta)
    >>> around, _ = layer(theta + 2 * torch.pi)  # a whole turn is no turn
    >>> torch.allclose(change, around, atol=1e-4), state.length.tolist()
    (True, [10, 10])
    """

    def __init__(
        self, width: int, heads: int, layer: int = 0, layers: int = 1, *, config: KuramotoConfig = KuramotoConfig()
    ) -> None:
        super().__init__(width, heads, TORUS, config)


@dataclass(frozen=True, kw_only=True)
class GroupConfig(SynchronyConfig):
    """Options of `GroupAttention`; called with a width and heads, it makes one."""

    group: str = "su2"
    """The group: `torus`, `su2` (4 numbers an element), `so3` (9), `so4` (16), and so on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        find_group(self.group)  # raises if there is none

    def __call__(self, width: int, heads: int, layer: int, layers: int) -> GroupAttention:
        """The mechanism of one layer; they are all alike."""
        return GroupAttention(width, self.heads_of(heads), layer, layers, config=self)


class GroupAttention(SynchronyMechanism):
    """Attention over elements of a compact group: of ours by its name in the config, or of one of your own.

    >>> import torch
    >>> layer = GroupAttention(width=32, heads=4)
    >>> change, state = layer(torch.randn(2, 10, 32))
    >>> change.shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layer: int = 0,
        layers: int = 1,
        *,
        config: GroupConfig = GroupConfig(),
        on: Group | None = None,
    ) -> None:
        if on is not None:
            check_axioms(on)
            if config.group != GroupConfig.group:
                raise UsageError(f"a group is given by name or as itself, got {config.group!r} and {on.name!r}")
        super().__init__(width, heads, find_group(config.group) if on is None else on, config)
