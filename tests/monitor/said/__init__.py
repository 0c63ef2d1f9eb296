"""Failures as jobs say them: real ones of gloo ranks, and public texts in our own short form."""
