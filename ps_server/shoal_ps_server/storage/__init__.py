"""What makes a server's state last: a change is written here before it is made, and answered after
that (docs/decisions/0189).

`changes` takes every change through the `journal`, whose bytes are `record`s in `segments`. A
`snapshot` of the server's `image` takes the place of a journal that has grown; `keeper` says when.
Both lie in a data `directory`; `recovery` makes a server out of them. `moves` has which partitions
are on their way to another server or from one.
"""
