"""Checkpoints of any format as named tensors and objects. No torch."""
