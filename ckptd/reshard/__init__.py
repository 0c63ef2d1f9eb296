"""Resharding from disk to disk: a checkpoint of one layout written as one of another.

Who does what: `source` and `target` describe both sides, `feed` says what fills a chunk of the
target, `moves` cuts the work into rounds that fit the budget and plans each, `reading` and
`execute` move its bytes, `samples` compares witnesses, `publish` makes the result exist.
"""
