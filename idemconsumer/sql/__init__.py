"""The SQL, one file a subject, and how a statement is loaded by its name.

Knows the schema's name and the numbers of stored states, and nothing of connections, messages or rules.
"""
