"""Tables in docs/ are those that their command writes."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_table_of_formats_is_current() -> None:
    done = subprocess.run([sys.executable, str(TOOLS / "format_table.py"), "--check"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
