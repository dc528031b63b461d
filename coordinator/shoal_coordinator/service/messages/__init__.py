"""Conversion between protobuf messages and the values of the core.

`requests` parses messages and uses `checks` to validate their fields; `responses` composes
messages.
"""
