"""Functions of tensors, without parameters or state. The layout is `[b, t, h, k]` everywhere."""
