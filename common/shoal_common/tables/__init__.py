"""Sparse tables: rows by 64-bit id that come into being when they are first trained
(docs/decisions/0201).

`declaration` says how a table begins, is trained and forgets; `values` has the hash of ids and the
rows that nobody has trained, which are functions of id and seed; `rows` keeps those that somebody
has, on a parameter server or in a process of its own; `wire` is how they travel, and `file` how a
whole bucket does, and lies in a checkpoint.
"""
