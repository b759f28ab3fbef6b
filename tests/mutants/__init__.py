"""Rules taken out of the code one by one, to see that their tests notice: `make mutants`."""
