"""What the tests of more than one folder share. No test is in here, and no test imports another one."""
