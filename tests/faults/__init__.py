"""Faults planted in real ranks, and what the monitor says of them.

``python -m tests.faults.run`` makes the confusion matrix, ``python -m tests.faults.clean`` the long
run without a fault, ``python -m tests.faults.upset`` breaks the monitor itself.
"""
