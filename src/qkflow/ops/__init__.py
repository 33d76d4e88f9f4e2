"""Mathematics on tensors: no parameters, no state. Layout `[b, t, h, k]` everywhere."""
