"""Layouts in a training loop: binding, relayout, experts that move."""
