"""A backup on another server: it follows its primary's journal, and may take the primary's place (docs/decisions/0198).

`primary` is the side of the server that is followed, `standby` the side of the one that follows, and `items` what goes from one to the
other.
"""
