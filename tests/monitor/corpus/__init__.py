"""Programs as people write them, watched: none of them has a fault, so none may have an incident.

Each follows the communication of a public library, script or idiom; none of their code is here.
`python -m tests.monitor.corpus.run` runs them.
"""
