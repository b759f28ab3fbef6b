"""What the tests of more than one folder share. No test is in here, and no test imports another one."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]  # the repository: where processes that import `tests` are started
