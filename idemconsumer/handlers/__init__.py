"""What a user writes: the decorator, its options, and everything that is known of a handler once it is imported.

Everything that can be read off a function is read here, once. Nothing here runs a handler or claims a key.
"""
