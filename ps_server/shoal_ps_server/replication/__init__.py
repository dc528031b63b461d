"""What servers send each other, so that a partition's state is on more than one of them, or on
another one.

A backup follows its primary's journal, and may take the primary's place (docs/decisions/0198):
`primary` is the side of the server that is followed, `standby` the side of the one that follows. A
server hands partitions over to another one (docs/decisions/0200): `giving` and `taking` are the two
sides. `items` is what goes from one to the other.
"""
