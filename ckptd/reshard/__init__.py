"""Resharding from disk to disk: a checkpoint of one layout written as one of another.

`source` describes the checkpoint that is read, `layouts` the programs of both sides. `compose`
combines them, and `target` makes of that the tables of the checkpoint that is written. `plan` says
what fills each chunk and cuts the work into rounds that fit the budget; `reading` brings and
scatters, `execute` writes; `verify` compares witnesses on the way. `job` does one share of the
files, and commits when none is missing. `prepare` is all of that for one command.
"""
