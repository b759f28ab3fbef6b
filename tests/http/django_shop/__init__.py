"""A project of Django: its settings, its urls, and what a server imports, `wsgi` and `asgi`."""
