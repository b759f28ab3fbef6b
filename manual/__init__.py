"""The manual: the reference made of the code, and the site made of that and docs/. `python -m manual` makes both."""
