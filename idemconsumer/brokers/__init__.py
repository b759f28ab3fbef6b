"""The broker adapters, a folder or a file each, and how one is had by the scheme of a source.

Whatever one broker alone must do is done in its adapter. Knows the ports, and no engine.
"""
