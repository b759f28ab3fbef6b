"""The broker adapters, one folder or file each, chosen by the scheme of a source.

Code that only one broker needs is in its adapter. The adapters use the ports, and no engine.
"""
