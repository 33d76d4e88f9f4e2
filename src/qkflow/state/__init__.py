"""What a mechanism carries from one call to the next.

A `State` is a value: a call returns a new one, and the one it was given still says what it said. It knows how many
tokens it has seen of each row, moves between devices, can be detached, selected by row (beams) and measured in bytes.

`KVCache` is the state of mechanisms that keep every past token. With gradients on it is functional: new tensors at each
call. In inference it writes behind the tokens it holds, in a buffer that doubles when it is full, so that nothing is
copied for each new token. Older states on the same buffer keep what they see, because nobody writes where they look: a
state whose next place is taken already (it was continued once before) copies itself first. Under a sliding window a
full buffer keeps what can still be seen and forgets the rest.

`ShiftedKVCache` is a cache whose tokens are seen one step late, so that the last one still waits outside.

`RecurrentState` is the state of mechanisms that keep a summary of fixed size. It is functional always.
"""

from qkflow.state.base import State
from qkflow.state.kv_cache import KVCache
from qkflow.state.recurrent import RecurrentState
from qkflow.state.shifted import ShiftedKVCache

__all__ = ["KVCache", "RecurrentState", "ShiftedKVCache", "State"]
