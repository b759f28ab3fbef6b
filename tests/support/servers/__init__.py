"""The real servers of the tests, each started on free ports of 127.0.0.1 in a scratch folder of its own."""
