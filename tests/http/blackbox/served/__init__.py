"""The services under test: one for FastAPI, one for Flask, one for Django. They import nothing of the tests."""
