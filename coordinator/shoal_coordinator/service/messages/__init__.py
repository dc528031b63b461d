"""Conversion between protobuf messages and the values of the core.

`requests` parses messages, `checks` single fields of them, and `responses` composes messages.
"""
