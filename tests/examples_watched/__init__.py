"""Scripts of PyTorch's own examples and tutorials, run watched without an edit.

``python -m tests.examples_watched.run FOLDER`` with a folder that holds clones of
``pytorch/examples`` (as ``examples``) and, if wanted, ``pytorch/tutorials`` (as ``tutorials``).
"""
