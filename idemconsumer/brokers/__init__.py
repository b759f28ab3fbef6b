"""The broker adapters, a folder or a file each, chosen by the scheme of a source.

What only one broker must do is done in its adapter. Knows the ports, and no engine.
"""
