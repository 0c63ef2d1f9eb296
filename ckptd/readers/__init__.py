"""Foreign formats as manifests. No torch."""
