"""Resharding from disk to disk: a checkpoint of one layout written as one of another.

Who does what: `source` and `target` describe both sides, `feed` says what fills a chunk of the
target, `rounds` cuts the work so that it fits the budget, `moves` plans one round, `reading` and
`outputs` move its bytes, `samples` compares witnesses, `parts` and `finish` make the result exist.
"""
