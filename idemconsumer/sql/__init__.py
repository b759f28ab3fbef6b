"""The SQL, one file per subject, and the loader that finds a statement by its name.

Knows the schema's name and the numbers of stored states, but nothing about connections, messages or rules.
"""
