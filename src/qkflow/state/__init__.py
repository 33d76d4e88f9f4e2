"""States: what a mechanism passes from one call to the next.

A `State` is a value: a call returns a new state and leaves the previous one usable. It knows its length per row, moves
between devices, and can be detached, selected by row (for beam search) and measured in bytes.

`KVCache` holds every past token. With gradients enabled each call creates new tensors. In inference it appends in place
to a buffer that doubles when it is full. Older states on the same buffer stay valid, because a state that has already
been continued copies itself before it is continued again. With a window, a full buffer drops unreachable tokens.

`ShiftedKVCache` is a cache whose tokens become visible one step later.

`RecurrentState` has a fixed size. It is never modified in place.
"""

from qkflow.state.base import State
from qkflow.state.kv_cache import KVCache
from qkflow.state.recurrent import RecurrentState
from qkflow.state.shifted import ShiftedKVCache

__all__ = ["KVCache", "RecurrentState", "ShiftedKVCache", "State"]
