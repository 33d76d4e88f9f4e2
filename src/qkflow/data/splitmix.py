"""Random numbers from SplitMix64 with a counter: identical on every machine and for every numpy version.

    x_ij = mix(mix(h(seed) + g (i + 1)) + g (j + 1)),    g = 2^64 / golden ratio                    (1)

is the j-th number of row i, so a row depends only on the seed and its own index.
"""

from __future__ import annotations

import hashlib

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Seed = int | str


def mix64(x: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finalizer, a bijection on uint64 that scatters nearby inputs.

    >>> mix64(np.array([0, 1], dtype=np.uint64)).tolist()
    [0, 6238072747940578789]
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_uint64(seed: Seed, rows: np.ndarray, columns: int) -> np.ndarray:
    """Return random uint64 numbers `[len(rows), columns]` by (1), where `rows` holds the row indices i.

    >>> random_uint64(0, np.array([7]), 2).tolist() == random_uint64(0, np.array([6, 7]), 3)[1:, :2].tolist()
    True
    """
    start = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), dtype="<u8")
    row_states = mix64(start + GOLDEN * (rows.astype(np.uint64) + np.uint64(1)))
    return mix64(row_states[:, None] + GOLDEN * np.arange(1, columns + 1, dtype=np.uint64))


def randint(numbers: np.ndarray, high: int | np.ndarray) -> np.ndarray:
    """Map random uint64 numbers to int64 in [0, high); the modulo bias is below high / 2^64."""
    return (numbers % np.asarray(high, dtype=np.uint64)).astype(np.int64)
