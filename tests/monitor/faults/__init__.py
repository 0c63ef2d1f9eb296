"""Faults planted in real ranks, and what the monitor says of them.

``python -m tests.monitor.faults.run`` makes the confusion matrix,
``python -m tests.monitor.faults.clean`` the long run without a fault, and
``python -m tests.monitor.faults.upset`` breaks the monitor itself.
"""
